"""What is measured on the live model while it trains: validation loss, HellaSwag, a sample."""

from collections.abc import Callable
from contextlib import contextmanager
from itertools import count

import torch

from recipe import faults
from recipe.config import Batch, Config
from recipe.data import tokenizer
from recipe.data.dataset import TokenDataset
from recipe.engine.base import Engine
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.model.loss import IGNORE_INDEX

_HELLASWAG_ROWS, _ROWS_A_BATCH = 10_042, 16
Tick = Callable[[int, int], None]


def _nothing(done: int, of: int) -> None:
    """Where nobody wants to know."""


@torch.no_grad()
def validate(
    config: Config, batch: Batch, engine: Engine, model: torch.nn.Module, source: TokenDataset, tick: Tick = _nothing
) -> float:
    """Mean loss in nats a token over the same first eval_tokens of the validation shards, whatever the world size.

    `tick` is told which batch of how many is next.

    Every process runs the same number of batches of one shape: the last ones are filled up with ignored targets.
    Raises Interrupted.
    """
    length = config.data.sequence_length
    windows = min(source.windows, max(1, config.run.eval_tokens // length))
    total = torch.zeros(2, device=engine.device)
    engine.flush()  # the zeros are data to the first batch too, and no part of its program
    model.eval()
    starts = range(
        engine.rank * batch.micro,
        -(-windows // (batch.micro * engine.world)) * batch.micro * engine.world,
        batch.micro * engine.world,
    )
    for number, lo in enumerate(starts):
        tick(number, len(starts))
        rows = torch.zeros(batch.micro, length + 1, dtype=torch.int64)
        targets = torch.full((batch.micro, length), IGNORE_INDEX)
        if lo < windows:
            real = torch.from_numpy(source.validation_rows(lo, min(lo + batch.micro, windows)))
            rows[: len(real)], targets[: len(real)] = real, real[:, 1:]
        count = (targets != IGNORE_INDEX).sum().view(1) / length  # (1,) sequences
        faults.at("evaluate.validation")
        engine.check_stop()
        loss = model(engine.to_device(rows[:, :-1]), engine.to_device(targets))
        total += torch.stack((loss.float(), torch.ones_like(total[0]))) * count.to(engine.device)
        engine.flush()
    model.train()
    loss_sum, sequences = engine.sum(total).tolist()
    return loss_sum / sequences


def hellaswag(
    config: Config, engine: Engine, model: GPT2LMHeadModel, say: Callable[[str], None], tick: Tick = _nothing
) -> dict:
    """HellaSwag of the live model over all processes: accuracies both ways, as columns of metrics.jsonl. `tick` is
    told which batch of how many is next. Raises Interrupted."""
    from eval.hellaswag import score_hellaswag

    rows = config.run.hellaswag_limit or _HELLASWAG_ROWS
    number, batches = count(), -(-rows // (engine.world * _ROWS_A_BATCH))

    # Body and head apart: only the endings' positions ever become logits.
    with eager(engine, model) as live, engine.autocast():

        def body(ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            tick(min(next(number), batches), batches)
            faults.at("evaluate.hellaswag")
            engine.check_stop()  # as often on every process
            return live.transformer(ids, positions, mask)

        counts = score_hellaswag(
            body,
            tokenizer.encoding().encode_ordinary,
            limit=config.run.hellaswag_limit or None,
            device=live.head_weight.device,
            rank=engine.rank,
            world=engine.world,
            max_length=config.model.n_positions,
            head=live.head,
            batch_size=_ROWS_A_BATCH,
            multiples=engine.eval_multiples,
            place=engine.to_device,
        )
    names = [(way, kind) for way in ("A", "B") for kind in ("acc", "acc_norm")]
    values = torch.tensor([counts["rows"], *(counts[way][kind] for way, kind in names)], device=engine.device)
    rows, *correct = engine.sum(values).tolist()
    scores = {f"hellaswag_{way}_{kind}": n / rows for (way, kind), n in zip(names, correct, strict=True)}
    say("HellaSwag (" + f"{rows} rows): " + ", ".join(f"{k[10:]} {v:.4f}" for k, v in scores.items()))
    return scores


def sample(config: Config, engine: Engine, model: GPT2LMHeadModel) -> str:
    from eval.sample import sample_live

    prompt = tokenizer.encoding().encode_ordinary(config.run.sample_prompt) or [tokenizer.END_OF_TEXT]
    with eager(engine, model) as live:
        ids = sample_live(
            live.forward,
            prompt,
            max_new_tokens=48,
            n_positions=config.model.n_positions,
            seed=config.run.seed,
            device=live.head_weight.device,
        )
    return tokenizer.encoding().decode(ids)


@contextmanager
def eager(engine: Engine, model: GPT2LMHeadModel):
    """The live model in evaluation mode and uncompiled, or one put together from the parts of it that ZeRO-3 has cut
    up."""
    weights = engine.whole_weights(model)
    if weights is None:
        live = model
    else:
        with torch.device("meta"):  # no second copy: the gathered tensors become the parameters
            live = GPT2LMHeadModel(model.config)
        live.load_state_dict(weights, assign=True)
    live.eval()
    # Blocks compiled by themselves would be compiled again for each shape of an evaluation.
    compiled = [(m, m._compiled_call_impl) for m in live.modules() if m._compiled_call_impl is not None]
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        with torch.no_grad():
            yield live
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call
        model.train()
