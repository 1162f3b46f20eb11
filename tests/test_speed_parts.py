"""The floor, the profile and the arithmetic of communication: on tiny models, by counts and not by clocks."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import comm_overhead as two
from benchmarks import communication, profile, scaling
from benchmarks import roofline as floor
from benchmarks.communication import LINKS, Collective, collectives
from recipe.config import ModelConfig
from recipe.data.tokenizer import VOCAB_SIZE
from recipe.engine import device as hardware
from recipe.errors import UserError
from recipe.estimate import cost
from recipe.estimate.memory import flops_per_token, parameter_count
from tests.conftest import ROOT, environment

CPU = torch.device("cpu")
SMALL = ModelConfig(n_layer=2, n_head=2, n_embd=16, n_positions=32)
GPT2 = ModelConfig()


@pytest.fixture(scope="module")
def figures():
    return floor.measure_floor(SMALL, 2, 16, CPU, "fp32", actual=1e4, seconds=0.01, copy_bytes=2**20)


def test_the_floor_is_the_sum_of_its_parts(figures):
    assert figures["floor"] == pytest.approx(sum(figures["parts"].values()))
    assert all(value > 0 for name, value in figures["parts"].items() if name != "casts and gradients")
    assert figures["parts"]["casts and gradients"] == 0  # fp32, and one micro-step: dW is the gradient
    assert figures["floor_of_actual"] == pytest.approx(figures["floor"] / 1e4)
    timed = sum(line["count"] * line["seconds"] for line in figures["gemms"])
    products = figures["parts"]["block products"] + figures["parts"]["head products"]
    assert products == pytest.approx(1e6 * timed / 32)
    assert figures["parts"]["logits"] == pytest.approx(1e6 * 3 * 4 * VOCAB_SIZE / figures["copy_bandwidth"])
    assert [line["count"] for line in figures["gemms"]] == [2] * 12 + [1] * 3
    for line in figures["gemms"]:
        flops = 2 * line["m"] * line["k"] * line["n"]
        assert line["flops_per_second"] == pytest.approx(flops / line["seconds"])
        assert line["flops_per_second"] <= figures["matmul_peak"]
    json.dumps(figures)


def test_the_floor_is_told_with_the_share_of_the_actual_time(figures):
    text = "\n".join(floor.lines(figures))
    assert f"floor/actual {100 * figures['floor'] / 1e4:.1f} %" in text
    assert f"floor/actual {100 * figures['floor'] / 500:.1f} %" in "\n".join(floor.lines(figures, 500.0))
    for name in (*figures["parts"], "qkv", "attention out", "mlp up", "mlp down", "head"):
        assert f"  {name} " in text


@pytest.mark.parametrize("pad", [1, 128])
@pytest.mark.parametrize("model", [SMALL, GPT2])
def test_the_floor_multiplies_what_the_plan_counts(model, pad):
    """The plan's 6 N counts biases and layer norms, which are not multiplied, and attention, which is timed apart; the
    floor counts the rows that the head is padded by."""
    D, L, T = model.n_embd, model.n_layer, 64
    products = floor.gemms(model, 2 * T, pad)
    counted = sum(g.count * g.flops for g in products) / (2 * T)
    padding = {1: 0, 128: 47}[pad]
    not_products = 6 * (13 * L * D + 2 * D) + 12 * L * D * T
    assert counted == flops_per_token(model, T) - not_products + 6 * padding * D


def test_the_products_are_those_that_the_model_makes():
    """Shapes and layouts of the floor's products beside those that the profiler sees in forward and backward."""
    from transformers import GPT2Config

    from recipe.model.gpt2 import GPT2LMHeadModel

    sizes = {name: getattr(SMALL, name) for name in ("n_layer", "n_head", "n_embd", "n_positions")}
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB_SIZE, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **sizes), pad_vocab_to=128
    )
    rows = torch.randint(0, VOCAB_SIZE, (2, 17))
    with torch.profiler.profile(record_shapes=True) as profiler:
        model(rows[:, :-1], rows[:, 1:]).backward()
    seen = {}
    for event in profiler.key_averages(group_by_input_shape=True):
        if event.key in ("aten::mm", "aten::addmm"):
            (m, k), (k2, n) = event.input_shapes[-2 if event.key == "aten::mm" else 1 :][:2]
            assert k == k2
            seen[m, k, n] = seen.get((m, k, n), 0) + event.count
    wanted = {}
    for g in floor.gemms(SMALL, 32, 128):
        shape = (g.m, g.k, g.n)
        if g.name != "head" and g.part == "dW" and (g.n, g.k, g.m) in seen:  # PyTorch may compute it transposed
            shape = shape[::-1]
        wanted[shape] = wanted.get(shape, 0) + g.count
    assert seen == wanted


