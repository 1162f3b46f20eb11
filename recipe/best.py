"""Command: give text and time, get the best GPT-2 that this machine can train in it.

    accelerate launch --config_file accelerate_configs/single.yaml recipe/best.py --text my.txt --hours 2

Looks at the text, takes some steps of two or three sizes to see how fast this machine is, chooses the size whose loss
will be the lowest when the time is over, by a law fitted to small runs (recipe/estimate/scaling.py), and trains it
twice, a seventh of the time at most, to see how hard the text is. The result is runs/NAME/recipe.yaml, a recipe like
any other, which is then trained.
Any field of a recipe may follow (--precision fp32), and is taken as it is.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import logging
import math
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # see train.py
if __package__ in (None, ""):  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # see train.py

import psutil

from recipe.checkpoint.run_dir import run_directory
from recipe.config import ROOT, Config, batch_arithmetic, parse_config
from recipe.config.catalog import LOCK, unknown_data
from recipe.data.documents import TextFiles
from recipe.data.hub_text import HubText
from recipe.data.producer import open_text
from recipe.data.tokenizer import GPT2, open_tokenizer, train_tokenizer
from recipe.engine.factory import open_strategy
from recipe.engine.launch import fail, is_local_main_process
from recipe.engine.strategy import Strategy
from recipe.estimate.cost import expected_flops
from recipe.estimate.memory import HEADROOM, flops_per_token, step_memory
from recipe.estimate.micro_batch import memory_kind
from recipe.estimate.scaling import SIZES, Size, block_parameters, error_of, law, line_through, model_of, published_law
from recipe.train import run
from recipe.utils.checkpoints import read_metrics
from recipe.utils.errors import ArgumentParser, ExitCode, UserError
from recipe.utils.files import replace_file
from recipe.utils.log import set_up_logging
from recipe.utils.units import duration, si

logger = logging.getLogger("recipe.best")

TEXT = ROOT / "recipe" / "data" / "tiny_shakespeare.txt"  # ships
OWN_TOKENS = 4096  # of a tokenizer that is trained on the text
FITTED_BELOW = 1e15  # FLOPs of a run within reach of those that the law was fitted to
OWN_BELOW = 1e17  # FLOPs of a run in which the head of GPT-2's 50,257 tokens would take most of the time
TRIALS, LONGEST_TRIAL_S = (0.02, 0.12), 300  # shares of the time, so far apart that they show how the text is learned
MOST_PARAMETERS = 3  # in the blocks for a token of text, of which a gain was measured: docs/log.md
MOST_EPOCHS = 4  # by the law further ones together are worth less than a tenth of one of new text
WELL_BEFORE = 0.8  # of the time: a text that is read MOST_EPOCHS times by then ends the run, else the clock does
PACED, MOST_PACED = 5, 3  # steps in each of the windows in which they are timed, and sizes
COMPILED_FROM_S = 900  # of the time: in a shorter one compiling each size to see its speed costs more than it tells
SHORTEST_S, LEAST_S = 90, 5  # of the time given, and of what the search leaves
UNTRIED_ERROR = 0.2  # of a loss by the law alone: so much do texts differ
UNKNOWN_FLOPS = 1e12  # a second, of a device of which nothing is known, for the first trial
LEAST_TOKENS, VAL_TOKENS = 20_000, 60_000  # of a text; of it for validation, where that is at most a tenth
ENGLISH = 4.4  # bytes a token by GPT-2's tokenizer
SAMPLE_BYTES = 1 << 24  # of text, to train a tokenizer on
READ = 0.02 * 50e6  # bytes of text that are looked at for each second given: that takes a fiftieth of it
# Fields that are not the user's here.
CHOSEN = {"n_layer", "n_head", "n_embd", "n_positions", "sequence_length", "total_batch_tokens", "init_from"}
Fields = dict[str, tuple[Any, str]]  # of a recipe: value, and why


@dataclass(frozen=True)
class Text:
    """What a run reads: `name`, as dataset_name; its `tokenizer`; `tokens` to train on, infinite for a data set on the
    Hub; `token_bytes`, bytes of text a token; `held_out`, the share for validation; `every`, of how many pieces of the
    text it has one."""

    name: str
    tokenizer: str
    tokens: float
    token_bytes: float
    held_out: float = 0.01
    every: int = 1


@dataclass(frozen=True)
class Choice:
    """A size, and the validation loss in nats a token to expect of it after `tokens`, all that it can read; `limit` is
    what keeps it from more."""

    size: Size
    tokens: float
    loss: float
    limit: str


class Outlook:
    """What each size reaches on these devices with this text, the same on all processes.

    Attributes:
        rates: {FLOPs a token: tokens a second} of the sizes that were paced.
        losses: [(the law's loss, the one on this text)] of the trials.
    """

    def __init__(self, strategy: Strategy, text: Text, vocabulary: int, law: Callable):
        self.strategy, self.text, self.vocabulary, self.law = strategy, text, vocabulary, law
        processes, device = strategy.runtime.processes, strategy.device
        expected = {size: expected_flops(device, processes.world_size, model_of(size, vocabulary)) for size in SIZES}
        known = expected, device.memory or psutil.virtual_memory().available // processes.local_world_size
        self._expected, self._memory = processes.broadcast_object(known)  # each process measures its own
        self._fitting: dict[Size, bool] = {}
        self.rates: dict[int, float] = {}
        self.losses: list[tuple[float, float]] = []

    def error(self, choice: Choice) -> float:
        """How far its loss may be from the one to expect, relative to it."""
        if not self.losses:
            return UNTRIED_ERROR
        return error_of(min(self.losses)[0] - self.law(choice.size, choice.tokens, self.text.tokens))

    def flops(self, size: Size) -> int:
        """FLOPs a token."""
        model = model_of(size, self.vocabulary)
        return flops_per_token(model, model.n_positions)

    def tokens_per_second(self, size: Size) -> float:
        """From the sizes that were tried, between which it goes by a power of the FLOPs; before, as expected of the
        devices."""
        flops, expected = self.flops(size), self._expected[size]
        if not self.rates:
            return (expected[0] if expected else UNKNOWN_FLOPS) / flops
        (tried, rate), *others = sorted(self.rates.items(), key=lambda pair: abs(math.log(pair[0] / flops)))
        power = math.log(rate / others[0][1]) / math.log(others[0][0] / tried) if others else 0.8
        return rate * (tried / flops) ** min(1.0, max(0.0, power))

    def loss(self, size: Size, tokens: float) -> float:
        """Nats a token on this text, by the trials."""
        return line_through(self.losses)(self.law(size, tokens, self.text.tokens))

    def choices(self, seconds: float) -> list[Choice]:
        """After so many seconds of training, the smallest first, of all sizes that fit into memory."""
        found: list[Choice] = []
        for size in SIZES:
            if found and not self._fits(size):
                return [*found[:-1], replace(found[-1], limit="memory")]
            if found and block_parameters(size) > MOST_PARAMETERS * self.text.tokens:
                return [*found[:-1], replace(found[-1], limit="text")]
            able, most = self.tokens_per_second(size) * seconds, MOST_EPOCHS * self.text.tokens
            tokens, limit = (most, "text") if most < able else (able, "time")
            found.append(Choice(size, tokens, self.loss(size, tokens), limit))
        return found

    def best(self, seconds: float) -> Choice:
        """The choice with the lowest loss."""
        return min(self.choices(seconds), key=lambda choice: choice.loss)

    def seconds_for(self, tokens: float) -> float:
        """How long so many tokens take the size for which that time is best spent on them."""
        times = [tokens / self.tokens_per_second(size) for size in SIZES]
        return next((t for size, t in zip(SIZES, times, strict=True) if self.best(t).size <= size), times[-1])

    def _fits(self, size: Size) -> bool:
        if size not in self._fitting:
            fields = recipe(size, replace(self.text, name=str(TEXT)), 1e6, 1)  # a directory is long to look through
            config = config_of(fields, "--max_steps=1000", "--micro_batch_size=1").replace(vocab_size=self.vocabulary)
            batch = batch_arithmetic(config, 1, self.strategy.device.count)
            needed = step_memory(config, batch, **memory_kind(config, self.strategy)).peak
            self._fitting[size] = needed <= HEADROOM * self._memory
        return self._fitting[size]


def recipe(size: Size, text: Text, tokens: float, processes: int) -> Fields:
    """The fields of a run of `size` on `text`, about so many `tokens` long, but for the one that says how long."""
    model, (layers, width) = model_of(size), size
    batch = batch_tokens(tokens, model.n_positions * processes)
    steps = max(1, int(tokens / batch))
    part = f", one of {text.every} pieces of it, which is enough" if text.every > 1 else ""
    fields: Fields = {
        "dataset_name": (text.name, f"the text{part}"),
        "val_fraction": (text.held_out, "for validation: enough to measure a loss, a tenth at most"),
        "tokenizer": (text.tokenizer, f"{text.token_bytes:.1f} bytes a token"),
        "n_layer": (layers, "of the sizes compared, the one with the lowest expected loss"),
        "n_head": (model.n_head, f"{width // model.n_head} wide"),
        "n_embd": (width, "with the layers"),
        "n_positions": (model.n_positions, "longer for larger models only"),
        "sequence_length": (model.n_positions, "all of them"),
        "total_batch_tokens": (batch, "grows with the length of the run"),
        "micro_batch_size": ("auto", "as many as fit"),
        "optim": ("muon", "half of AdamW's tokens, docs/results.md"),
        "muon_learning_rate": (rounded(min(0.02, 0.01 * max(1, batch / 4096) ** 0.5)), "more for a batch above 4,096"),
        "muon_weight_decay": (0.02, "no other was better in a run this short"),
        "learning_rate": (rounded(0.012 * max(1, width / 128) ** -0.7), "of embeddings; lower if wider"),
        "adam_beta1": (0.8, "as tuned beside Muon, docs/log.md"),
        "adam_beta2": (0.99 if batch < 65_536 else 0.95, "longer where a batch has few of the rare tokens"),
        "warmup_steps": (max(1, min(256, steps // 20)), "a twentieth; of AdamW"),
        "lr_scheduler_type": ("wsd", "can begin its decay by the clock, and be extended"),
        "decay_fraction": (0.6, "as tuned, docs/log.md"),
        "eval_steps": (max(1, int(0.36 * steps)), "two on the way, and the end"),
        "eval_tokens": (max(32_768, min(10_485_760, int(tokens / 30))), "a thirtieth of the run, three times"),
        "save_steps": (max(1, int(0.26 * steps)), "what a crash may cost; also at the end"),
        "logging_steps": (max(1, min(50, steps // 40)), "forty lines or more"),
    }
    if text.tokens == math.inf:
        fields["streaming"] = True, "tokenized while it trains"
    return fields


def rounded(value: float) -> float:
    """To two digits."""
    return float(f"{value:.2g}")


def batch_tokens(tokens: float, unit: int) -> int:
    """Tokens a step, a multiple of `unit`: as measured for a million tokens, as published for ten billion, and between
    them by the power that connects the two."""
    least, most = 1024, 524_288
    batch = least * (tokens / 1e6) ** (math.log(most / least) / math.log(1e4))
    return max(1, round(2 ** round(math.log2(min(most, max(least, batch)))) / unit)) * unit


def survey(name: str, source: TextFiles | HubText, config: Config, seconds: float, needed: float, own: bool) -> Text:
    """The text `name` of a configuration, for a run of so many seconds that needs about so many bytes. Of local text
    that is much longer, pieces from all over it are written to data/RUN; there a tokenizer is trained if `own`. Raises
    UserError."""
    directory = Path("data") / config.run.run_name
    local = isinstance(source, TextFiles)
    if not local and not own:  # nothing of it need be known
        return Text(name, config.data.tokenizer, math.inf, ENGLISH)
    if not local:
        source.commit = source.newest()["commit"]
    readable = min(source.size, READ * seconds) if local else SAMPLE_BYTES
    every = max(1, int(readable / needed)) if local else 1
    thin = max(1, int(readable / every / SAMPLE_BYTES))  # of these, for the tokenizer
    directory.mkdir(parents=True, exist_ok=True)
    (directory / LOCK).touch()  # what lies beside it is not read as text, where text lies in data/ too
    kept, sample, path = 0, [], directory / f"every-{every}.txt"
    with tempfile.NamedTemporaryFile("w", dir=directory, encoding="utf-8") as out:
        for number, piece in enumerate(one.content for one in source.pieces()):
            if not isinstance(piece, str):
                raise UserError(f"--text {name} holds ids of tokens, and best.py reads text; write a recipe for it")
            if number % every == 0:
                kept += len(piece.encode())
                out.write(f"{piece}<|endoftext|>" if every > 1 else "")
            if number % (every * thin) == 0:
                sample.append(piece)
            if (source.position if local else kept) > readable:
                break
        out.flush()
        if every > 1 and not (path.exists() and filecmp.cmp(path, out.name)):  # a new file would have new shards
            shutil.copyfile(out.name, path)
    tokenizer = str(train_tokenizer(sample, directory / "tokenizer", OWN_TOKENS)) if own else config.data.tokenizer
    some = "".join(sample)[:1_000_000]
    token_bytes = len(some.encode()) / max(1, len(open_tokenizer(tokenizer).encode([some])[0]))
    unseen = source.size / readable if local and every == 1 else 1
    tokens = kept * unseen / token_bytes
    if tokens < LEAST_TOKENS:
        least = LEAST_TOKENS * token_bytes
        raise UserError(f"--text {name} has {kept:,} bytes, too few to train on; give about {least:,.0f} or more")
    held_out = float(f"{min(0.1, max(0.01, VAL_TOKENS / tokens)):.1g}")
    tokens = (1 - held_out) * tokens if local else math.inf
    return Text(str(path) if every > 1 else name, tokenizer, tokens, token_bytes, held_out, every)


def trained(strategy: Strategy, fields: Fields, words: list[str], *own: str) -> list[dict]:
    """Trains a recipe, by the loop itself, of which nothing is left but the lines of its metrics. A collective call.
    Raises KeyboardInterrupt where it was stopped."""
    processes, log = strategy.runtime.processes, logging.getLogger("recipe")
    Path("runs").mkdir(exist_ok=True)
    directory = processes.broadcast_object(tempfile.mkdtemp(prefix=".best-", dir="runs") if processes.is_main else "")
    fields |= dict.fromkeys(("eval_steps", "save_steps"), ("end", "a trial"))
    own = (*own, f"--output_dir={directory}", "--dry_run=false", "--push_to_hub=false", "--report_to=none")
    config = config_of(fields, *words, *own, "--hellaswag_steps=0", "--sample_steps=0")
    try:
        log.setLevel(logging.WARNING)
        code = run(config, strategy)
        lines = processes.broadcast_object(read_metrics(Path(directory) / "metrics.jsonl") if processes.is_main else [])
    finally:
        log.setLevel(logging.INFO)
        if processes.is_main:
            shutil.rmtree(directory, ignore_errors=True)
    if code != ExitCode.DONE:
        raise KeyboardInterrupt
    return lines


def pace(outlook: Outlook, choice: Choice, words: list[str], compiled: bool) -> None:
    """Takes some steps of the run that a choice would be, and lets `outlook` know how fast they are. (A trial's batch
    is smaller, for which a GPU takes as long.) A collective call."""
    fields = recipe(choice.size, outlook.text, choice.tokens, outlook.strategy.runtime.processes.world_size)
    batch, steps = fields["total_batch_tokens"][0], 4 * PACED
    logger.info("speed      %s, %d steps of %s tokens", described(choice.size), steps, f"{batch:,}")
    own = [f"--max_steps={steps}", "--warmup_steps=1", f"--logging_steps={PACED}", f"--eval_tokens={batch}"]
    lines = trained(outlook.strategy, fields, words, *own, f"--torch_compile={compiled}".lower())
    rates = [line["tokens_per_second"] for line in lines if line["step"] > PACED]  # the first ones compile
    outlook.rates[outlook.flops(choice.size)] = rate = statistics.median(rates)
    logger.info("speed      %s: %s tokens/s", described(choice.size), f"{rate:,.0f}")


def trial(outlook: Outlook, choice: Choice, seconds: float, words: list[str]) -> float:
    """Trains the size of a choice for so many seconds, and lets `outlook` know what loss it reached, on the same part
    of the text as the choice would. Returns the seconds that it took besides. A collective call."""
    size, begun, world_size = choice.size, time.monotonic(), outlook.strategy.runtime.processes.world_size
    fields = recipe(size, outlook.text, outlook.tokens_per_second(size) * seconds, world_size)
    fields["eval_tokens"] = recipe(size, outlook.text, choice.tokens, world_size)["eval_tokens"]
    logger.info("trial      %s, for %s", described(size), duration(seconds))
    *_, end = trained(outlook.strategy, fields, words, f"--train_hours={seconds / 3600:.5f}")
    outlook.losses.append((outlook.law(size, end["tokens"], outlook.text.tokens), end["val_loss"]))
    logger.info("trial      validation loss %.3f after %s tokens", end["val_loss"], si(end["tokens"], "B"))
    return time.monotonic() - begun - end["seconds"]


def try_sizes(outlook: Outlook, seconds: float, compiled: bool, words: list[str]) -> float:
    """Measures the speed of the best size, as far as `outlook` knows by then, until that is known or three are; then
    the loss of the best in two trials. Returns the seconds that the last took besides. A collective call."""
    for _ in range(MOST_PACED):
        if outlook.flops((choice := outlook.best(seconds)).size) not in outlook.rates:
            pace(outlook, choice, words, compiled and seconds > COMPILED_FROM_S)
    choice, besides = outlook.best(seconds), 0.0
    for share in TRIALS:
        besides = trial(outlook, choice, min(LONGEST_TRIAL_S, share * seconds), words)
    return besides


def compiles(strategy: Strategy, seconds: float) -> bool:
    """Whether a run of so many seconds is the better for being compiled."""
    return strategy.device.type == "cuda" or seconds > 3600


def config_of(fields: Fields, *words: str) -> Config:
    """The configuration of a recipe with these fields, and the words of a command line."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "recipe.yaml"
        path.write_text(yaml_of(fields), encoding="utf-8")
        return parse_config(["--config", str(path), *words])


def yaml_of(fields: Fields) -> str:
    """A recipe's lines."""
    values = {name: (json.dumps(value, ensure_ascii=False), why) for name, (value, why) in fields.items()}
    return "".join(f"{name}: {value}  # {why}\n" for name, (value, why) in values.items())


def described(size: Size) -> str:
    """In words."""
    known = {(12, 768): " (GPT-2)", (24, 1024): " (medium)", (36, 1280): " (large)", (48, 1600): " (XL)"}
    return f"{size[0]} layers, {size[1]} wide{known.get(size, '')}"


def look_at(request: argparse.Namespace, asked: Config, strategy: Strategy) -> tuple[Outlook, float]:
    """Reads the text, or enough of it, and says what is known of it before a trial, with the seconds that there are. A
    collective call. Raises UserError."""
    processes = strategy.runtime.processes
    with processes.shared_error("the text cannot be opened"):
        if not asked.data.train_text:
            raise unknown_data(request.text, "--text")
        source = open_text(asked.data)
        if isinstance(source, TextFiles) and next(source.pieces(), None) is None:
            raise UserError(f"--text {request.text} holds no text")
    tokens = source.size / ENGLISH if isinstance(source, TextFiles) else math.inf
    guess = Outlook(strategy, Text(request.text, GPT2, tokens, ENGLISH), OWN_TOKENS, law)  # before the text is read
    seconds = 3600 * request.hours or guess.seconds_for(request.tokens)
    first = guess.best(seconds)
    flops = first.tokens * guess.flops(first.size)
    own = flops < OWN_BELOW and "tokenizer" not in request.given
    with processes.shared_error("the text cannot be read"):
        needed = 2 * first.tokens * guess.text.token_bytes
        text = survey(request.text, source, asked, seconds, needed, own) if processes.is_main else None
    text = processes.broadcast_object(text)
    length = "without a known end" if text.tokens == math.inf else f"{si(text.tokens, 'B')} tokens to train on"
    made_by = f"a tokenizer of {OWN_TOKENS:,} trained on it" if own else f"tokenizer {text.tokenizer}"
    logger.info("text       %s: %s, %.1f bytes each, by %s", request.text, length, text.token_bytes, made_by)
    its_law = law if flops < FITTED_BELOW else published_law
    return Outlook(strategy, text, open_tokenizer(text.tokenizer).vocab_size, its_law), seconds


def write_recipe(request: argparse.Namespace, words: list[str], asked: Config, strategy: Strategy, path: Path) -> None:
    """Finds the run for what was asked, logs what to expect of it, and writes its recipe. A collective call. Raises
    UserError, and KeyboardInterrupt where it was stopped."""
    for name in request.given & {"max_steps", "num_train_epochs", "train_hours"}:
        raise UserError(f"--{name} is for a recipe that is there; for a new one give --hours, --tokens or --dollars")
    for name in request.given & CHOSEN:
        raise UserError(f"--{name}: best.py chooses the shape and the batch; change them in a copy of its recipe")
    processes, started = strategy.runtime.processes, psutil.Process().create_time()
    outlook, seconds = look_at(request, asked, strategy)
    compiled = compiles(strategy, seconds)
    besides = 0.0 if request.device else try_sizes(outlook, seconds, compiled, words)
    if request.tokens:
        seconds = outlook.seconds_for(request.tokens)
    else:
        seconds = processes.broadcast_object(seconds - (time.time() - started + besides))
        if seconds < LEAST_S:
            raise UserError("looking for the best size has taken all of the time; give more --hours")
    best = outlook.best(seconds)
    announce(outlook, outlook.choices(seconds), best)
    fields = recipe(best.size, outlook.text, best.tokens, processes.world_size)
    needed = best.tokens / outlook.tokens_per_second(best.size)
    if request.tokens or needed < WELL_BEFORE * seconds:
        steps = max(1, round(best.tokens / fields["total_batch_tokens"][0]))
        fields["max_steps"] = steps, "all that was asked for" if request.tokens else "more epochs bring nothing"
        if not request.tokens:
            logger.info("time       about %s of the %s that are left", duration(needed), duration(seconds))
    else:
        fields["train_hours"] = round(seconds / 3600, 4), "what is left of the time; the decay begins by the clock"
    fields["torch_compile"] = compiled, "pays in a long run"
    fields |= {name: (asked.flat()[name], "as given") for name in sorted(request.given)}
    fields["run_name"] = asked.run.run_name, "where it is"
    head = f"{request.asked}\nValidation loss to expect: {best.loss:.3f}, give or take {outlook.error(best):.0%}"
    head = f"accelerate launch --config_file accelerate_configs/single.yaml recipe/train.py --config {path}\n{head}"
    with processes.shared_error("the recipe cannot be written"):  # nor read before it is
        if processes.is_main:
            with run_directory(path.parent, fresh=asked.run.fresh):  # which moves an earlier run
                replace_file(path, ("# " + head.replace("\n", "\n# ") + "\n" + yaml_of(fields)).encode())
    logger.info("recipe     %s", path)


def announce(outlook: Outlook, choices: list[Choice], best: Choice) -> None:
    """Logs the best size between its neighbors, and what limits it."""
    here = choices.index(best)
    for choice in choices[max(0, here - 1) : here + 2]:
        bits = choice.loss / math.log(2) / outlook.text.token_bytes
        epochs = f", {choice.tokens / outlook.text.tokens:.2g} epochs" if outlook.text.tokens < math.inf else ""
        what = described(choice.size), choice.loss, bits, si(choice.tokens, "B"), epochs
        start = "best" if choice == best else ""
        logger.info(f"{start:<10} %s: loss %.3f (%.2f bits a byte) after %s tokens%s", *what)
    why = {
        "time": "the time; with more, a larger model",
        "text": f"the text, for a larger model and for more than {MOST_EPOCHS} epochs",
        "memory": "the memory; a larger model does not fit",
    }
    logger.info("limit      %s. Losses are give or take %s", why[best.limit], f"{outlook.error(best):.0%}")


def parse_request(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """What was asked for, and the words that are fields of a recipe. Raises UserError."""
    parser = ArgumentParser(prog="recipe/best.py", allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--text", default=os.path.relpath(TEXT), help="a file, a directory, a glob, or a data set on the Hub"
    )
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--hours", type=float, default=0.1, help="of everything, this search included (default: 0.1)")
    amount.add_argument("--tokens", type=float, default=0.0, help="to train on, by the size that needs so many")
    amount.add_argument("--dollars", type=float, help="hours, by --price_per_hour")
    parser.add_argument("--price_per_hour", type=float, default=0.0, help="dollars an hour of all devices")
    parser.add_argument("--print_run", action="store_true", help="only print where the run is, or would be")
    parser.add_argument("--device", default="", help="only plan, for devices that are not here, such as 8xh100")
    request, words = parser.parse_known_args(argv)
    amount_of = f"{request.hours:g}h"
    if request.dollars is not None:
        if not request.price_per_hour > 0:
            raise UserError("--dollars needs --price_per_hour, of all devices together")
        amount_of, request.hours = f"{request.dollars:g}usd", request.dollars / request.price_per_hour
    elif request.tokens:
        amount_of, request.hours = f"{request.tokens:g}-tokens", 0
    if not request.tokens >= 0:
        raise UserError(f"--tokens {request.tokens:g}: give how many to train on, such as 1e9")
    if not request.tokens and not 3600 * request.hours >= SHORTEST_S:
        raise UserError(f"{request.hours:g} hours: starting takes as long; give {SHORTEST_S / 3600:g} or more")
    request.run_name = re.sub(r"[^\w.-]+", "-", f"{Path(request.text).name.partition('.')[0]}-{amount_of}").strip("-.")
    request.asked = f"From recipe/best.py for {amount_of} of {request.text}"
    if request.price_per_hour:
        request.asked += f", at {request.price_per_hour:g} an hour"
    if request.device:
        request.asked += f", on {request.device}"
    request.given = {word[2:].partition("=")[0] for word in words if word.startswith("--")} - {"dry_run", "fresh"}
    return request, words


def main(argv: list[str] | None = None) -> int:
    """Writes a recipe, trains it, and returns the exit code."""
    path = None
    try:
        request, words = parse_request(sys.argv[1:] if argv is None else argv)
        asked = parse_config([f"--dataset_name={request.text}", f"--run_name={request.run_name}", *words])
        if request.print_run:  # for the Makefile, which samples from the run that it has just made
            print(asked.run.output_dir)
            return ExitCode.DONE
        strategy = open_strategy(asked.run.precision, request.device, deterministic=asked.run.deterministic)
        set_up_logging(main=strategy.runtime.processes.is_main)
        path = Path(asked.run.output_dir) / "recipe.yaml"
        processes, planned = strategy.runtime.processes, asked.run.dry_run or request.device
        with processes.shared_error("there is another recipe"):
            known = path.exists() and not asked.run.fresh
            lines = path.read_text().splitlines() if known else []
            if known and f"# {request.asked}" not in lines:
                raise UserError(f"{path} is for something else; give another --run_name, or --fresh")
            if not known and processes.is_main:  # or it would be found out after the search
                with run_directory(path.parent):
                    pass
        if known:
            logger.info("recipe     %s is there%s", path, "" if planned else ": its run goes on")
            for line in lines if planned else []:
                if line.startswith("# Validation loss to expect"):
                    logger.info("           %s", line.removeprefix("# "))
        else:
            write_recipe(request, words, asked, strategy, path)
        if planned:
            return ExitCode.DONE
        config = parse_config(["--config", str(path), *words])
        code = run(config.replace(fresh=False), strategy)
        strategy.runtime.close()
        return code
    except (UserError, OSError, RuntimeError) as error:
        return fail(error)
    except KeyboardInterrupt:
        if is_local_main_process():
            then = "a step was taken; the same command goes on"
            if not (path and path.exists()):
                then = "there was a recipe; the same command searches again"
            print(f"\nstopped before {then}", file=sys.stderr)
        return ExitCode.RUN_AGAIN


if __name__ == "__main__":
    sys.exit(main())
