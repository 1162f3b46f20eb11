"""What is measured on the live model while it trains: validation loss, HellaSwag, a sample."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import torch

from eval.hellaswag import score_hellaswag
from eval.sample import sample_live
from recipe.config import Batch, Config
from recipe.data import tokenizer
from recipe.data.dataset import TokenDataset
from recipe.engine.base import Engine
from recipe.errors import UserError
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.model.loss import IGNORE_INDEX
from recipe.monitor.metrics import Metrics
from recipe.optim.spike_filter import WAY_OUT

logger = logging.getLogger(__name__)

HELLASWAG_ROWS = 10_042  # of the whole validation split
HELLASWAG_BATCH = 16  # rows at once
SAMPLE_TOKENS = 48


class Evaluator:
    """Evaluates the model between two steps. Its methods are collective calls: every process makes the same batches of
    the same shapes, and asks before each whether the run is to stop (raises Interrupted). The time that they take is
    a pause of `metrics`."""

    def __init__(
        self,
        config: Config,
        batch: Batch,
        engine: Engine,
        raw_model: GPT2LMHeadModel,
        data: TokenDataset,
        metrics: Metrics,
    ):
        self.config, self.batch, self.engine = config, batch, engine
        self.raw_model, self.data, self.metrics = raw_model, data, metrics

    @torch.no_grad()
    def validate(self, model: torch.nn.Module, step: int) -> float:
        """Mean loss in nats a token over the first eval_tokens of the validation shards, the same ones whatever the
        number of processes. `model` is the prepared one. Raises UserError if the loss is not finite."""
        engine, length, micro = self.engine, self.config.data.sequence_length, self.batch.micro
        windows = min(self.data.windows, max(1, self.config.run.eval_tokens // length))
        batches = -(-windows // (micro * engine.world))
        total = torch.zeros(2, device=engine.device)  # sum of losses, number of sequences
        engine.flush()  # so that a lazy device does not compile the zeros into the first batch's program
        model.eval()
        with self.metrics.paused("validating") as tick:
            for number in range(batches):
                tick(number, batches)
                engine.check_stop()
                rows, targets = self._validation_batch(number * engine.world + engine.rank, windows)
                weight = ((targets != IGNORE_INDEX).sum().view(1) / length).to(engine.device)  # (1,) sequences
                loss = model(engine.to_device(rows), engine.to_device(targets))
                total += torch.stack((loss.float(), torch.ones_like(total[0]))) * weight
                engine.flush()
            loss_sum, sequences = engine.sum(total).tolist()
        model.train()
        val_loss = loss_sum / sequences
        if not math.isfinite(val_loss):
            raise UserError(f"the validation loss at step {step} is {val_loss}: the model has diverged. {WAY_OUT}")
        return val_loss

    def _validation_batch(self, number: int, windows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (micro, T), int64, of a batch; rows beyond the last window have ignored targets, so that
        all batches have one shape."""
        micro, length = self.batch.micro, self.config.data.sequence_length
        rows = torch.zeros(micro, length, dtype=torch.int64)
        targets = torch.full((micro, length), IGNORE_INDEX)
        lo = number * micro
        if lo < windows:
            real = torch.from_numpy(self.data.validation_rows(lo, min(lo + micro, windows)))  # (rows, T + 1)
            rows[: len(real)], targets[: len(real)] = real[:, :-1], real[:, 1:]
        return rows, targets

    def hellaswag(self) -> dict[str, float]:
        """HellaSwag scored over all processes: accuracies, scored as llm.c does (A) and as lm-evaluation-harness does
        (B), as columns of metrics.jsonl."""
        config, engine = self.config, self.engine
        limit = config.run.hellaswag_limit
        batches = -(-(limit or HELLASWAG_ROWS) // (engine.world * HELLASWAG_BATCH))
        numbers = count()
        with (
            self.metrics.paused("HellaSwag") as tick,
            whole_model(engine, self.raw_model) as live,
            engine.autocast(),
        ):

            def body(ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
                tick(min(next(numbers), batches), batches)
                engine.check_stop()  # equally often on every process
                return live.transformer(ids, positions, mask)

            # Body and head apart: only the positions of the endings ever become logits.
            counts = score_hellaswag(
                body,
                tokenizer.encoding().encode_ordinary,
                limit=limit or None,
                device=live.head_weight.device,
                rank=engine.rank,
                world=engine.world,
                max_length=config.model.n_positions,
                head=live.head,
                batch_size=HELLASWAG_BATCH,
                multiples=engine.eval_multiples,
                place=engine.to_device,
            )
        names = [(way, kind) for way in ("A", "B") for kind in ("acc", "acc_norm")]
        values = torch.tensor([counts["rows"], *(counts[way][kind] for way, kind in names)], device=engine.device)
        rows, *correct = engine.sum(values).tolist()
        scores = {f"hellaswag_{way}_{kind}": n / rows for (way, kind), n in zip(names, correct, strict=True)}
        shown = ", ".join(f"{name.removeprefix('hellaswag_')} {value:.4f}" for name, value in scores.items())
        logger.info("HellaSwag (%d rows): %s", rows, shown)
        return scores

    def sample(self, step: int) -> str:
        """Prints and returns a continuation of sample_prompt."""
        config = self.config
        prompt = tokenizer.encoding().encode_ordinary(config.run.sample_prompt) or [tokenizer.END_OF_TEXT]
        with self.metrics.paused("sampling"), whole_model(self.engine, self.raw_model) as live:
            ids = sample_live(
                live.forward,
                prompt,
                max_new_tokens=SAMPLE_TOKENS,
                n_positions=config.model.n_positions,
                seed=config.run.seed,
                device=live.head_weight.device,
            )
        text = tokenizer.encoding().decode(ids)
        logger.info("step %d: sample %r", step, text)
        return text


@contextmanager
def whole_model(engine: Engine, model: GPT2LMHeadModel) -> Iterator[GPT2LMHeadModel]:
    """The live model, uncompiled and in evaluation mode; under ZeRO-3 one assembled from its shards. A collective
    call."""
    weights = engine.whole_weights(model)
    if weights is None:
        live = model
    else:
        with torch.device("meta"):  # no second copy: the gathered tensors become the parameters
            live = GPT2LMHeadModel(model.config)
        live.load_state_dict(weights, assign=True)
    live.eval()
    # Blocks that were compiled by themselves would be compiled again for each shape of an evaluation.
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
