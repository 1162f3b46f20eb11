"""What the evaluation commands share: finding and loading a model, scoring tokens, progress, results, errors."""

import argparse
import contextlib
import functools
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub.constants
import torch
import torch.nn.functional as F
import transformers
from huggingface_hub import get_session
from huggingface_hub.utils import logging as hub_logging
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.activations import NewGELUActivation

from eval.devices import UserError, choose_device

METRICS = Path(__file__).resolve().parent / "metrics"
STEP_DIR = re.compile(r"step_(\d+)")
MODEL_FILES = ("config.json", "model.safetensors")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer_config.json")
HUB_PATIENCE = 5.0  # seconds in which the Hub must answer
# Rows of logits held in float32 at once, by device: 128 x 50257 x 4 bytes is 26 MB, and larger pieces were slower on a
# CPU (they fall out of its cache); other devices take 2048 (412 MB).
PIECE = {"cpu": 128}


@dataclass(frozen=True)
class Loaded:
    """A model ready to be scored: `directory` is None for a Hub id."""

    name: str
    directory: Path | None
    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype

    @property
    def n_positions(self) -> int:
        return self.model.config.max_position_embeddings

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text: no special tokens added, and a literal "<|endoftext|>" is read as text."""
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)

    def describe(self) -> dict[str, str]:
        """What every result records about the model that it belongs to."""
        return {"model": self.name, "device": self.device.type, "dtype": str(self.dtype).removeprefix("torch.")}


def parser(description: str, *, batch_size: int | None = None, batch_unit: str = "") -> argparse.ArgumentParser:
    """The arguments that all evaluation commands take. `batch_size` is the default, in `batch_unit`."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("model", nargs="?", help="checkpoint, run directory or Hub id (default: the newest run)")
    result.add_argument("--model", dest="model_option", metavar="DIR_OR_ID", help="the same, as an option")
    result.add_argument("--device", default="auto", choices=["auto", "cuda", "mps", "cpu", "xla"])
    result.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    if batch_size:
        result.add_argument("--batch_size", type=positive_int, default=batch_size, help=f"{batch_unit} a forward pass")
    result.add_argument("--output", type=Path, help="JSON file to merge results into (default: MODEL/results.json)")
    return result


def positive_int(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return int(text)


def run_main(main: Callable[[], None]) -> None:
    """Run a command; a user's error becomes one line on stderr and exit code 2 instead of a traceback."""
    try:
        main()
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def steps_of(run: Path) -> list[Path]:
    """Complete checkpoints of a run directory, oldest step first. Temporaries never match `step_<number>`."""
    found = [path for path in run.glob("step_*") if STEP_DIR.fullmatch(path.name)]
    complete = [path for path in found if all((path / name).is_file() for name in MODEL_FILES)]
    return sorted(complete, key=lambda path: int(STEP_DIR.fullmatch(path.name).group(1)))


def resolve_model(name: str | None, runs: Path = Path("runs")) -> tuple[str, Path | None]:
    """(name to show and load, its directory or None for a Hub id).

    No name: the newest checkpoint of the newest run under `runs`. A run directory: its newest step.
    Raises UserError where there is nothing to load.
    """
    if name is None:
        newest = [steps[-1] for steps in map(steps_of, runs.glob("*")) if steps]
        if not newest:
            raise UserError(f"no model given and no checkpoint under {runs}/: run `make train`, or name one: MODEL=dir")
        # Not the directory's own time: results.json is written into it.
        chosen = max(newest, key=lambda path: (path / "model.safetensors").stat().st_mtime)
        print(f"no model given: the newest run's newest checkpoint is {chosen}")
        return str(chosen), chosen
    path = Path(name).expanduser()
    if not path.exists():
        if re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name) and not name.startswith(f"{runs}/"):
            return name, None
        raise UserError(f"model {name}: no such directory. Name a checkpoint, a run directory or a Hub id")
    if not (path / "config.json").is_file():
        steps = steps_of(path)
        if not steps:
            raise UserError(f"model {name}: neither config.json nor a complete step_<number> directory in it")
        path = steps[-1]
    if not any((path / file).is_file() for file in TOKENIZER_FILES):
        raise UserError(f"model {path}: no tokenizer files ({', '.join(TOKENIZER_FILES)}) beside the weights")
    return str(path), path