def test_the_least_traffic_of_a_step_by_hand():
    """124M, 8 x 1024 tokens, bf16, two micro-steps: counted on paper."""
    moved = floor.traffic(GPT2, 8192, accumulation=2, half=True)
    N, matrices = 124_439_808, 50257 * 768 + 12 * 12 * 768**2
    assert moved["gelu"] == 2 * 768 * 12 * 20
    assert moved["norms and residuals"] == 2 * 768 * (12 * 22 + 5)
    assert moved["logits"] == 6 * 50257
    assert moved["embedding"] == 768 * 16
    assert moved["optimizer"] == 32 * N / 16384
    # a cast (4 + 2) in each micro-step; a gradient turned to fp32 (2 + 4), then one added (2 + 4 + 4)
    assert moved["casts and gradients"] == pytest.approx(matrices * (12 + 6 + 10) / 16384)
    assert floor.traffic(GPT2, 8192, 2, half=False)["casts and gradients"] == pytest.approx(matrices * 12 / 16384)


def test_a_measured_peak_is_that_of_the_fastest_product(monkeypatch):
    monkeypatch.setattr(hardware, "median_seconds", lambda *_: 0.5)
    assert floor.measured_matmul_peak(CPU, "bf16") == 2 * 2048**3 / 0.5
    assert floor.copy_bandwidth(CPU, 2**20) == 2 * 2**20 / 0.5


def test_a_precision_that_cannot_be_timed_is_a_users_mistake():
    with pytest.raises(UserError, match="precision 'fp8' cannot be timed; choose from fp32, tf32, bf16, fp16"):
        floor.measure_floor(SMALL, 1, 16, CPU, "fp8")
    with pytest.raises(UserError, match="precision 'fp8' cannot be timed"):
        floor.measured_matmul_peak(CPU, "fp8")


def test_fp32_is_multiplied_as_the_engine_does_and_the_setting_is_put_back():
    before = torch.get_float32_matmul_precision()
    for precision, wanted in (("fp32", "highest"), ("tf32", "high"), ("bf16", "high")):
        with floor._matmul_precision(precision):
            assert torch.get_float32_matmul_precision() == wanted
        assert torch.get_float32_matmul_precision() == before


