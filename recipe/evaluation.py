"""Evaluation during training: validation loss, HellaSwag and text samples."""

import logging
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from itertools import count

import torch
import torch.nn.functional as F

from eval.common import utf8
from eval.hellaswag import count_correct, load_rows
from eval.loglikelihood import LanguageModel
from recipe.config import BatchPlan, Config
from recipe.data.dataset import TokenDataset
from recipe.data.mixed import Dataset
from recipe.data.tokenizer import open_tokenizer
from recipe.engine.strategy import Strategy
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.model.loss import IGNORE_INDEX
from recipe.monitor.metrics import Metrics
from recipe.optim.spike_filter import WAY_OUT
from recipe.utils.errors import Permanent
from recipe.utils.redaction import redact

logger = logging.getLogger(__name__)

HELLASWAG_BATCH = 16  # rows at once
SAMPLE_TOKENS, TEMPERATURE, TOP_K = 48, 0.8, 50


class Evaluator:
    """Evaluates the model between two steps. Its methods return columns of metrics.jsonl. They are collective calls:
    every process makes the same batches of the same shapes. `validate` and `hellaswag` check before each batch whether
    to stop (Interrupted); `sample` is too short for that. Their time is counted in `metrics.pauses`."""

    def __init__(
        self,
        config: Config,
        batch: BatchPlan,
        strategy: Strategy,
        raw_model: GPT2LMHeadModel,
        data: Dataset,
        metrics: Metrics,
    ):
        self.config, self.batch, self.strategy = config, batch, strategy
        self.raw_model, self.data, self.metrics = raw_model, data, metrics
        self.tokenizer = tokenizer = open_tokenizer(config.data.tokenizer)
        # HellaSwag's texts take seconds, and are the same each time. Without `self`, which would keep the model alive.
        self._encode = cache(lambda text: tokenizer.encode([text])[0].tolist())

    def validate(self, model: torch.nn.Module, step: int) -> dict[str, float]:
        """val_loss, the mean loss in nats per token over the first eval_tokens of the validation shards, whatever the
        number of processes. The data sets of a mixture share eval_tokens equally, have columns of their own, and are
        weighted by their shares in the mean. `model` is the prepared one. Raises Permanent if the loss is not
        finite."""
        parts, length = self.data.parts, self.config.data.sequence_length
        max_windows = max(1, self.config.run.eval_tokens // length // len(parts))
        model.eval()
        with self.metrics.paused("validating") as tick:
            losses = {name: self._loss(model, data, min(data.windows, max_windows), tick) for name, _, data in parts}
        model.train()
        val_loss = sum(share * losses[name] for name, share, _ in parts)
        if not math.isfinite(val_loss):
            raise Permanent(f"the validation loss at step {step} is {val_loss}: the model has diverged. {WAY_OUT}")
        columns = {"val_loss": val_loss}
        if len(parts) > 1:
            columns |= {f"val_loss/{name}": loss for name, loss in losses.items()}
            text = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
            logger.info("step %d: validation loss %.4f (%s)", step, val_loss, text)
        return columns

    @torch.no_grad()
    def _loss(
        self, model: torch.nn.Module, data: TokenDataset, windows: int, tick: Callable[[int, int], None]
    ) -> float:
        """Mean loss in nats per token over the first `windows` of a data set. A collective call."""
        device, runtime, micro = self.strategy.device, self.strategy.runtime, self.batch.micro
        rank, world_size = runtime.processes.rank, runtime.processes.world_size
        batches = -(-windows // (micro * world_size))
        total = torch.zeros(2, device=device.torch_device)  # sum of losses, number of sequences
        device.flush()  # or a lazy device would compile the zeros into the first batch's program
        for number in range(batches):
            tick(number, batches)
            runtime.check_stop()
            rows, targets = self._validation_batch(data, number * world_size + rank, windows)
            weight = (targets[:, 0] != IGNORE_INDEX).sum().float().view(1).to(device.torch_device)  # (1,) sequences
            loss = model(device.put(rows), device.put(targets))
            total += torch.stack((loss.float(), torch.ones_like(total[0]))) * weight
            device.flush()
        loss_sum, sequences = runtime.processes.sum(total).tolist()
        return loss_sum / sequences

    def _validation_batch(self, data: TokenDataset, number: int, windows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (micro, T), int64, of a batch; rows beyond the last window have ignored targets."""
        lo, hi = (min(n * self.batch.micro, windows) for n in (number, number + 1))
        rows = torch.from_numpy(data.validation_windows(lo, hi))  # (rows, T + 1)
        padding = (0, 0, 0, self.batch.micro - len(rows))
        return F.pad(rows[:, :-1], padding), F.pad(rows[:, 1:], padding, value=IGNORE_INDEX)

    def hellaswag(self) -> dict[str, float]:
        """HellaSwag accuracies over all processes, scored as by llm.c and as by lm-evaluation-harness."""
        device, runtime = self.strategy.device, self.strategy.runtime
        rows, batch_numbers = load_rows(self.config.run.hellaswag_limit), count()
        rank, world_size = runtime.processes.rank, runtime.processes.world_size
        batches = -(-len(rows) // (world_size * HELLASWAG_BATCH))
        with (
            self.metrics.paused("HellaSwag") as tick,
            unsharded_model(self.strategy, self.raw_model) as gpt2,
            device.autocast(),
        ):

            def body(ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
                tick(next(batch_numbers), batches)
                runtime.check_stop()  # equally often on every process
                return gpt2.transformer(ids, positions, mask)

            model = LanguageModel(
                body=body,
                head=gpt2.head,
                encode=self._encode,
                n_positions=self.config.model.n_positions,
                device=gpt2.head_weight.device,
                multiples=device.eval_multiples,
                place=device.put,
            )
            counts = count_correct(model, rows, batch_size=HELLASWAG_BATCH, rank=rank, world_size=world_size)
        sums = runtime.processes.sum(torch.tensor([*counts.values()], device=device.torch_device)).tolist()
        totals = dict(zip(counts, sums, strict=True))
        n_rows = totals.pop("rows")
        scores = {name: n_correct / n_rows for name, n_correct in totals.items()}
        text = ", ".join(f"{name.replace('_', ' ', 1)} {value:.4f}" for name, value in scores.items())
        logger.info("HellaSwag (%d rows): %s", n_rows, text)
        return {f"hellaswag_{name}": value for name, value in scores.items()} | {"hellaswag_rows": int(n_rows)}

    def sample(self, step: int) -> dict[str, str]:
        """Continues each line of `sample_prompt`, or a line break; one seed gives the same text on every process."""
        run, texts = self.config.run, []
        with self.metrics.paused("sampling"), unsharded_model(self.strategy, self.raw_model) as gpt2:
            for prompt in map(str.strip, utf8(run.sample_prompt).splitlines() or [""]):
                tokens = continuation(gpt2, self._encode(prompt or "\n") or [self.tokenizer.end_of_text], run.seed)
                texts.append(prompt + self.tokenizer.decode(tokens).decode(errors="replace"))
        text = "\n---\n".join(texts)
        logger.info("step %d: sample %r", step, text)
        return {"sample": redact(text)}


def continuation(model: GPT2LMHeadModel, prompt: list[int], seed: int) -> list[int]:
    """SAMPLE_TOKENS new tokens after a prompt, which is truncated on the left if both exceed n_positions.

    Without a key-value cache, the model is called once a token: always with the same shape (1, T), so that it compiles
    once, and past end-of-text too, so that all ranks call it equally often. Tokens are drawn on the CPU, so that one
    seed gives one text on any device.
    """
    positions, device = model.config.n_positions, model.head_weight.device
    n_new = min(SAMPLE_TOKENS, positions - 1)
    prompt = prompt[-(positions - n_new) :]
    ids = torch.zeros(1, len(prompt) + n_new, dtype=torch.long)  # (1, T); attention is causal: the zeros do not matter
    ids[0, : len(prompt)] = torch.tensor(prompt)
    generator = torch.Generator().manual_seed(seed)
    for position in range(len(prompt), ids.shape[1]):
        # Moved off the device before indexing: a compiling device would compile a program for each position.
        logits = model(ids.to(device))[0].cpu()[position - 1].float()  # (V,)
        values, tokens = logits.topk(TOP_K)
        ids[0, position] = tokens[torch.multinomial((values / TEMPERATURE).softmax(-1), 1, generator=generator)]
    return ids[0, len(prompt) :].tolist()


@contextmanager
def unsharded_model(strategy: Strategy, model: GPT2LMHeadModel) -> Generator[GPT2LMHeadModel, None, None]:
    """The model in evaluation mode, eager, with its weights gathered if they are sharded. A collective call."""
    unsharded = model
    if (weights := strategy.unsharded_weights(model)) is not None:
        with torch.device("meta"):  # no second copy: the gathered tensors become the parameters
            unsharded = GPT2LMHeadModel(model.config)
        unsharded.load_state_dict(weights, assign=True)
    unsharded.eval()
    try:
        # Blocks compiled one by one would be recompiled for each shape of an evaluation.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield unsharded
    finally:
        model.train()
