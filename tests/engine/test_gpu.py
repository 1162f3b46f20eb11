"""What needs a GPU: 50 steps in each precision against the CPU's losses, kernels, memory. `make test ARGS="-k gpu"`

NCCL does not allow several processes on one GPU: DDP, ZeRO and FSDP over several ranks are tested on CPU processes.
"""

import dataclasses
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from eval import hellaswag
from recipe.config import batch_arithmetic, parse_config
from recipe.estimate.memory import step_memory
from recipe.model.loss import IGNORE_INDEX, next_token_loss
from tests.conftest import EQUAL, ROOT, TINY, flags, forget_after, launch, metrics, ok
from tests.model.loss_probe import distances, relative

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
# A CPU's losses, not recomputed during the time of a rented GPU; test_engines.py checks that they are current.
REFERENCE = ROOT / "tests" / "engine" / "cpu_losses.json"
BF16 = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)


def curve(shards, run, config: str, cpu: bool, **fields) -> list[float]:
    sizes = {"sequence_length": 32, "total_batch_tokens": 256}
    arguments = flags(**EQUAL | sizes | {"dataset_name": shards, "output_dir": run} | fields)
    ok(launch(config, 1, "recipe/train.py", *arguments, env={"ACCELERATE_USE_CPU": str(cpu).lower()}))
    return [line["loss"] for line in metrics(run) if line["loss"] is not None]


@pytest.fixture(scope="module")
def reference():
    return json.loads(REFERENCE.read_text())


@pytest.fixture
def half_of_a_cpu_run(shards, once):
    """A run on the CPU as it was after step 25."""

    def make(directory):
        curve(shards, directory, "single", cpu=True)
        forget_after(25, directory)

    return once("cpu-run", make)[0]


COMPILED = {"torch_compile": "true", "gradient_checkpointing": "true"}  # the large recipes ask for both


@pytest.mark.parametrize("config", ["single", "zero1", "zero3", "fsdp"])
@pytest.mark.parametrize(
    ("precision", "options", "tolerance"),
    [
        ("fp32", {"fused_loss": "false"}, 1e-3),
        ("tf32", {}, 2e-2),
        ("bf16", {}, 2e-2),
        ("bf16", COMPILED, 2e-2),
        ("fp16", {}, 2e-2),
        ("fp16", COMPILED, 2e-2),
        ("fp32", {"fused_loss": "true"}, 1e-3),
        ("fp32", {"fused_loss": "true", "loss_chunk_size": "50"}, 1e-3),
        ("auto", {"fused_loss": "true", "torch_compile": "true"}, 2e-2),
        ("auto", {"fused_loss": "false", "torch_compile": "true"}, 2e-2),
    ],
    ids=str,
)
def test_gpu_follows_the_cpu(shards, reference, tmp_path, config, precision, options, tolerance):
    if precision in ("bf16", "tf32") and not BF16:
        pytest.skip(f"{torch.cuda.get_device_name()} has no {precision}")
    if config == "fsdp" and (precision == "fp16" or (precision == "auto" and not BF16)):
        pytest.skip("fp16 is refused")
    losses = curve(shards, tmp_path / "run", config, cpu=False, precision=precision, **options)
    assert losses == pytest.approx(reference, abs=tolerance)
    assert all(t.dtype == torch.float32 for t in load_file(tmp_path / "run/step_00000050/model.safetensors").values())


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 2e-3), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("options", [{"rows": 1001}, {"rows": 1}, {"rows": 1001, "chunk_size": 300}], ids=str)
def test_gpu_computes_the_fused_loss(dtype, tolerance, options):
    if dtype == "bfloat16" and not BF16:
        pytest.skip(f"{torch.cuda.get_device_name()} has no bf16")
    torch.backends.cuda.matmul.allow_tf32 = False
    errors = distances(dtype, vocab_size=50257, pad_vocab_to=128, device="cuda", **options)
    assert max(errors) < tolerance


def test_gpu_computes_the_fused_loss_of_more_logits_than_32_bits_index():
    """The last rows of 64 x 1024, beyond element 2^31, have the gradient that they have alone."""
    if torch.cuda.get_device_properties(0).total_memory < 16e9:
        pytest.skip("needs 16 GB")
    torch.manual_seed(1)
    hidden, weight = (torch.randn(n, 64, device="cuda").half() for n in (65536, 50304))
    targets = torch.randint(50257, (65536,), device="cuda")
    targets[:-9] = IGNORE_INDEX
    grads = []
    for rows in (slice(None), slice(-9, None)):
        h = hidden[rows].clone().requires_grad_()
        next_token_loss(h[None], weight, targets[None, rows], fused=True).backward()
        grads.append(h.grad[-9:])
    assert relative(*grads) < 0.01


