"""The model against transformers' own: keys, logits, loss, gradients, an optimizer step, saving, generating."""

import base64
import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config

from recipe.config import OptimizerConfig
from recipe.errors import UserError
from recipe.model.attention import block_attention
from recipe.model.gpt2 import GPT2LMHeadModel, causal_attention
from recipe.model.loss import IGNORE_INDEX, next_token_loss
from recipe.optim.adamw import make_optimizer, named_state, norm_and_divisor
from tests.conftest import ASSETS

# The four sizes' widths and heads at two layers, with a smaller vocabulary for the wide ones: the shapes of a block
# are what differs between the sizes, their number is not.
SIZES = {
    "gpt2": {"n_embd": 768, "n_head": 12, "vocab_size": 50257},
    "gpt2-medium": {"n_embd": 1024, "n_head": 16, "vocab_size": 5003},
    "gpt2-large": {"n_embd": 1280, "n_head": 20, "vocab_size": 5003},
    "gpt2-xl": {"n_embd": 1600, "n_head": 25, "vocab_size": 5003},
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def config_of(size: str) -> GPT2Config:
    sizes = SIZES[size]
    return GPT2Config(n_layer=2, n_positions=128, bos_token_id=None, eos_token_id=None, **sizes, **NO_DROPOUT)


def pair(config: GPT2Config) -> tuple[GPT2LMHeadModel, transformers.GPT2LMHeadModel]:
    """Our model and transformers', with the same random weights; biases and norms too are random, to be told apart."""
    torch.manual_seed(0)
    ours = GPT2LMHeadModel(config)
    with torch.no_grad():
        for p in ours.parameters():
            if p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.1)
    theirs = transformers.GPT2LMHeadModel(config)
    missing, unexpected = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert missing == ["lm_head.weight"]
    assert unexpected == []
    return ours, theirs


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize("size", SIZES)
def test_equal_to_transformers(size, tmp_path):
    config = config_of(size)
    ours, theirs = pair(config)
    reference = theirs.state_dict()
    del reference["lm_head.weight"]
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in reference.items()}

    ids = torch.randint(config.vocab_size, (2, 48))
    theirs.train()  # no dropout: training and evaluation are the same function
    output = theirs(ids, labels=ids)
    assert relative(ours(ids), output.logits) < 1e-5
    loss = ours(ids[:, :-1], ids[:, 1:])
    assert loss.item() == pytest.approx(output.loss.item(), rel=1e-5)

    loss.backward()
    output.loss.backward()
    gradients = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        assert relative(p.grad, gradients[name].grad) < 1e-5, name

    settings = OptimizerConfig(learning_rate=3e-4, weight_decay=0.1)
    for model in (ours, theirs):
        make_optimizer(model, settings, fused=False).step()
    for name, p in ours.named_parameters():
        a, b = p, gradients[name]
        if name.endswith("c_attn.bias"):
            # A key's bias moves all scores of a row alike, so its gradient is zero but for rounding, whose sign
            # AdamW's first step makes as large as any other: queries and values alone can be compared.
            a, b = (t.unflatten(0, (3, -1))[[0, 2]] for t in (a, b))
        assert relative(a, b) < 1e-5, name

    save_file(ours.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours.save_config(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.lm_head.weight.data_ptr() == loaded.transformer.wte.weight.data_ptr()
    assert loaded.dtype == torch.float32
    with torch.no_grad():
        assert relative(loaded.eval()(ids).logits, ours(ids)) < 1e-5
        again = GPT2LMHeadModel.from_pretrained(str(tmp_path))
        assert torch.equal(again(ids), ours(ids))


@torch.no_grad()
def test_greedy_generation_gives_the_same_tokens():
    config = GPT2Config(
        n_layer=2,
        n_embd=64,
        n_head=4,
        n_positions=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        **NO_DROPOUT,
    )
    ours, theirs = pair(config)
    ids = torch.randint(config.vocab_size, (1, 5))
    expected = theirs.eval().generate(ids, max_new_tokens=30, do_sample=False, pad_token_id=0)
    for _ in range(30):
        ids = torch.cat([ids, ours(ids)[:, -1:].argmax(-1)], 1)
    assert torch.equal(ids, expected)
    assert len(set(ids[0].tolist())) > 10  # not one token over and over


def test_weight_decay_reaches_matrices_and_embeddings_only():
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=8, vocab_size=20, bos_token_id=None, eos_token_id=None)
    )
    before = {name: p.detach().clone().add_(1) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.data.copy_(before[name])
        p.grad = torch.zeros_like(p)  # without a gradient, decay alone moves a weight
    make_optimizer(model, OptimizerConfig(learning_rate=0.5, weight_decay=0.1), fused=False).step()
    for name, p in model.named_parameters():
        kept = 1 - 0.5 * 0.1 if p.ndim >= 2 else 1.0
        assert torch.allclose(p, before[name] * kept), name


def loss_and_grads(**options):
    torch.manual_seed(1)
    hidden = torch.randn(2, 25, 16, requires_grad=True)
    weight = torch.randn(503, 16, requires_grad=True)
    targets = torch.randint(503, (2, 25))
    targets[0, :7] = IGNORE_INDEX
    loss = next_token_loss(hidden, weight, targets, **options)
    (loss * 3).backward()  # as a loss scale would
    return loss, hidden.grad, weight.grad, F.cross_entropy((hidden @ weight.t()).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    "options", [{"chunk_size": 7}, {"chunk_size": 64}, {"pad_vocab_to": 64}, {"chunk_size": 7, "pad_vocab_to": 64}]
)
def test_chunks_and_padding_change_no_number(options):
    loss, *grads, plain = loss_and_grads()
    other, *other_grads, _ = loss_and_grads(**options)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    assert other.item() == pytest.approx(loss.item(), rel=1e-6)
    for grad, other_grad in zip(grads, other_grads, strict=True):
        assert relative(other_grad, grad) < 1e-6


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("options", [{}, {"pad_vocab_to": 64}])
def test_the_loss_by_rows_and_the_plain_one_are_exact(by_rows, options, monkeypatch):
    """Against fp64, with ignored positions, more rows than are taken at a time, and a target that is hopeless."""
    monkeypatch.setattr("recipe.model.loss._by_rows", lambda hidden: by_rows)
    torch.manual_seed(1)
    hidden, weight = torch.randn(2, 25, 16), torch.randn(503, 16)
    targets = torch.randint(503, (2, 25))
    targets[0, :7] = IGNORE_INDEX
    hidden[1, 3] = 30 * weight[5]  # sure of token 5, by hundreds of nats
    targets[1, 3] = (weight @ weight[5]).argmin()
    found = [t.clone().requires_grad_() for t in (hidden, weight)]
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    loss = next_token_loss(*found, targets, **options)
    expected = F.cross_entropy((exact[0] @ exact[1].t()).flatten(0, 1), targets.flatten())
    assert expected > 10
    (loss * 3).backward()
    (expected * 3).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for ours, theirs in zip(found, exact, strict=True):
        assert relative(ours.grad, theirs.grad) < 2e-6
    with torch.no_grad():
        assert next_token_loss(*found, targets, **options).item() == loss.item()


@pytest.mark.parametrize("chunk_size", [0, 4])
def test_nothing_to_predict_is_zero_and_bf16_autocast_stays_close(chunk_size):
    hidden, weight = torch.randn(2, 8, 16), torch.randn(50, 16)
    nothing = torch.full((2, 8), IGNORE_INDEX)
    assert next_token_loss(hidden, weight, nothing, chunk_size).item() == 0
    targets = torch.randint(50, (2, 8))
    exact = next_token_loss(hidden, weight, targets, chunk_size)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = next_token_loss(hidden, weight, targets, chunk_size)
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(exact.item(), abs=0.05)
    assert rounded.item() != exact.item()  # or autocast did nothing


def test_recomputation_and_chunks_give_the_same_gradients():
    config = GPT2Config(
        n_layer=3,
        n_embd=32,
        n_head=2,
        n_positions=32,
        vocab_size=211,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
    )
    ids = torch.randint(211, (2, 33))
    results = []
    for options in ({}, {"gradient_checkpointing": True}, {"loss_chunk_size": 16}, {"pad_vocab_to": 128}):
        model = GPT2LMHeadModel(config, **options).train()
        torch.manual_seed(5)  # dropout
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        results.append((loss.item(), [p.grad for p in model.parameters()]))
    for loss, grads in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        assert all(relative(a, b) < 1e-5 for a, b in zip(grads, results[0][1], strict=True))


def test_initial_weights_are_gpt2s():
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, **NO_DROPOUT), seed=3)
    for name, p in model.named_parameters():
        if p.ndim < 2:
            assert torch.equal(p, torch.full_like(p, float("ln" in name and name.endswith("weight")))), name
        else:
            expected = 0.02 / 8**0.5 if name.endswith("c_proj.weight") else 0.02
            assert p.std().item() == pytest.approx(expected, rel=0.02), name
    same = GPT2LMHeadModel(model.config, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    other = GPT2LMHeadModel(model.config, seed=4)
    assert not torch.equal(model.head_weight, other.head_weight)


def test_loads_openais_layout_and_names_what_does_not_fit(tmp_path):
    """OpenAI's files on the Hub have no `transformer.` prefix and carry the causal mask as a buffer."""
    config = GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=2,
        n_positions=16,
        vocab_size=99,
        bos_token_id=None,
        eos_token_id=None,
        **NO_DROPOUT,
    )
    model = GPT2LMHeadModel(config)
    model.save_config(tmp_path)
    old = {k.removeprefix("transformer."): v for k, v in model.state_dict().items()}
    old |= {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16).tril() for i in range(2)}
    old["h.0.attn.masked_bias"] = torch.tensor(-1e4)

    def load(tensors):
        save_file(tensors, tmp_path / "model.safetensors")
        return GPT2LMHeadModel.from_pretrained(str(tmp_path))

    loaded = load(old)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    with pytest.raises(UserError, match=r"missing transformer\.h\.1\.mlp\.c_fc\.bias"):
        load({k: v for k, v in old.items() if k != "h.1.mlp.c_fc.bias"})
    with pytest.raises(UserError, match=r"unexpected transformer\.h\.7\.ln_1\.bias"):
        load(old | {"h.7.ln_1.bias": torch.zeros(32)})
    with pytest.raises(UserError, match=r"wrong shape: transformer\.ln_f\.bias \[33\] for \[32\]"):
        load(old | {"ln_f.bias": torch.zeros(33)})
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"no model\.safetensors; pytorch_model\.bin and the like are pickles"):
        GPT2LMHeadModel.from_pretrained(str(tmp_path))
    with pytest.raises(UserError, match="no model there"):
        GPT2LMHeadModel.from_pretrained(str(tmp_path / "nowhere"))


