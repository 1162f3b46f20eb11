"""The estimated peak memory of a step against every allocation of a real step, and the space that checkpoints take."""

import json

import pytest
import torch
from transformers import GPT2Config

from recipe.config import batch_arithmetic, parse_config
from recipe.data.tokenizer import open_tokenizer
from recipe.estimate.memory import HEADROOM, checkpoint_bytes, checkpoint_count, step_memory, update_bytes
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.optim.optimizer import make_optimizer, named_state
from tests import processes as programs
from tests.conftest import launch, ok

SMALL = "--n_layer=2 --n_head=2 --n_embd=128 --sequence_length=128 --micro_batch_size=4 --total_batch_tokens=1024"
GPT2 = "--n_layer=4 --micro_batch_size=4 --total_batch_tokens=8192"

REAL = SMALL + " --precision=fp32 --gradient_checkpointing=true"
# The peak of a Muon step is in its update.
MUON = "--optim=muon --precision=fp32 --n_layer=4 --n_head=4 --n_embd=256 --sequence_length=64"
MUON += " --micro_batch_size=1 --total_batch_tokens=128 of 512"
CHUNKS = SMALL + " --loss_chunk_size=128"
FUSED = SMALL + " --micro_batch_size=8 --fused_loss=true --loss_chunk_size=256"
FAKE = [GPT2 + " --gradient_checkpointing=true", "--config=gpt2-xl --n_layer=8 --total_batch_tokens=8192"]


@pytest.mark.parametrize(
    ("real", "fake"),
    [([MUON], [GPT2]), pytest.param([REAL, CHUNKS, FUSED], FAKE, marks=pytest.mark.slow)],  # fake ones take no time
)
def test_the_estimate_is_within_a_tenth_of_what_a_step_allocates(real, fake):
    arguments = [f"--real={options}" for options in real] + [f"--fake={options}" for options in fake]
    result = ok(programs.run("-m", "tests.estimate.memory_probe", *arguments))
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [line["options"] for line in lines] == real + fake
    for line in lines:
        assert line["estimate"] == pytest.approx(line["measured"], rel=0.1), line
        # Without weights, gradients and optimizer state, which would hide an error in small models.
        assert line["estimate"] - line["state"] == pytest.approx(line["measured"] - line["state"], rel=0.25), line


@pytest.mark.slow
@pytest.mark.parametrize("total_batch_tokens", [512, 1024])
def test_the_second_step_under_ddp_holds_two_sets_of_buckets(total_batch_tokens):
    """And with accumulation the gradients of the first micro-step, in neither."""
    options = "--n_layer=4 --n_embd=256 --n_head=4 --sequence_length=64 --n_positions=64 --micro_batch_size=4"
    options += f" --precision=fp32 --total_batch_tokens={total_batch_tokens}"  # bf16 takes minutes on an older CPU
    result = ok(launch("ddp", 2, "-m", "tests.estimate.memory_probe", f"--real={options}"))
    line = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    assert line["estimate"] == pytest.approx(line["measured"], rel=0.02), line


@pytest.mark.parametrize(
    ("options", "devices", "compiled", "low", "high"),
    [
        ("gpt2 --micro_batch_size=8", (1, 8), 9.28, 0.99, 1.45),  # on a v5e; on a v3 7.13, with flash attention 6.54
        ("gpt2 --micro_batch_size=16", (1, 8), 12.31, 0.99, 1.45),
        ("gpt2-medium --micro_batch_size=4", (1, 8), 11.15, 0.99, 1.45),
        ("gpt2-medium --micro_batch_size=8", (1, 8), 16.84, 0.99, 1.45),
        ("gpt2-medium --micro_batch_size=8 --gradient_checkpointing=true", (1, 8), 7.72, 0.99, 1.45),
        # By TorchTPU, with one process per chip; the estimate has DDP's first buckets too. On a v5e, and on a v6e
        ("kaggle-tpu", (8, 1), 9.06, 1, 1.15),
        ("kaggle-tpu", (8, 1), 9.35, 1, 1.15),
    ],
)
def test_the_estimate_for_a_tpu_covers_the_memory_of_the_compiled_step(options, devices, compiled, low, high):
    """GiB reported by libtpu's compiler (docs/log.md): a step fits if its estimate does."""
    config = parse_config(["--dataset_name=x", "--config", *options.split()])
    estimate = step_memory(config, batch_arithmetic(config, *devices), precision="bf16").peak / 2**30
    assert low * compiled < estimate < high * compiled