def load(args: argparse.Namespace, shared: bool = False) -> Loaded:
    """Load the model and tokenizer that the arguments of `parser` name, and say what was loaded; `shared` is
    `choose_device`'s.

    Raises UserError if there is none, if the Hub cannot be reached, or if the file lacks some of the weights.
    """
    # Loading reports and retry notices of the libraries would stand between the user and one clear line.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
    name, directory = resolve_model(args.model_option or args.model)
    device = choose_device(args.device, shared)
    dtype = choose_dtype(args.dtype, device)
    if directory is None:
        print(f"{name} is no directory here: asking the Hub for it", flush=True)
    why = (
        ""
        if directory or reach_hub()
        else "the Hub does not answer (or HF_HUB_OFFLINE is set), and the model is not in the cache"
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model, report = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, output_loading_info=True)
    except Exception as error:  # the libraries raise many kinds on a broken directory or an absent model
        if why:
            raise UserError(f"model {name}: {why}. Check the network, or name a directory: MODEL=runs/NAME") from error
        way_out = "check the directory" if directory else "neither a directory nor a model on the Hub"
        raise UserError(f"model {name}: {way_out} ({first_line(error)})") from error
    # transformers fills absent weights with random numbers: such a model must not get a score.
    absent = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if absent:
        raise UserError(f"model {name}: the file lacks {len(absent)} of the model's weights, among them {absent[0]}")
    fuse_activations(model)
    loaded = Loaded(name, directory, model.to(device).eval(), tokenizer, device, dtype)
    print(
        f"model {name}: {model.num_parameters():,} parameters, {device.type}, {loaded.describe()['dtype']}", flush=True
    )
    return loaded


def reach_hub() -> bool:
    """Whether the Hub answers within HUB_PATIENCE seconds.

    If it does not, the libraries are set to offline: what is in their caches still loads, and the rest fails at once
    instead of after a minute of silent retries.
    """
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    answers = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            answers.append(get_session().head(huggingface_hub.constants.ENDPOINT, timeout=HUB_PATIENCE))

    thread = threading.Thread(target=ask, daemon=True)  # looking up a name may take longer than the request's limit
    thread.start()
    thread.join(HUB_PATIENCE)
    if not answers:
        import datasets

        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    return bool(answers)


def load_split(name: str, config: str, column: str, way_out: str) -> list[str]:
    """A column of the test split of a data set on the Hub. Raises UserError, with the way out, if there is none."""
    print(f"asking the Hub for {name}, test", flush=True)
    reached = reach_hub()
    import datasets

    datasets.utils.logging.set_verbosity_error()
    try:
        return list(datasets.load_dataset(name, config, split="test")[column])
    except Exception as error:  # the libraries raise many kinds without a network or the data set
        reason = (
            first_line(error)
            if reached
            else "the Hub does not answer (or HF_HUB_OFFLINE is set), and it is not in the cache"
        )
        raise UserError(f"{name}: {reason}. {way_out}") from error


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device computes in it, float32 on a CPU, on MPS and on older GPUs."""
    if name != "auto":
        return getattr(torch, name)
    native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native or device.type == "xla" else torch.float32


def fuse_activations(model: transformers.PreTrainedModel) -> None:
    """GPT-2's GELU, which transformers puts together from seven operations, as PyTorch's one of the same formula: a
    fifth of a forward pass on a CPU."""
    for name, module in list(model.named_modules()):
        if isinstance(module, NewGELUActivation):
            model.set_submodule(name, torch.nn.GELU(approximate="tanh"))


def trainer_config(directory: Path | None) -> dict:
    """The training run's configuration, from trainer_state.json in a checkpoint; empty for any other model."""
    state = directory / "trainer_state.json" if directory else None
    return json.loads(state.read_text())["config"] if state and state.is_file() else {}