def test_refuses_what_it_does_not_do():
    with pytest.raises(UserError, match="activation_function is 'relu'"):
        GPT2LMHeadModel(GPT2Config(activation_function="relu"))


@pytest.mark.skipif(not (ASSETS / "gpt-nano-sort").is_dir(), reason="needs gpt-nano-sort, which does not ship")
@torch.no_grad()
def test_a_really_trained_model_gives_its_authors_activations_and_sorts():
    """85,728 parameters that sort six letters of three; its author published the activations for one input."""
    model = GPT2LMHeadModel.from_pretrained(str(ASSETS / "gpt-nano-sort" / "hf")).eval()
    published = json.loads((ASSETS / "gpt-nano-sort" / "gpt-nano-sort-t0-partials.json").read_text())

    def activation(name: str) -> torch.Tensor:
        raw = bytearray(base64.b64decode(published[name]["data"]))
        return torch.frombuffer(raw, dtype=torch.float32).view(published[name]["shape"])

    ids = activation("idx").long()  # (3, 11)
    hidden = model.transformer.wte(ids) + model.transformer.wpe.weight
    for i, block in enumerate(model.transformer.h):
        hidden = block(hidden)
        assert (hidden - activation(f"block{i}")).abs().max() < 1e-4
    assert (model(ids).softmax(-1) - activation("probs")).abs().max() < 1e-5

    # Given six letters it continues with the same letters in order. Not a perfect sorter: 0.99 of all 729 inputs.
    letters = torch.cartesian_prod(*[torch.arange(3)] * 6)  # (729, 6)
    ids = letters
    for _ in range(6):
        ids = torch.cat([ids, model(ids[:, -11:])[:, -1:].argmax(-1)], 1)
    exact = (ids[:, 6:] == letters.sort(dim=1).values).all(1).float().mean().item()
    assert exact > 0.98