# Names as the profiler shows them on V100 to H100, and on a CPU.
NAMES = {
    "gemm": [
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn",
        "turing_fp16_s1688gemm_fp16_256x128_ldg8_f2f_tn",
        "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_"
        "warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>(Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>",
        "aten::addmm",
        "aten::mm",
        "aten::bmm",
        "triton_tem_fused_addmm_12",
        "triton_mm_137",
        "void gemv2T_kernel_val<int, int, float, float, float, float>",
        "mkldnn::_linear_pointwise",
        "mkl::_mkl_linear",
        "triton_tem_fused_mm_t_view_3",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, "
        "cutlass::bfloat16_t>>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_128x128x64_4x1x1_cga1x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_64x128x64_1x1x1_cga1x1x1_kernel0_0",
        "fmha_cutlassF_f16_aligned_64x64_rf_sm75(PyTorchMemEffAttention::AttentionKernel<cutlass::half_t>::Params)",
        "fmha_cutlassB_bf16_aligned_128x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel)",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, float, 10, false, false>",
        "aten::_softmax",
        "triton_tem_fused_flex_attention_2",
    ],
    "elementwise": [
        "triton_red_fused__to_copy_add_native_layer_norm_native_layer_norm_backward_16",
        "triton_poi_fused_gelu_gelu_backward_15",
        "triton_per_fused_add_native_layer_norm_4",
        "triton_poi_fused_add_tanh_mul_5",
        "triton_red_fused_sum_view_18",
        "graph_0_cpp_fused_native_layer_norm_3",
        "cpp_fused_add_mul_pow_tanh_7",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, false>",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float, 64u, 1u>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)>",
        "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16, at::native::func_wrapper_t>>",
        "aten::native_layer_norm_backward",
        "aten::gelu",
        "aten::add_",
        "aten::sum",
        "aten::native_dropout",
    ],
    "loss": [
        "triton_red_fused__log_softmax__to_copy_nll_loss_forward_20",
        "triton_red_fused__log_softmax_backward_data_21",
        "triton_red_fused__to_copy_prepare_softmax_online_view_11",
        "aten::_log_softmax_backward_data",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float, at::native::(anonymous "
        "namespace)::LogSoftMaxForwardEpilogue>",
        "aten::nll_loss_forward",
        "_ChunkedLossSum",
        "aten::gather",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>",
    ],
    "embedding": [
        "triton_poi_fused_embedding_dense_backward_30",
        "triton_per_fused_add_arange_embedding_native_layer_norm_0",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>",
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)",
        "void at::native::(anonymous namespace)::compute_grad_weight<float, long>",
        "aten::embedding_dense_backward",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::DeviceRadixSortPolicy>",
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float, float, long>",
    ],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>>",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::TensorListMetadata<1>, at::"
        "native::LpNormFunctor<float, (at::native::NormType)1, float, 1, 1, 0>>",
        "aten::_fused_adamw_",
        "Optimizer.step#AdamW.step",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float, float>>>",
        "aten::linalg_vector_norm",
        "aten::_foreach_norm",
        "Optimizer.zero_grad#AdamW.zero_grad",
    ],
    "copies": [
        "Memcpy DtoD (Device -> Device)",
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
        "aten::copy_",
        "aten::fill_",
        "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(at::TensorIterator&)>",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1>>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned, 3, 64, 64>",
        "triton_poi_fused__to_copy_2",
        "triton_poi_fused__to_copy_constant_pad_nd_1",
        "triton_poi_fused_cat_14",
        "aten::cat",
        "triton_poi_fused__to_copy_t_9",
        "triton_poi_fused_clone_transpose_view_6",
    ],
    "communication": [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "gloo:all_reduce",
        "nccl:all_reduce",
        "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
        "c10d::allreduce_",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "c10d::_allgather_base_",
    ],
    "framework": [
        "aten::empty",
        "aten::view",
        "aten::as_strided",
        "autograd::engine::evaluate_function: AddmmBackward0",
        "AddmmBackward0",
        "torch::autograd::AccumulateGrad",
        "aten::transpose",
        "aten::_local_scalar_dense",
        "Torch-Compiled Region: 0/0",
        "DistributedDataParallel.forward",
        "cudaLaunchKernel",
    ],
    "compiled": ["## Call CompiledFxGraph fuyusfq4avqky5kuwamkeahsqnaakymexj5xxvu5k4r7ouz7qcjz ##"],
    "other": ["a_kernel_of_tomorrow", "triton_poi", "void mystery<float>(int)"],
}


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in NAMES.items() for name in names])
def test_a_kernel_is_known_by_its_name(group, name):
    assert profile.classify(name) == group


def test_every_group_has_its_names():
    assert set(NAMES) == set(profile.GROUPS)


@pytest.mark.parametrize(
    ("index", "kinds"),
    [
        (0, ["flash"]),
        (2, ["cudnn"]),
        (4, ["efficient"]),
        (6, ["flash"]),
        (slice(0, 5), ["cudnn", "flash", "efficient"]),
        (slice(8, 9), []),
    ],
)
def test_the_implementation_of_attention_is_named(index, kinds):
    names = NAMES["attention"][index]
    assert profile.sdpa_kernels([names] if isinstance(names, str) else names) == kinds
    assert profile.sdpa_kernels(["aten::_scaled_dot_product_attention_math", "aten::bmm"]) == ["math"]
    assert profile.sdpa_kernels(["aten::_scaled_dot_product_cudnn_attention"]) == ["cudnn"]


STEP = [
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=64",
    "--sequence_length=64",
    "--micro_batch_size=2",
    "--total_batch_tokens=256",
    "--precision=fp32",
]


