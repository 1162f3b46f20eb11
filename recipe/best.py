"""Command: give text and time, get the best GPT-2 that this machine can train in it.

    accelerate launch --config_file accelerate_configs/single.yaml recipe/best.py --text my.txt --hours 2

Reads the text, takes some steps of up to three sizes to measure this machine, and chooses the size that will have the
lowest loss when the time is over, by a scaling law (recipe/estimate/scaling.py). Two short trials of that size, a
seventh of the time at most, show how hard the text is. The result is runs/NAME/recipe.yaml, a recipe like any other,
which is then trained. Any field of a recipe may be given too (--precision fp32), and is kept as it is.
"""

from __future__ import annotations

import argparse
import glob
import logging
import math
import os
import re
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # see train.py
    signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
if __package__ in (None, ""):  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from recipe.utils.errors import check_packages

    check_packages()
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # see train.py

import psutil

from recipe.checkpoint.run_dir import run_directory
from recipe.config import FIELDS, QUIET, Config, parse_config
from recipe.config.catalog import unknown_data
from recipe.config.values import hint
from recipe.data.documents import TextFiles
from recipe.data.producer import open_text
from recipe.data.survey import ENGLISH, OWN_VOCAB_SIZE, SHIPPED_TEXT, Text, survey
from recipe.data.tokenizer import GPT2, open_tokenizer
from recipe.engine.factory import open_strategy
from recipe.engine.launch import fail, is_local_main_process
from recipe.engine.shutdown import StopSignal
from recipe.engine.strategy import Strategy
from recipe.estimate.forecast import MAX_EPOCHS, Fields, Forecast, Forecaster, config_of, yaml_of
from recipe.estimate.scaling import SIZES, Size, law
from recipe.train import run
from recipe.utils.checkpoints import checkpoints, read_metrics
from recipe.utils.errors import ArgumentParser, ExitCode, UserError
from recipe.utils.files import replace_file
from recipe.utils.log import set_up_logging
from recipe.utils.processes import exit_process
from recipe.utils.redaction import home_as_tilde, redact
from recipe.utils.units import duration, si

logger = logging.getLogger("recipe.best")

OWN_TOKENIZER_BELOW = 1e17  # FLOPs of a run in which the head for GPT-2's 50,257 tokens would take most of the time
SPEED_STEPS, SPEED_RUNS = 20, 3  # steps that measure a speed, and speeds before the trials and after them, at most
MIN_TIMED_COMPILED_S = 900  # seconds of a compiled run from which sizes are compiled before they are timed
TRIAL_SHARES, MAX_TRIAL_S = (0.02, 0.12), 300  # of the time, so far apart that they show how the text is learned
EARLY_END = 0.8  # of the time: a run that has taken all useful epochs by then stops there; others fill the time
TRIAL = ".trial"  # directory of the current trial, inside the run's
MIN_TIME_S, MIN_LEFT_S = 90, 5  # of the time given, and of what the search leaves of it
# Fields that best.py chooses, and fields on which its other choices depend, so they cannot be changed.
CHOSEN = {"n_layer", "n_head", "n_embd", "n_positions", "sequence_length", "total_batch_tokens", "init_from"}
FIXED = {"optim", "lr_scheduler_type", "config"}


def main(argv: list[str] | None = None) -> int:
    """Writes a recipe, trains it, and returns the exit code."""
    path = None
    try:
        request, flags = parse_request(sys.argv[1:] if argv is None else argv)
        config = parse_config([f"--dataset_name={request.text}", f"--run_name={request.run_name}", *flags])
        if request.print_run:  # for the Makefile, which then samples from this run
            print(config.run.output_dir)
            return ExitCode.DONE
        strategy = open_strategy(config.run.precision, request.device, deterministic=config.run.deterministic)
        set_up_logging(main=strategy.runtime.processes.is_main)
        if config.run.plan_device:
            raise UserError(f"--dry_run takes no devices here; use --device {config.run.plan_device}")
        path = Path(config.run.output_dir) / "recipe.yaml"
        plan_only = config.run.dry_run or request.device
        if (lines := earlier_recipe(request, config, strategy, path)) is not None:
            logger.info("recipe     %s exists%s", path, "" if plan_only else ": continuing its run")
            for line in lines if plan_only else []:
                if line.startswith("# Validation loss to expect"):
                    logger.info("           %s", line.removeprefix("# "))
        else:
            write_recipe(request, flags, config, strategy, path)
        if plan_only:
            return ExitCode.DONE
        code = run(parse_config(["--config", str(path), *flags]).replace(fresh=False), strategy)
        strategy.runtime.close()
        return code
    except (UserError, OSError, RuntimeError) as error:
        return fail(error)
    except KeyboardInterrupt:
        if is_local_main_process():
            stopped = "before the first step; the same command continues"
            if not (path and path.exists()):
                stopped = "before the recipe was written; the same command searches again"
            print(f"\nstopped {stopped}", file=sys.stderr)
        return ExitCode.RUN_AGAIN
    finally:
        if __name__ != "__main__":  # see train.py
            StopSignal.release()


