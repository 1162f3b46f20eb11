"""Which size of GPT-2 reaches the lowest validation loss in a given time, and the recipe that trains it."""

import json
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipe.config import BatchPlan, Config, DataConfig, OptimizerConfig, RunConfig, parse_config
from recipe.data.survey import ENGLISH, Text
from recipe.engine.strategy import Strategy
from recipe.estimate.memory import HEADROOM, flops_per_token, step_memory
from recipe.estimate.micro_batch import memory_kind
from recipe.estimate.scaling import SIZES, Size, block_parameters, error_of, law, line_through, model_of
from recipe.estimate.speed import expected_flops
from recipe.utils.machine import usable_memory

MAX_PARAMETERS = 3  # in the blocks per token of text; a gain was measured up to 2.6 (scaling.json)
MAX_EPOCHS = 4  # by the law all further ones together are worth less than a quarter of an epoch of new text
# Losses by the law and losses of two runs on English with GPT-2's tokenizer, ours on an H200 and a published one
# (estimate/scaling.json). A text without trials may differ from the line through them by UNTRIED_ERROR.
ENGLISH_LOSSES = [(law((12, 768), 9.26e6, 40.4e6), 5.196), (law((12, 768), 5e9, 9e9), 3.165)]
UNTRIED_ERROR = 0.2
UNKNOWN_FLOPS = 1e12  # per second, of a device of which nothing is known, until it is measured
SPEED_POWER = 0.8  # of FLOPs per token by which tokens per second fall, until two sizes are measured
Fields = dict[str, tuple[Any, str]]  # of a recipe: name -> value, reason


@dataclass(frozen=True)
class Forecast:
    """The validation loss to expect of a size, in nats per token, after `tokens`, as many as it can read; `limit` is
    what prevents more: "time", "text" or "memory"."""

    size: Size
    tokens: float
    loss: float
    limit: str


class Forecaster:
    """What each size reaches on these devices with this text; the same on all processes.

    Attributes:
        rates: {FLOPs per token: tokens per second} of the sizes whose speed was measured, with their latest batch.
        losses: [(loss by the law, loss on this text)] of the trials.
    """

    def __init__(self, strategy: Strategy, text: Text, vocab_size: int):
        self.strategy, self.text, self.vocab_size = strategy, text, vocab_size
        processes, device = strategy.runtime.processes, strategy.device
        self._devices = processes.world_size * device.count
        expected = {}
        for size in SIZES:  # with the largest batch that a run on this text has
            model = model_of(size, vocab_size)
            batch = batch_tokens(MAX_EPOCHS * text.tokens, model.n_positions * self._devices)
            expected[size] = expected_flops(device, processes.world_size, model, batch * self.flops(size))
        memory = device.memory or usable_memory() // processes.local_world_size
        self._expected, memory = processes.broadcast_object((expected, memory))  # each process measures its own
        # The sizes that are compared, and what rules out the next larger one.
        self._sizes, self._limit = list(SIZES[:1]), ""
        for size in SIZES[1:]:
            if memory_of(size, vocab_size, strategy) > HEADROOM * memory:
                self._limit = "memory"
            elif block_parameters(size) > MAX_PARAMETERS * text.tokens:
                self._limit = "text"
            if self._limit:
                break
            self._sizes.append(size)
        # A longer token has a higher loss.
        self._untried = [(value, loss * text.token_bytes / ENGLISH) for value, loss in ENGLISH_LOSSES]
        self.rates: dict[int, float] = {}
        self.losses: list[tuple[float, float]] = []

    def forecasts(self, seconds: float) -> list[Forecast]:
        """The forecasts after this many seconds of training, of all sizes that fit memory and text; the smallest
        first."""
        in_text, forecasts = MAX_EPOCHS * self.text.tokens, []
        for size in self._sizes:
            in_time = self.tokens_per_second(size) * seconds
            tokens, limit = (in_text, "text") if in_text < in_time else (in_time, "time")
            forecasts.append(Forecast(size, tokens, self.loss(size, tokens), limit))
        if self._limit:
            forecasts[-1] = replace(forecasts[-1], limit=self._limit)
        return forecasts

    def fields_for(self, size: Size, tokens: float) -> Fields:
        """The fields of the recipe that trains `size` for about this many tokens."""
        return fields_for(size, self.text, tokens, self._devices)

    def best(self, seconds: float) -> Forecast:
        """The forecast with the lowest loss."""
        return min(self.forecasts(seconds), key=lambda forecast: forecast.loss)

    def seconds_for(self, tokens: float) -> float:
        """The seconds of training for which the best forecast reads about this many tokens."""
        times = [tokens / self.tokens_per_second(size) for size in SIZES]
        return next((t for size, t in zip(SIZES, times, strict=True) if self.best(t).size <= size), times[-1])

    def relative_error(self, forecast: Forecast) -> float:
        """How far the loss reached may be from the forecast."""
        if not self.losses:
            return UNTRIED_ERROR
        return error_of(min(self.losses)[0] - law(forecast.size, forecast.tokens, self.text.tokens))

    def flops(self, size: Size) -> int:
        """FLOPs per token."""
        model = model_of(size, self.vocab_size)
        return flops_per_token(model, model.n_positions)

    def tokens_per_second(self, size: Size) -> float:
        """From the speed of the measured size that is nearest in FLOPs, by a power law through the two nearest; before
        any is measured, what is expected of the devices."""
        flops, expected = self.flops(size), self._expected[size]
        if not self.rates:
            return (expected[0] if expected else UNKNOWN_FLOPS) / flops
        (measured, rate), *others = sorted(self.rates.items(), key=lambda pair: abs(math.log(pair[0] / flops)))
        power = math.log(rate / others[0][1]) / math.log(others[0][0] / measured) if others else SPEED_POWER
        return rate * (measured / flops) ** min(1.0, max(0.0, power))

    def loss(self, size: Size, tokens: float) -> float:
        """The validation loss to expect after this many tokens, in nats per token."""
        return max(0.0, line_through(self.losses or self._untried)(law(size, tokens, self.text.tokens)))