@pytest.fixture(scope="module")
def profiled():
    """In a process of its own: the engine's precision and threads are the process's."""
    code = (
        "import json, sys; from benchmarks import profile\n"
        "step, device = profile.recipe_step(sys.argv[1:]); print(json.dumps(profile.profile_step(step, device, 2)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, *STEP], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_the_shares_of_a_step_add_up_and_little_is_unknown(profiled):
    assert list(profiled["shares"]) == list(profile.GROUPS)
    assert sum(profiled["shares"].values()) == pytest.approx(1)
    assert sum(profiled["seconds"].values()) == pytest.approx(profiled["accounted_seconds"])
    assert 0 < profiled["accounted_seconds"] <= 1.05 * profiled["wall_seconds"]
    assert profiled["shares"]["other"] < 0.15
    for group in ("gemm", "attention", "elementwise", "loss", "embedding", "optimizer", "copies", "framework"):
        assert profiled["seconds"][group] > 0, group
    assert profiled["seconds"]["communication"] == profiled["seconds"]["compiled"] == 0
    assert profiled["shares"]["gemm"] > profiled["shares"]["embedding"]
    assert profiled["sdpa"] == ["flash"]
    for group, share in profiled["shares"].items():  # all of a group is counted, not its last
        assert sum(line["share"] for line in profiled["top"] if line["group"] == group) <= share + 1e-9


def test_the_profile_names_what_it_does_not_know(profiled):
    changed = profiled | {
        "unknown": [{"name": "void mystery<float>(int)", "group": "other", "share": 0.02}],
        "sdpa": [],
    }
    text = "\n".join(profile.lines(changed))
    assert "not known to any group\n    2.0 %  void mystery<float>(int)" in text
    assert "no kernel of SDPA was seen" in text
    assert "attention  flash" in "\n".join(profile.lines(profiled))
    assert profiled["top"][0]["share"] == max(line["share"] for line in profiled["top"])


def test_what_the_profiler_counts_is_what_was_done():
    """Two products a step, three steps: their time is theirs alone."""
    a = torch.randn(256, 256)
    calls = []

    def step():
        calls.append(1)
        torch.mm(a, a)
        torch.mm(a, a)

    figures = profile.profile_step(step, CPU, steps=3)
    assert len(calls) == 5  # two to warm up
    assert figures["shares"]["gemm"] > 0.5
    assert figures["top"][0]["name"] == "aten::mm"
    assert figures["top"][0]["share"] <= figures["shares"]["gemm"]


# Communication. GPT-2 124M: V D = 38,597,376; wpe 786,432; linear layers 12 (12 D^2 + 9 D) = 85,017,600.
N, EMBEDDINGS, LINEAR = 124_439_808, 39_383_808, 85_017_600
MIXED = 2 * LINEAR + 4 * (N - LINEAR)


def test_the_bytes_of_a_step_by_hand():
    assert parameter_count(GPT2) == N
    assert collectives("ddp", GPT2) == [Collective("all_reduce", 497_759_232, 497_759_232 - 4 * EMBEDDINGS)]
    assert collectives("zero1", GPT2) == [
        Collective("all_reduce", MIXED, MIXED - 4 * EMBEDDINGS),
        Collective("all_gather", 4 * N, 0),
    ]
    assert collectives("zero1", GPT2, half=False)[0].size == 4 * N
    assert collectives("zero2", GPT2, accumulation=3)[0].size == 3 * MIXED
    gather, reduce = collectives("zero3", GPT2, accumulation=3)
    assert (gather.kind, gather.size, reduce.kind, reduce.size) == (
        "all_gather",
        6 * MIXED,
        "reduce_scatter",
        3 * MIXED,
    )
    assert sum(c.size for c in collectives("llm.c", GPT2)) == 4 * N
    with pytest.raises(UserError, match="strategy 'fsdp' is not known"):
        collectives("fsdp", GPT2)


@pytest.mark.parametrize(
    ("kind", "world", "expected"),
    [
        # 8 GB at 4 GB/s within a node and 2 GB/s between nodes: 7/8 of it within; 2 nodes send half, 4 nodes 3/4
        ("all_gather", 8, 7 / 4),
        ("reduce_scatter", 8, 7 / 4),
        ("all_reduce", 8, 7 / 2),
        ("all_reduce", 2, 2 * 4 / 4),
        ("all_gather", 16, 7 / 4 + 4 / 2),
        ("all_reduce", 32, 7 / 2 + 2 * 6 / 2),
        ("all_reduce", 1, 0),
    ],
)
def test_seconds_of_a_collective_by_hand(kind, world, expected):
    assert communication.seconds(Collective(kind, 8e9), world, 4e9, 2e9) == pytest.approx(expected)
    assert communication.seconds(Collective(kind, 8e9), world, 4e9, 2e9, 0.5) == pytest.approx(2 * expected)


def test_devices_must_fill_their_nodes():
    with pytest.raises(UserError, match="12 devices do not fill nodes of 8"):
        communication.seconds(Collective("all_reduce", 1.0), 12, 1.0, 1.0)


def test_a_prediction_by_hand():
    """64 H100 at 36.2 %: 8 sequences each in one micro-step, 19.57 ms; DDP over NVLink and eight adapters."""
    row = scaling.predict("H100", "124M", "ddp", 64)
    compute = 8192 * flops_per_token(GPT2, 1024) / (0.362 * 989e12)
    talk = 2 * 4 * N * (7 / 8 / 450e9 + 7 / 8 / 400e9) / 0.8
    assert (row["micro_batch"], row["accumulation"], row["small_micro_batch"]) == (8, 1, True)
    assert row["compute_ms"] == pytest.approx(1e3 * compute)
    assert row["talk_ms"] == pytest.approx(1e3 * talk)
    hidden = talk * (1 - EMBEDDINGS / N)
    assert hidden < 2 / 3 * compute  # it all goes behind backward
    assert row["exposed_ms"] == pytest.approx(1e3 * (talk - hidden))
    assert row["tokens_per_second"] == pytest.approx(524288 / (compute + talk))
    assert row["share_exposed"] == pytest.approx((talk - hidden) / (compute + talk - hidden))


def test_backward_hides_no_more_than_its_own_length():
    row = scaling.predict("A100", "1558M", "ddp", 512)
    assert row["micro_batch"] == 1
    assert row["exposed_ms"] == pytest.approx(row["talk_ms"] - 2 / 3 * row["compute_ms"])
    alone = scaling.predict("A100", "124M", "ddp", 1)
    assert (alone["talk_ms"], alone["exposed_ms"], alone["accumulation"]) == (0, 0, 8)
    many = scaling.predict("A100", "124M", "zero2", 8, mfu=0.5)  # one micro-step: like stage 1
    assert many["exposed_ms"] == pytest.approx(scaling.predict("A100", "124M", "zero1", 8, mfu=0.5)["exposed_ms"])


@pytest.mark.parametrize(
    ("strategy", "micro_steps"), [("ddp", 2 / 3), ("zero1", 2 / 3), ("zero2", 4 * 2 / 3), ("zero3", 4)]
)
def test_what_hides_communication_is_by_strategy(monkeypatch, strategy, micro_steps):
    """Over links so slow that there is always more to hide: the last of four micro-steps' backward, or every one's, or
    all that is computed."""
    monkeypatch.setattr(scaling, "BUS_EFFICIENCY", 1e-4)
    row = scaling.predict("A100", "1558M", strategy, 8)
    assert row["accumulation"] == 4
    assert row["talk_ms"] - row["exposed_ms"] == pytest.approx(micro_steps * row["compute_ms"] / 4)


def test_the_table_has_every_case_and_efficiencies_beside_eight():
    rows = scaling.table()
    cases = {(r["model"], r["gpu"], r["strategy"], r["devices"]) for r in rows}
    assert len(rows) == len(cases) == 2 * 2 * 2 * 3
    by_case = {(r["model"], r["gpu"], r["strategy"], r["devices"]): r for r in rows}
    for r in rows:
        eight = by_case[r["model"], r["gpu"], r["strategy"], 8]
        assert r["efficiency"] == pytest.approx(r["tokens_per_second"] / eight["tokens_per_second"] * 8 / r["devices"])
        assert r["efficiency"] <= r["efficiency_hidden"] <= 1 + 1e-9
        assert r["tokens_per_second"] <= r["tokens_per_second_hidden"]
    json.dumps(rows)


def test_published_figures_stand_beside_the_predicted_ones():
    """A change of a formula that moves a prediction away from what was published must be seen."""
    found = {row["name"]: row for row in scaling.anchors()}
    assert len(found) == 4
    for row in found.values():
        assert row["ratio"] == pytest.approx(row["predicted"] / row["published"])
        assert 0.95 < row["ratio"] < 1.1, row
    text = "\n".join(scaling.lines())
    assert "llm.c 124M, 8 x A100, 300 ms" in text
    assert "published 1.750 M" in text
    assert "512 x H100" in text
    for name in LINKS:
        assert name in text


def test_the_time_over_one_link_by_hand():
    found = {(r["link"], r["model"]): r for r in scaling.by_link()}
    assert found["PCIe 3 x16", "124M"]["ddp"] == pytest.approx(1e3 * 4 * N / 16e9 / 0.8)
    assert found["NVLink 3", "124M"]["zero1"] == pytest.approx(1e3 * 7 / 8 * (2 * MIXED + 4 * N) / 300e9 / 0.8)


@pytest.fixture(scope="module")
def measured():
    model = ModelConfig(n_layer=1, n_head=2, n_embd=16, n_positions=16)
    options = {"sequence_length": 16, "micro_batch": 1, "rounds": 1, "steps": 1, "precision": "bf16"}
    return model, two.measure_two(("ddp", "zero1"), model, **options)


def test_two_processes_are_measured_with_communication_and_without(measured):
    model, found = measured
    assert list(found) == ["ddp", "zero1"]
    for strategy, figures in found.items():
        if "note" in figures:
            assert not hardware.has_deepspeed()
            continue
        assert (figures["world"], figures["precision"]) == (2, "bf16")
        assert figures["parameters"] == parameter_count(model)
        assert figures["processes_agree"] == {"with": True, "without": False}
        assert len(figures["shares"]) == 1
        assert figures["share"] == figures["shares"][0] < 1
        assert min(figures["seconds_with"], figures["seconds_without"], figures["link_seconds"]) > 0
        assert figures["link_bytes"] == 4 * parameter_count(model)
        assert figures["bus_bandwidth"] == pytest.approx(figures["link_bytes"] / figures["link_seconds"])
        sent = sum(c.sent(2) for c in collectives(strategy, model))
        assert figures["bytes_sent"] == sent
        talk = sent / figures["bus_bandwidth"]
        assert figures["predicted_share"] == pytest.approx(talk / (talk + figures["seconds_without"]))
    text = "\n".join(two.lines(found | {"zero2": {"note": "DeepSpeed is not installed"}}))
    assert "DDP over 2 processes" in text
    assert "zero2  DeepSpeed is not installed" in text


@pytest.mark.skipif(not hardware.has_deepspeed(), reason="needs DeepSpeed, which is installed on Linux only")
def test_deepspeed_sends_the_bytes_that_are_reckoned(measured):
    """All gradients are summed everywhere, most of them in bf16, and the weights gathered in fp32; what is more is
    scalars and padding."""
    model, found = measured
    reduced, gathered = collectives("zero1", model)
    left_out = found["zero1"]["left_out"]
    assert 0 <= left_out["all_reduce"] - reduced.size <= 64
    assert 0 <= left_out["all_gather_into_tensor"] - gathered.size <= 64


def test_a_strategy_that_cannot_be_measured_is_a_users_mistake(monkeypatch):
    with pytest.raises(UserError, match="'zero3' cannot be measured; choose from ddp, zero1, zero2"):
        two.measure_two(("zero3",))
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="\nerror: no such thing\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UserError, match="two processes of ddp failed: error: no such thing"):
        two.measure_two(("ddp",))


def test_the_cost_of_a_published_run_is_what_it_cost():
    """karpathy/llm.c, discussion 677: 1558M on 8 H100 in 24 h for $672, $28 an hour of the node, at about 50 % MFU."""
    rows = {(r["recipe"], r["devices"], r["device"]): r for r in cost.table(0.5, 3.5)}
    row = rows["gpt2-xl", 8, "H100"]
    assert row["hours"] == pytest.approx(24, rel=0.05)
    assert row["dollars"] == pytest.approx(672, rel=0.05)
    assert row["device_hours"] == pytest.approx(rows["gpt2-xl", 1, "H100"]["hours"])
    # llm.c's run on 8 A100s: 1.59 M tokens/s, 10 B tokens in 1 h 47
    mfu = 1.59e6 * rows["gpt2", 8, "A100"]["flops"] / rows["gpt2", 8, "A100"]["tokens"] / (8 * 312e12)
    quick = next(r for r in cost.table(mfu) if (r["recipe"], r["devices"], r["device"]) == ("gpt2", 8, "A100"))
    assert quick["hours"] == pytest.approx(1 + 47 / 60, rel=0.03)
    assert quick["dollars"] is None
    assert "$" not in "".join(cost.lines([quick], 0.0)).replace("--price_per_hour", "")