def parse_request(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """What was asked for, and the flags that are fields of a recipe. Raises UserError."""
    parser = ArgumentParser(
        prog="recipe/best.py",
        allow_abbrev=False,
        description=__doc__.partition("\n")[0],
        epilog="Most fields of a recipe are flags, too: --dry_run, --fresh, --run_name NAME, --precision fp32. "
        "`recipe/train.py --help` lists them.",
    )
    parser.add_argument(
        "--text", default=os.path.relpath(SHIPPED_TEXT), help="a file, a directory, a glob, or a data set on the Hub"
    )
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--hours", type=float, default=0.1, help="for everything, the search included (default: 0.1)")
    budget.add_argument("--tokens", type=float, default=0.0, help="to train on, with the best size for that many")
    budget.add_argument("--dollars", type=float, help="budget in dollars, converted to hours by --price_per_hour")
    parser.add_argument("--price_per_hour", type=float, default=0.0, help="dollars an hour of all devices")
    parser.add_argument("--print_run", action="store_true", help="only print where the run is, or would be")
    parser.add_argument("--device", default="", help="only plan, for devices that are not here, such as 8xh100")
    request, flags = parser.parse_known_args(argv)
    amount = f"{request.hours:g}h"
    if request.dollars is not None:
        if not request.price_per_hour > 0:
            raise UserError("--dollars needs --price_per_hour, of all devices together")
        amount, request.hours = f"{request.dollars:g}usd", request.dollars / request.price_per_hour
    elif request.tokens:
        amount, request.hours = f"{request.tokens:g}-tokens".replace("e+0", "e").replace("e+", "e"), 0
    if not request.tokens >= 0:
        raise UserError(f"--tokens {request.tokens:g}: give how many to train on, such as 1e9")
    if not request.tokens and not MIN_TIME_S <= 3600 * request.hours < math.inf:
        raise UserError(f"{request.hours:g} hours: give {MIN_TIME_S / 3600:g}, the fewest possible, or more")
    given = {flag[2:].partition("=")[0] for flag in flags if flag.startswith("--")}
    for name in given - FIELDS.keys():
        raise UserError(f"unknown '--{name}'{hint(name, FIELDS | vars(request))}")
    for name in given & {"dataset_name", "train_text"}:
        raise UserError(f"--{name}: name the text with --text")
    for name in given & FIXED:
        raise UserError(f"--{name}: best.py needs Muon and wsd; edit a copy of its recipe, or use train.py")
    request.given = given - {"dry_run", "fresh", "run_name"}
    name = Path(request.text)
    while glob.has_magic(name.name) and not name.exists():
        name = name.parent
    request.run_name = re.sub(r"[^\w.-]+", "-", f"{name.name.partition('.')[0]}-{amount}").strip("-.")
    request.title = f"From recipe/best.py for {amount} of {request.text}"
    if request.price_per_hour:
        request.title += f", at {request.price_per_hour:g} an hour"
    if request.device:
        request.title += f", on {request.device}"
    return request, flags


def earlier_recipe(request: argparse.Namespace, config: Config, strategy: Strategy, path: Path) -> list[str] | None:
    """The lines of the recipe that was written for the same request, if there is one. A collective call. Raises
    UserError if the recipe there was written for another request."""
    processes = strategy.runtime.processes
    exists = processes.broadcast_object(path.exists() and not config.run.fresh)
    with processes.shared_error("the earlier recipe cannot be read"):
        if exists:
            lines = path.read_text().splitlines()
            if f"# {redact(request.title)}" not in lines:
                raise UserError(f"{path} was written for another request; give another --run_name, or --fresh")
            return lines
    return None


def write_recipe(request: argparse.Namespace, flags: list[str], config: Config, strategy: Strategy, path: Path) -> None:
    """Searches for the best run for a request and writes its recipe. A collective call. Raises UserError, and
    KeyboardInterrupt if it was stopped."""
    for name in request.given & {"max_steps", "num_train_epochs", "train_hours"}:
        raise UserError(f"--{name} needs an existing recipe; for a new one give --hours, --tokens or --dollars")
    for name in request.given & CHOSEN:
        raise UserError(f"--{name}: best.py chooses the shape and the batch; change them in a copy of its recipe")
    processes = strategy.runtime.processes
    with ExitStack() as lock:  # before the text is read and through the search: one search for a run at a time
        with processes.shared_error("the recipe cannot be written"):
            if processes.is_main:
                lock.enter_context(run_directory(path.parent))
                if checkpoints(path.parent) and not config.run.fresh:
                    raise UserError(f"{path.parent} holds another run; give another --run_name, or --fresh")
        forecaster, seconds = read_text(request, config, strategy)
        search_flags = [*flags, f"--output_dir={path.parent / TRIAL}"]
        fields, best = search(request, search_flags, config, forecaster, seconds)
        # The recipe's place names the run, so that a copy is another one, unless another name was given.
        if any(flag.startswith("--run_name") for flag in flags) and config.run.run_name != path.parent.name:
            fields["run_name"] = config.run.run_name, "as given"
        head = [
            f"{launcher(strategy)} recipe/train.py --config {path}",
            request.title,
            f"Validation loss to expect: {best.loss:.3f}, give or take {100 * forecaster.relative_error(best):.0f} %",
        ]
        comments = "".join(f"# {line}\n" for line in head)
        paths = {name for name in fields if FIELDS[name].metadata["path"]}
        fields |= {name: (home_as_tilde(fields[name][0]), fields[name][1]) for name in paths}
        content = redact(comments) + yaml_of(fields)
        lock.close()
        with processes.shared_error("the recipe cannot be written"):  # no process reads it before it is there
            if processes.is_main:
                with run_directory(path.parent, fresh=config.run.fresh):  # which moves an earlier run
                    replace_file(path, content.encode())
    logger.info("recipe     %s", path)


def search(
    request: argparse.Namespace, flags: list[str], config: Config, forecaster: Forecaster, total: float
) -> tuple[Fields, Forecast]:
    """The recipe of the best run in `total` seconds, part of which goes into the search, and its forecast, which is
    logged. A collective call. Raises UserError, and KeyboardInterrupt if it was stopped."""
    strategy = forecaster.strategy
    started = time.monotonic() - (time.time() - psutil.Process().create_time())  # somebody may set the clock

    def left(reserve: float = 0.0) -> float:  # a collective call
        if request.tokens:  # take their time, however long the search took
            return forecaster.seconds_for(request.tokens)
        seconds = strategy.runtime.processes.broadcast_object(total - (time.monotonic() - started) - reserve)
        if seconds < MIN_LEFT_S:
            raise UserError("the search has used up the time; give more --hours")
        return seconds

    overhead = 0.0 if request.device else try_sizes(forecaster, left, flags)
    seconds = left(overhead)
    best = forecaster.best(seconds)
    log_forecasts(forecaster, forecaster.forecasts(seconds), best, "tokens" if request.tokens else "time")
    fields = forecaster.fields_for(best.size, best.tokens)
    training_s = best.tokens / forecaster.tokens_per_second(best.size)
    if request.tokens or training_s < EARLY_END * seconds:
        steps = max(1, round(best.tokens / fields["total_batch_tokens"][0]))
        in_full = request.tokens and best.tokens < MAX_EPOCHS * forecaster.text.tokens
        fields["max_steps"] = steps, "as requested" if in_full else "more epochs would not lower the loss"
        if not request.tokens:
            logger.info("time       about %s of the %s that are left", duration(training_s), duration(seconds))
    else:
        fields["train_hours"] = round(seconds / 3600, 4), "the remaining time; the clock starts the decay"
    fields["torch_compile"] = min(training_s, seconds) > min_compiled_seconds(strategy), "pays in a long run"
    values = config.flat()
    values["val_data"] = config.data.val_text or config.data.val_data  # not shards, which depend on the tokenizer
    return fields | {name: (values[name], "as given") for name in sorted(request.given)}, best


def launcher(strategy: Strategy) -> str:
    """The command that launches a script on these devices of one node."""
    sharding, count = strategy.runtime.sharding, strategy.runtime.processes.world_size
    command = "accelerate launch --config_file accelerate_configs"
    if strategy.device.type in ("tpu", "xla"):
        return f"{command}/{'tpu-fsdp' if sharding else 'tpu'}.yaml"
    if count == 1:
        return f"{command}/single.yaml"
    on_cpu = "ACCELERATE_USE_CPU=true " if strategy.device.type == "cpu" else ""
    return f"{on_cpu}{command}/{sharding or 'ddp'}.yaml --num_processes {count}"


def read_text(request: argparse.Namespace, config: Config, strategy: Strategy) -> tuple[Forecaster, float]:
    """A forecaster for the text of a request, and the seconds that the run has. A collective call. Raises UserError."""
    processes = strategy.runtime.processes
    with processes.shared_error("the text cannot be opened"):
        if not config.data.train_text:
            raise unknown_data(request.text, "--text")
        source = open_text(config.data)
        if isinstance(source, TextFiles) and next(source.pieces(), None) is None:
            raise UserError(f"--text {request.text} holds no text")
    # By the size of the text alone, before it is read.
    tokens = source.size / ENGLISH if isinstance(source, TextFiles) else math.inf
    guess = Forecaster(strategy, Text(request.text, GPT2, tokens, ENGLISH), OWN_VOCAB_SIZE)
    seconds = 3600 * request.hours or guess.seconds_for(request.tokens)
    best = guess.best(seconds)
    flops = best.tokens * guess.flops(best.size)
    train_own = flops < OWN_TOKENIZER_BELOW and "tokenizer" not in request.given
    text = None
    train = f", and training a tokenizer of {OWN_VOCAB_SIZE:,} tokens on it" if train_own else ""
    logger.info("text       reading %s%s", request.text, train)
    with processes.shared_error("the text cannot be read"):
        if processes.is_main:
            needed_bytes = 2 * best.tokens * ENGLISH
            text = survey(request.text, source, config, seconds=seconds, needed_bytes=needed_bytes, train_own=train_own)
    text = processes.broadcast_object(text)
    length = "of unknown length" if text.tokens == math.inf else f"{si(text.tokens, 'B')} tokens to train on"
    tokenizer = f"a tokenizer of {OWN_VOCAB_SIZE:,} trained on it" if train_own else f"tokenizer {text.tokenizer}"
    logger.info("text       %s: %s, %.1f bytes a token, with %s", request.text, length, text.token_bytes, tokenizer)
    vocab_size = open_tokenizer(text.tokenizer).vocab_size
    return Forecaster(strategy, text, vocab_size), seconds


def try_sizes(forecaster: Forecaster, left: Callable[[float], float], flags: list[str]) -> float:
    """Measures the speed of the best run for the time that is left, then the loss of its size in two trials and, if
    these make another run the best, that run's speed too. `left(reserve)` is the time left without `reserve` seconds.
    Returns the seconds that the second trial spent on anything but training. A collective call."""
    compiled_s = min_compiled_seconds(forecaster.strategy)
    measured: set[tuple[Size, int]] = set()

    def measure_speeds(reserve: float) -> None:
        for _ in range(SPEED_RUNS):  # a measured speed may make another size or batch the best
            seconds = left(reserve)
            best = forecaster.best(seconds)
            size_and_batch = best.size, forecaster.fields_for(best.size, best.tokens)["total_batch_tokens"][0]
            if size_and_batch in measured:
                return
            measured.add(size_and_batch)
            measure_speed(forecaster, best, flags, seconds > max(MIN_TIMED_COMPILED_S, compiled_s))

    seconds, overhead = left(0.0), 0.0
    trials_s = [min(MAX_TRIAL_S, share * seconds) for share in TRIAL_SHARES]
    measure_speeds(sum(trials_s))  # without the trials' time, which may make a smaller size the best
    best = forecaster.best(left(sum(trials_s)))
    for trial_s in trials_s:
        overhead = measure_loss(forecaster, best, trial_s, flags)
    measure_speeds(overhead)
    return overhead


def min_compiled_seconds(strategy: Strategy) -> float:
    """How many seconds a run must last for compiling to pay: on an H200 it took 25 seconds and made the run 1.18 times
    as fast (docs/log.md)."""
    return 300 if strategy.device.type == "cuda" else 3600


def measure_speed(forecaster: Forecaster, forecast: Forecast, flags: list[str], torch_compile: bool) -> None:
    """Takes some steps of a forecast's run, with its full batch: a GPU takes as long for a smaller one. A collective
    call."""
    fields = forecaster.fields_for(forecast.size, forecast.tokens)
    batch, window = fields["total_batch_tokens"][0], SPEED_STEPS // 4
    logger.info("speed      measuring %s: %d steps of %s tokens", name_of(forecast.size), SPEED_STEPS, f"{batch:,}")
    own_flags = [f"--max_steps={SPEED_STEPS}", "--warmup_steps=1", f"--logging_steps={window}"]
    own_flags.append(f"--eval_tokens={batch}")
    flags = [f"--torch_compile={torch_compile}".lower(), *flags, *own_flags]  # the user's torch_compile wins
    lines = train_and_delete(forecaster.strategy, fields, flags)
    rate = statistics.median(line["tokens_per_second"] for line in lines if line["step"] > window)  # the first compiles
    forecaster.rates[forecaster.flops(forecast.size)] = rate
    logger.info("speed      %s: %s tokens/s", name_of(forecast.size), f"{rate:,.0f}")


def measure_loss(forecaster: Forecaster, forecast: Forecast, seconds: float, flags: list[str]) -> float:
    """Trains the size of a forecast for this many seconds, and validates on as many tokens as its run would. Returns
    the seconds spent on anything but training. A collective call."""
    size, started = forecast.size, time.monotonic()
    fields = forecaster.fields_for(size, forecaster.tokens_per_second(size) * seconds)
    fields["eval_tokens"] = forecaster.fields_for(size, forecast.tokens)["eval_tokens"]
    logger.info("trial      training %s for %s", name_of(size), duration(seconds))
    *_, last = train_and_delete(forecaster.strategy, fields, [*flags, f"--train_hours={max(seconds / 3600, 1e-5):.5f}"])
    forecaster.losses.append((law(size, last["tokens"], forecaster.text.tokens), last["val_loss"]))
    logger.info("trial      validation loss %.3f after %s tokens", last["val_loss"], si(last["tokens"], "B"))
    return forecaster.strategy.runtime.processes.broadcast_object(time.monotonic() - started - last["seconds"])


def train_and_delete(strategy: Strategy, fields: Fields, flags: list[str]) -> list[dict]:
    """Trains a recipe with the training loop itself, in the flags' output_dir, which it then deletes, and returns the
    lines of its metrics. A collective call. Raises KeyboardInterrupt if it was stopped."""
    processes = strategy.runtime.processes
    quiet = {"recipe": logging.WARNING, "recipe.engine.shutdown": logging.ERROR}  # it would promise a checkpoint
    config = config_of(fields, *flags, *(f"--{name}={value}" for name, value in QUIET.items()))
    directory = Path(config.run.output_dir)
    assert directory.name == TRIAL
    try:
        if processes.is_main:  # a search that was killed has left its trial there
            shutil.rmtree(directory, ignore_errors=True)
        for name, level in quiet.items():
            logging.getLogger(name).setLevel(level)
        code = run(config, strategy)
        lines = processes.broadcast_object(read_metrics(directory / "metrics.jsonl") if processes.is_main else [])
    finally:
        for name in quiet:
            logging.getLogger(name).setLevel(logging.INFO)
        if processes.is_main:
            shutil.rmtree(directory, ignore_errors=True)
    if code != ExitCode.DONE:
        raise KeyboardInterrupt
    return lines


def log_forecasts(forecaster: Forecaster, forecasts: list[Forecast], best: Forecast, budget: str) -> None:
    """Logs the best size between its neighbors, and what limits it; the budget is "time" or "tokens"."""
    index, text = forecasts.index(best), forecaster.text
    for forecast in forecasts[max(0, index - 1) : index + 2]:
        bits = forecast.loss / math.log(2) / text.token_bytes
        epochs = f", {forecast.tokens / text.tokens:.2g} epochs" if text.tokens < math.inf else ""
        logger.info(
            f"{'best' if forecast == best else '':<10} %s: loss %.3f (%.2f bits per byte) after %s tokens%s",
            *(name_of(forecast.size), forecast.loss, bits, si(forecast.tokens, "B"), epochs),
        )
    limits = {
        "time": f"the {budget}; " + ("no model is larger" if best.size == SIZES[-1] else "with more, a larger model"),
        "text": f"the text, for a larger model and for more than {MAX_EPOCHS} epochs",
        "memory": "memory: a larger model does not fit",
    }
    limit = limits[best.limit]
    if best.limit == "text" and best.tokens < MAX_EPOCHS * text.tokens:
        limit = f"the {budget}, and the text for a larger model"
    percent = f"{100 * forecaster.relative_error(best):.0f} %"
    logger.info("limit      %s. Expected losses are within about %s", limit, percent)


def name_of(size: Size) -> str:
    """A size in words: 12 layers, 768 wide (GPT-2)."""
    name = {(12, 768): " (GPT-2)", (24, 1024): " (medium)", (36, 1280): " (large)", (48, 1600): " (XL)"}.get(size, "")
    return f"{size[0]} layers, {size[1]} wide{name}"


if __name__ == "__main__":
    exit_process(main())