def test_the_fused_loss_in_fp16_holds_a_chunk_of_logits():
    """A T4: with 32 sequences a micro-batch all logits would be 3.3 GB, a gigabyte more than the chunks take."""
    chunks, all_logits = (
        step_memory(config, batch_arithmetic(config, 1), precision=precision, compiled=True).loss
        for config, precision in (
            (parse_config(["--config=gpt2", "--micro_batch_size=32", "--fused_loss=true"]), precision)
            for precision in ("fp16", "bf16")
        )
    )
    assert chunks < all_logits - 1e9
    unfused = parse_config(["--config=gpt2", "--micro_batch_size=32", "--fused_loss=false"])
    halves = (step_memory(unfused, batch_arithmetic(unfused, 1), precision=p, compiled=True) for p in ("fp16", "bf16"))
    assert next(halves).loss == next(halves).loss


XL = ("--config=gpt2-xl", "--micro_batch_size=1", "--hellaswag_steps=0", "--sample_steps=0")


@pytest.mark.parametrize(
    ("sharding", "world_size", "precision", "options", "fits"),
    [
        ("", 8, "bf16", [], False),
        ("zero1", 64, "bf16", [], False),
        ("zero2", 4, "bf16", [], False),
        ("zero2", 8, "bf16", [], True),
        ("zero3", 8, "bf16", [], True),
        ("zero1", 2, "fp16", [], False),
        ("zero1", 4, "fp16", [], True),  # DeepSpeed's own fp16 halves weights and gradients
        ("fsdp", 2, "bf16", [], True),
        ("fsdp", 2, "bf16", ["--sample_steps=100"], False),  # evaluations gather the weights
        ("fsdp", 2, "bf16", ["--hellaswag_steps=100"], False),
    ],
)
def test_which_sharding_fits_gpt2_xl_on_16_gb(sharding, world_size, precision, options, fits):
    config = parse_config([*XL, *options])
    peak = step_memory(config, batch_arithmetic(config, world_size), precision=precision, sharding=sharding).peak
    assert (peak <= HEADROOM * 16e9) == fits


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_a_checkpoint_holds_the_weights_the_optimizer_state_and_the_tokenizer(optim, tmp_path):
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64}
    config = parse_config([*(f"--{name}={size}" for name, size in sizes.items()), "--sequence_length=64"])
    config = config.replace(vocab_size=100, optim=optim, matrix_learning_rate=0.0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=100, bos_token_id=None, eos_token_id=None))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer = make_optimizer(model, config.optimizer)
    optimizer.step()
    tensors = [*model.parameters(), *named_state(model, optimizer).values()]
    open_tokenizer("gpt2").save(tmp_path, 64)
    files = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert checkpoint_bytes(config) == pytest.approx(sum(tensor.nbytes for tensor in tensors) + files, abs=1e5)


@pytest.mark.parametrize(("schedule", "count"), [("linear", 7), ("wsd", 8)])
def test_the_most_checkpoints_on_disk_at_once(schedule, count):
    """Milestones 200, 400 and 600, the two newest, the best one, wsd's before the decay and the one being written."""
    settings = ["--max_steps=700", "--milestone_steps=200", "--save_total_limit=2"]
    assert checkpoint_count(parse_config([*settings, f"--lr_scheduler_type={schedule}"])) == count


@pytest.mark.parametrize(("precision", "copies"), [("bf16", 3), ("fp16", 4)])
def test_muons_update_counts_its_fp32_copies_of_the_largest_bucket(precision, copies):
    """Where a step can be skipped, as in fp16, the old and the new weights exist side by side."""
    config = parse_config(["--config=gpt2", "--optim=muon", "--n_layer=8", "--n_head=6", "--n_embd=384"])
    assert update_bytes(config, 1, precision) == 4 * copies * (16 * 384 * 1536), "of the MLP's 16 matrices"