@pytest.mark.parametrize("max_norm", [0.05, 1e3, 0.0])
def test_clipping_inside_the_fused_step_is_clipping_before_it(max_norm):
    """torch's clip_grad_norm_ and then AdamW, against AdamW that divides: the same weights and moments."""

    def stepped(fold: bool):
        generator = torch.Generator().manual_seed(0)
        model = torch.nn.Linear(40, 30)
        for p in model.parameters():
            p.data.normal_(generator=generator)
            p.grad = torch.empty_like(p).normal_(generator=generator)
        optimizer = make_optimizer(model, OptimizerConfig(learning_rate=1e-2), fused=True)
        if fold:
            norm, optimizer.grad_scale = norm_and_divisor(model.parameters(), max_norm)
            optimizer.found_inf = torch.zeros(())
        else:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))
        optimizer.step()
        return norm, [*model.parameters(), *named_state(model, optimizer).values()]

    (norm, folded), (expected_norm, expected) = stepped(True), stepped(False)
    assert norm == expected_norm
    assert len(folded) == 6
    for a, b in zip(folded, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("T", [1, 100, 128, 300])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_attention_in_blocks_is_attention(T, dtype, tolerance):
    """Outputs and gradients against SDPA in fp64, of scores up to 16: as near as SDPA in the same type."""
    generator = torch.Generator().manual_seed(T)
    qkv = (2 * torch.randn(3, 2, 3, T, 16, generator=generator)).to(dtype)
    weight = torch.randn(2, 3, T, 16, generator=generator).to(dtype)

    def results(attend, kind: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(kind).requires_grad_() for t in qkv]
        out = attend(*leaves, 0.0)
        out.backward(weight.to(kind))
        return [out.detach().double(), *(t.grad.double() for t in leaves)]

    expected = results(causal_attention, torch.float64)
    both = (results(attend, dtype) for attend in (block_attention, causal_attention))
    for ours, sdpas, exact in zip(*both, expected, strict=True):
        scale = exact.norm() + 1  # of one position, q and k have no gradient
        assert (ours - exact).norm() / scale <= max(tolerance / 4, 1.5 * (sdpas - exact).norm() / scale)
        assert (ours - exact).norm() / scale <= tolerance


def test_attention_in_blocks_compiles_into_one_graph_under_autocast():
    q, k, v = torch.randn(3, 1, 2, 200, 16).to(torch.bfloat16).requires_grad_().unbind()

    def attend(q, k, v):
        return block_attention(q, k, v, 0.0) * 2

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=False)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))
        assert torch.equal(block_attention(q, k, v, 0.0), block_attention(q, k, v, 0.0))


def test_attention_in_blocks_leaves_dropout_to_sdpa():
    q, k, v = torch.randn(3, 1, 2, 64, 16).unbind()
    torch.manual_seed(0)
    dropped = block_attention(q, k, v, 0.5)
    torch.manual_seed(0)
    assert torch.equal(dropped, causal_attention(q, k, v, 0.5))


def test_the_cpus_own_kernels_compile_with_the_model():
    """One sequence at once, whose heads are views with other strides: loss and gradients as without compilation."""
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, n_positions=160, vocab_size=515, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = GPT2LMHeadModel(config, attention=block_attention, seed=3)
    ids = torch.randint(0, 515, (1, 161), generator=torch.Generator().manual_seed(0))

    def results(compiled: bool) -> list[torch.Tensor]:
        torch._dynamo.reset()
        call = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(ids[:, :-1], ids[:, 1:])
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    for compiled, plain in zip(results(True), results(False), strict=True):
        torch.testing.assert_close(compiled, plain, atol=2e-3, rtol=0.05)