def identity(states: torch.Tensor) -> torch.Tensor:
    return states


def body_and_head(model: transformers.PreTrainedModel) -> tuple[Callable, Callable]:
    """Split a model into ids (N, T) -> states (N, T, D) and states (M, D) -> logits (M, V).

    So the scorers pay the output projection, which is most of a small model's time and memory, only where a token
    is scored. Architectures other than GPT-2 may do more after the head: for them the states are the logits. GPT-2's
    first function also takes positions (N, T) and, where `shares_prefixes`, a mask (N, 1, T, T), true where a query
    may see a key.
    """
    if model.config.model_type != "gpt2":
        return lambda ids: model(ids, use_cache=False).logits, identity

    def body(ids: torch.Tensor, positions: torch.Tensor | None = None, mask: torch.Tensor | None = None):
        states = model.transformer(ids, position_ids=positions, attention_mask=mask, use_cache=False)
        return states.last_hidden_state

    return body, model.lm_head


def shares_prefixes(model: transformers.PreTrainedModel) -> bool:
    """Whether several continuations of one context may stand in a row: known of GPT-2, whose attention is SDPA (which
    reads a mask of booleans) and whose positions are what they are told to be."""
    return model.config.model_type == "gpt2" and model.config._attn_implementation == "sdpa"


def token_log_probs(states: torch.Tensor, targets: torch.Tensor, head: Callable = identity) -> torch.Tensor:
    """log p(target) in nats, float32 (M,), from states (M, D), their targets (M,) and head: (m, D) -> logits (m, V)."""
    size = PIECE.get(states.device.type, 2048)
    pairs = zip(states.split(size), targets.split(size), strict=True)
    return torch.cat([-F.cross_entropy(head(part).float(), wanted, reduction="none") for part, wanted in pairs])


def track(batches: Sequence[Sequence], desc: str, unit: str, show: bool = True) -> Iterator[Sequence]:
    """Yield each batch; show a bar on a terminal, and elsewhere a plain line every 30 seconds and at the end."""
    total, done, told = sum(map(len, batches)), 0, time.monotonic()
    with tqdm(total=total, desc=desc, unit=f" {unit}", disable=None if show else True) as bar:
        for batch in batches:
            yield batch
            done += len(batch)
            bar.update(len(batch))
            if show and bar.disable and (done == total or time.monotonic() - told > 30):
                told = time.monotonic()
                print(f"{desc}: {done:,} of {total:,} {unit}", flush=True)


@functools.cache
def _metric_cache() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="metrics-")


def load_metric(name: str):
    """The evaluate.Metric in eval/metrics/<name>/, loaded by path, without the Hub.

    `evaluate` copies a module into its cache before importing it and spools rows through a locked file. A private
    cache and memory instead: concurrent processes never meet, and a read-only HF_HOME does no harm.
    """
    cache = _metric_cache().name
    # Read once, when `evaluate` is imported, hence set before it and the late import.
    os.environ.setdefault("HF_MODULES_CACHE", cache)
    import evaluate

    return evaluate.load(str(METRICS / name / f"{name}.py"), cache_dir=cache, keep_in_memory=True)


def read_results(path: Path) -> dict:
    """Results that are already in a file; empty if there is none. Raises UserError if it holds something else."""
    try:
        results = json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        results = None
    if not isinstance(results, dict):
        raise UserError(f"{path}: not a JSON object of results. Move it away, or name another --output")
    return results


def results_path(output: Path | None, loaded: Loaded) -> Path:
    """Where results go, checked before the long work starts. Raises UserError if they could not be written there."""
    path = output or (loaded.directory or Path()) / "results.json"
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{path.parent}: not a directory that can be written to. Name another --output")
    read_results(path)
    return path


def write_results(path: Path, key: str, value: dict) -> None:
    """Put `value` under `key` beside what the file holds already; a reader sees the old file or the new one."""
    text = json.dumps(read_results(path) | {key: value}, indent=2) + "\n"
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)  # temporary files are born private to their owner
    os.replace(file.name, path)
    print(f"wrote {path}")