@pytest.mark.parametrize("config", ["single", "zero1", "zero3", "fsdp"])
def test_gpu_resumes_what_the_cpu_saved(shards, reference, half_of_a_cpu_run, tmp_path, config):
    shutil.copytree(half_of_a_cpu_run, tmp_path / "run")
    losses = curve(shards, tmp_path / "run", config, cpu=False)
    assert losses[25:] == pytest.approx(reference[25:], abs=1e-3)


@pytest.mark.parametrize(
    ("dtype", "share", "tolerance"),
    [("float32", True, 1e-2), ("float32", False, 1e-2), ("bfloat16", True, 1.5), ("float16", True, 0.5)],
)
def test_gpu_scores_hellaswag_as_the_cpu(tiny_gpt2, dtype, share, tolerance):
    """Scores are sums over some 30 tokens, of tens of nats."""
    rows, scores = hellaswag.load_rows()[::500], []
    for device, device_dtype in (("cpu", torch.float32), ("cuda", getattr(torch, dtype))):
        loaded = tiny_gpt2(n_positions=256)
        loaded.model.to(device, device_dtype)
        model = dataclasses.replace(loaded.lm, device=torch.device(device), shares_contexts=share)
        scores.append(hellaswag.score_rows(model, rows))
    for style in hellaswag.STYLES:
        (cpu, _), (gpu, _) = (score[style] for score in scores)
        assert gpu == pytest.approx(cpu, abs=tolerance)


# Large enough for the kernels' buffers to be small in comparison, small enough for any GPU.
SIZED = {"n_layer": 4, "n_head": 4, "n_embd": 256, "n_positions": 512, "sequence_length": 512}
SIZED |= {"total_batch_tokens": 8192, "max_steps": 3, "warmup_steps": 1}
SIZED |= {"eval_steps": "end", "eval_tokens": 512, "save_steps": "end"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "fp32"},
        {"gradient_checkpointing": "true"},
        {"loss_chunk_size": 512},
        {"fused_loss": "true"},
        {"torch_compile": "true"},
        {"torch_compile": "true", "fused_loss": "true"},
        {"torch_compile": "true", "gradient_checkpointing": "true"},
    ],
    ids=str,
)
def test_gpu_peak_memory_is_that_estimated(shards, tmp_path, changes):
    settings = SIZED | {"micro_batch_size": 8, "precision": "auto", "fused_loss": "false"} | changes
    curve(shards, tmp_path / "run", "single", cpu=False, **settings)
    config = parse_config(flags(**TINY | settings | {"dataset_name": shards}))
    precision = config.run.precision if config.run.precision != "auto" else "bf16" if BF16 else "fp16"
    estimate = step_memory(
        config, batch_arithmetic(config, 1), precision=precision, compiled="torch_compile" in changes
    ).peak
    peak = max(line["peak_memory_bytes"] for line in metrics(tmp_path / "run"))
    # cuBLAS's workspaces count as allocated: on an H100 32 MiB for each of two threads.
    assert estimate == pytest.approx(peak, rel=0.1, abs=0.15e9)


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_gpu_finds_a_micro_batch_that_fits(shards, tmp_path, compiled):
    """With 3 GB to itself the run takes about 92 % of it at most, and twice the micro-batch would not have fitted."""
    total = 3.0
    settings = TINY | SIZED | {"dataset_name": shards, "total_batch_tokens": 64 * 512, "micro_batch_size": "auto"}
    settings |= {"torch_compile": compiled, "precision": "auto", "output_dir": tmp_path / "run"}
    env = {"ACCELERATE_USE_CPU": "false", "FIT_MEMORY": str(1e9 * total)}
    result = ok(launch("single", 1, "-m", "tests.estimate.micro_batch_probe", *flags(**settings), env=env))
    estimate = re.search(r"micro +\d+ sequences a device: (\S+) GB of 3 GB, an estimate", result.stdout)
    assert estimate, result.stdout
    peak = max(line["peak_memory_bytes"] for line in metrics(tmp_path / "run")) / 1e9
    assert 0.44 * total < peak <= 0.97 * total
    assert float(estimate[1]) == pytest.approx(peak, rel=0.1)