def memory_of(size: Size, vocab_size: int, strategy: Strategy) -> int:
    """Peak bytes of a step of two micro-steps, with one sequence a device."""
    model, devices = model_of(size, vocab_size), strategy.device.count
    world_size = strategy.runtime.processes.world_size
    config = Config(model, DataConfig(sequence_length=model.n_positions), OptimizerConfig(optim="muon"), RunConfig())
    batch = BatchPlan(2 * world_size * devices, world_size, micro=devices, accumulation=2, devices=devices)
    return step_memory(config, batch, **memory_kind(config, strategy)).peak


def fields_for(size: Size, text: Text, tokens: float, devices: int) -> Fields:
    """The fields of a run of `size` on `text` for about this many `tokens`, on all `devices` of all processes, except
    the field that sets its length."""
    model, (layers, width) = model_of(size), size
    batch = batch_tokens(tokens, model.n_positions * devices)
    steps = max(1, int(tokens / batch))
    interval = max(1, int(0.26 * steps))
    sampling = f", one of every {text.stride} pieces of it, which is enough" if text.stride > 1 else ""
    fields: Fields = {
        "dataset_name": (text.name, f"the text{sampling}"),
        "val_fraction": (text.val_fraction, "for validation: enough to measure a loss, a tenth at most"),
        "tokenizer": (text.tokenizer, f"{text.token_bytes:.1f} bytes per token"),
        "n_layer": (layers, "of the sizes compared, the one with the lowest expected loss"),
        "n_head": (model.n_head, f"each {width // model.n_head} wide"),
        "n_embd": (width, "in proportion to the layers"),
        "n_positions": (model.n_positions, "longer for larger models only"),
        "sequence_length": (model.n_positions, "all positions"),
        "total_batch_tokens": (batch, "grows with the length of the run"),
        "micro_batch_size": ("auto", "as many as fit"),
        "optim": ("muon", "needs half of AdamW's tokens, docs/results.md"),
        "muon_learning_rate": (rounded(min(0.02, 0.01 * max(1, batch / 4096) ** 0.5)), "more for a batch above 4,096"),
        "muon_weight_decay": (0.02, "other values were not better in runs this short"),
        "learning_rate": (rounded(0.012 * max(1, width / 128) ** -0.7), "of embeddings; lower for a wider model"),
        "adam_beta1": (0.8, "as tuned beside Muon, docs/log.md"),
        "adam_beta2": (0.99 if batch < 65_536 else 0.95, "longer where a batch has few of the rare tokens"),
        "warmup_steps": (min(256, max(1, steps // 20), steps - 1), "a twentieth of the run, 256 at most; for AdamW"),
        "lr_scheduler_type": ("wsd", "its decay can begin by the clock, and the run can be extended"),
        "decay_fraction": (0.6, "as tuned, docs/log.md"),
        "eval_steps": (interval, "three times on the way, and at the end"),
        "eval_tokens": (
            max(32_768, min(10_485_760, int(tokens / 40))),
            "each time: a fortieth of the run, from 32,768 to 10,485,760",
        ),
        "save_steps": (interval, "as often as it is evaluated: the best checkpoint is kept"),
        "logging_steps": (max(1, min(50, steps // 40)), "forty lines or more"),
    }
    if not text.val_fraction:
        del fields["val_fraction"]
    if text.tokens == math.inf:
        fields["streaming"] = True, "tokenized while it trains"
    return fields


def yaml_of(fields: Fields) -> str:
    """A recipe's lines, each with its reason."""
    words = {name: (json.dumps(value, ensure_ascii=False), reason) for name, (value, reason) in fields.items()}
    return "".join(f"{name}: {word}  # {reason}\n" for name, (word, reason) in words.items())


def config_of(fields: Fields, *flags: str) -> Config:
    """The configuration of a run of this recipe with these flags."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trial.yaml"  # not recipe.yaml, which names the run after its directory
        path.write_text(yaml_of(fields), encoding="utf-8")
        return parse_config(["--config", str(path), *flags])


def rounded(value: float) -> float:
    """A value with two significant digits."""
    return float(f"{value:.2g}")


def batch_tokens(tokens: float, unit: int) -> int:
    """Tokens per step, a multiple of `unit`: as measured for a run of a million tokens, as published for ten billion,
    and by a power law between them."""
    least, most = 1024, 524_288
    batch = least * (tokens / 1e6) ** (math.log(most / least) / math.log(1e4))
    return max(1, round(2 ** round(math.log2(min(most, max(least, batch)))) / unit)) * unit
