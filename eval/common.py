"""Shared by the evaluation commands: finding and loading a model, the Hub, results, errors."""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import torch
import transformers
from huggingface_hub import get_session
from huggingface_hub.utils import logging as hub_logging

from eval.loglikelihood import LanguageModel
from eval.scores import merge_scores
from recipe.utils.checkpoints import checkpoints, manifest_of, newest_run, problem_of
from recipe.utils.download import HUB_TIMEOUT_S, within
from recipe.utils.errors import (
    ArgumentParser,
    ExitCode,
    UserError,
    first_line,
    in_words,
    no_memory_left,
    no_safetensors,
    reading,
)
from recipe.utils.files import replace_file
from recipe.utils.log import end_if_unread, escape_output
from recipe.utils.redaction import redact
from recipe.utils.schema import check
from recipe.utils.tokenizer import load_tokenizer
from recipe.utils.units import plural

DEFAULT_POSITIONS = 2048  # context length assumed for models without position embeddings, such as BLOOM and Mamba


@dataclass(frozen=True)
class Loaded:
    """A model ready to be scored: `directory` is None for a Hub id."""

    name: str
    directory: Path | None
    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizer | transformers.PreTrainedTokenizerFast

    @property
    def n_positions(self) -> int:
        """The model's maximum context length in tokens."""
        return getattr(self.model.config, "max_position_embeddings", None) or DEFAULT_POSITIONS

    def encode(self, text: str) -> list[int]:
        """Token ids of text, as in training: no special tokens added, those in the text recognized; but a literal
        end-of-text is read as text, and so are all special tokens of a text that has one."""
        has_end = bool(self.tokenizer.eos_token) and self.tokenizer.eos_token in text
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=has_end, verbose=False)

    def describe(self) -> dict[str, str | None]:
        """The fields that every result records about its model."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        weights = weights_sha256(self.directory) if self.directory else None
        return {"model": self.name, "weights": weights, "device": self.model.device.type, "dtype": dtype}

    @property
    def lm(self) -> LanguageModel:
        """The model behind the scorers' interface. Contexts are shared only by an architecture that is known to accept
        positions and a boolean mask: GPT-2 with SDPA. For others `body` returns the logits and `head` is the identity,
        since their head may be more than a matrix product."""
        model = self.model
        can_share = model.config.model_type == "gpt2" and model.config._attn_implementation == "sdpa"

        def states(ids, positions=None, mask=None):
            output = model.base_model(ids, position_ids=positions, attention_mask=mask, use_cache=False)
            return output.last_hidden_state

        return LanguageModel(
            body=states if can_share else lambda ids, *_: model(ids, use_cache=False).logits,
            head=model.lm_head if can_share else lambda logits: logits,
            encode=self.encode,
            n_positions=self.n_positions,
            device=model.device,
            shares_contexts=can_share,
            # cuDNN builds a new masked-attention plan for each length; torch_tpu compiles the model for each shape.
            multiples={"cuda": (1, 64 if can_share else 1, 1), "tpu": (16, 64, 1024)}.get(model.device.type, (1, 1, 1)),
        )


def parser(description: str, *, batch_size: int | None = None, batch_unit: str = "") -> argparse.ArgumentParser:
    """A parser of the arguments that the commands share. `batch_size` is the default, in `batch_unit`, of those that
    write results."""
    result = ArgumentParser(prog=f"python -m eval.{Path(sys.argv[0]).stem}", description=description)
    result.add_argument("model", nargs="?", help="checkpoint, run directory or Hub id (default: the newest run)")
    result.add_argument("--device", default="auto", choices=["auto", "cuda", "tpu", "mps", "cpu"])
    result.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    if batch_size:
        result.add_argument("--batch_size", type=positive_int, default=batch_size, help=f"{batch_unit} a forward pass")
        result.add_argument(
            "--output",
            type=Path,
            help="JSON file to merge results into (default: MODEL/results.json, or ./results.json for a Hub id)",
        )
    return result


def positive_int(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)


def utf8(text: str) -> str:
    """Text as typed, with U+FFFD for bytes that are not UTF-8."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def run_main(main: Callable[[], None]) -> None:
    """Runs a command. A user error becomes one line on stderr and exit code 2, Ctrl-C becomes exit code 130."""
    escape_output()
    try:
        main()
        print(end="", flush=True)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except (UserError, OSError) as error:
        end_if_unread(error)
        print(redact(f"error: {in_words(error)}"), file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        if not (reason := no_memory_left(error)):
            raise
        way_out = "lower --batch_size, use --device cpu, or end other programs on the GPU (nvidia-smi lists them)"
        print(f"error: {reason}; {way_out}", file=sys.stderr)
        sys.exit(2)


def resolve_model(name: str | None, runs: Path = Path("runs")) -> tuple[str, Path | None]:
    """(name to show and load, its directory or None for a Hub id). Without a name this is the newest run; a run
    directory stands for its newest checkpoint. Raises UserError if there is nothing to load."""
    name = name or str(newest_run(runs))
    path = Path(name).expanduser()
    if not path.exists():
        if re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name) and not name.startswith(f"{runs}/"):
            return name, None
        raise UserError(f"model {name}: no such directory. Name a checkpoint, a run directory or a Hub id")
    if not (path / "config.json").is_file():
        if not (steps := checkpoints(path)):
            raise UserError(f"model {name}: no config.json and no step_<number> directory. Name a checkpoint or a run")
        path = steps[-1]
    return str(path), path


def check_files(directory: Path) -> None:
    """Raises UserError if a file differs from its entry in the directory's manifest.json, where there is one: a model
    with a flipped bit must not get a score."""
    if not (directory / "manifest.json").exists():
        return
    for name, expected in manifest_of(directory).items():
        # Resolved, since the Hub's cache consists of links.
        if name != "optimizer.safetensors" and (problem := problem_of((directory / name).resolve(), expected)):
            raise UserError(f"{name} {problem}")


def load(args: argparse.Namespace, variable: str = "MODEL") -> Loaded:
    """Loads the model and tokenizer that the arguments of `parser` name; `variable` is make's for this model. Nothing
    is unpickled, and no code from the model's repository runs. Raises UserError if the model does not exist, the Hub
    cannot be reached, a file is damaged, or weights are missing or not finite."""
    # The libraries' loading reports and retry notices would bury our one clear line.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
    name, directory = resolve_model(args.model)
    device, dtype = choose_device(args.device, args.dtype)
    problem, way_out = "", "Check the directory, or name another checkpoint"
    if directory is None:
        print(f"{redact(name)} is not a local directory: looking for it on the Hub", flush=True)
        problem, way_out = go_offline_if_unreachable(), f"Name a model on the Hub, or a directory: {variable}=runs/NAME"
    try:
        model, tokenizer, loading_info = _read(name, directory, dtype)
    except Exception as error:  # the libraries raise many types for a broken directory or a missing model
        if isinstance(error, OSError) and "model.safetensors" in first_line(error) and not problem:
            raise no_safetensors(name) from None
        raise UserError(f"model {name}: {problem or first_line(error)}. {way_out}") from error
    if problem := _problem_of(model, tokenizer, loading_info):
        raise UserError(f"model {name}: {problem}")
    if unused := sorted(loading_info["unexpected_keys"]):
        print(f"note: not used by the model: {plural(len(unused), 'weight')} in the file, such as {redact(unused[0])}")
    is_tied = getattr(model.get_output_embeddings(), "weight", None) is model.get_input_embeddings().weight
    model.to(device)
    if is_tied:  # moving to a TPU or to XLA unties them
        model.tie_weights()
    loaded = Loaded(name, directory, model.eval(), tokenizer)
    fields = loaded.describe()
    print(f"model {name}: {model.num_parameters():,} parameters, {fields['device']}, {fields['dtype']}", flush=True)
    return loaded


def _read(name: str, directory: Path | None, dtype: torch.dtype) -> tuple:
    """The model, its tokenizer and what transformers reports of loading it, from safetensors files alone and without
    running the repository's code. Raises whatever the libraries raise."""
    # Imported here: it takes two seconds, and training imports this module without calling this function.
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, cached_file
    from transformers.utils.peft_utils import find_adapter_config_file

    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"  # otherwise transformers waits for a Space that converts pickles
    if directory:
        check_files(directory)
        kind = json.loads((directory / "config.json").read_bytes()).get("model_type")
        if kind and kind not in CONFIG_MAPPING:  # of a changed model: CONTRIBUTING.md, "The model itself"
            raise UserError(
                f"a {kind} model, which transformers {transformers.__version__} does not have; what its run measured "
                "by itself is in metrics.jsonl"
            )
    if find_adapter_config_file(name):  # with PEFT, transformers would load its base model instead, or a pickle
        raise UserError("an adapter, not a model: merge it into its base model first (docs/elsewhere.md)")
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    config.transformers_weights = config._attn_implementation = None  # may name a pickle, and code on the Hub
    if getattr(config, "activation_function", "") == "gelu_new":
        # The same formula in one operation instead of seven; saves a fifth of a forward pass on a CPU.
        config.activation_function = "gelu_pytorch_tanh"
    tokenizer = load_tokenizer(name)
    options = {"config": config, "dtype": dtype, "output_loading_info": True}
    options |= {"use_safetensors": True, "trust_remote_code": False}
    index = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    parts = json.loads(Path(index).read_bytes())["weight_map"].values() if index else []
    if not all(part == Path(part).name and part.endswith(".safetensors") for part in parts):
        raise UserError(f"its {SAFE_WEIGHTS_INDEX_NAME} lists files that are not safetensors in its own directory")
    model, loading_info = AutoModelForCausalLM.from_pretrained(name, **options)  # ty: ignore[not-iterable]
    return model, tokenizer, loading_info


def _problem_of(model: Any, tokenizer: Any, info: dict) -> str:
    """Why the model must not get a score, or "": transformers substitutes an empty tokenizer or random weights for
    missing ones."""
    if tokenizer is None or len(tokenizer) < 2:
        return "no tokenizer files, such as tokenizer.json, beside the weights (GPT-2's: openai-community/gpt2)"
    if missing_keys := sorted(info["missing_keys"]):
        return f"the file lacks {len(missing_keys)} of the model's weights, among them {missing_keys[0]}"
    if damaged := next((name for name, weight in model.named_parameters() if not weight.isfinite().all()), ""):
        return f"{damaged} has values that are NaN or infinite: the model has diverged"
    n_embeddings, n_tokens = len(model.get_input_embeddings().weight), tokenizer.vocab_size  # without added tokens
    if n_tokens > n_embeddings:
        return f"it has {n_embeddings:,} embeddings, and its tokenizer {n_tokens:,} tokens"
    if not _is_causal(model):
        return "a token changes the predictions before it, so it is no causal language model (BERT is none)"
    return ""


def _is_causal(model: Any) -> bool:
    """Whether the predictions at the first of two positions are the same for another token at the second."""
    with torch.inference_mode():
        first, second = model.eval()(torch.tensor([[0, 0], [0, 1]]), use_cache=False).logits[:, 0].float()
    return torch.allclose(first, second, rtol=1e-3, atol=1e-3 * float(first.abs().max()))


def go_offline_if_unreachable() -> str:
    """Sets the libraries to offline mode if the Hub does not answer in HUB_TIMEOUT_S: cached files load, and the rest
    fails at once, not after a minute of silent retries. Returns why there is no Hub, or "" if there is."""
    import datasets.config

    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        try:
            within(HUB_TIMEOUT_S, lambda: get_session().head(huggingface_hub.constants.ENDPOINT, timeout=HUB_TIMEOUT_S))
            return ""
        except Exception:  # huggingface_hub may use any HTTP library
            huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    return "not in the cache, and the Hub does not answer (or HF_HUB_OFFLINE is set)"


def choose_device(name: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """The device and dtype with these names. `auto` is the accelerator or else the CPU, and bfloat16 if the device
    supports it natively or else float32. Raises UserError if the device is not available."""
    default_device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if name not in ("auto", "cpu", default_device.type):
        raise UserError(f"--device {name}: not available on this machine. Use {default_device.type}")
    device = default_device if name == "auto" else torch.device(name)
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return device, getattr(torch, dtype if dtype != "auto" else "bfloat16" if has_bf16 else "float32")


def trainer_config(directory: Path | None, section: str = "config") -> dict:
    """The training configuration, or another section of trainer_state.json; empty for a model that is not one of our
    checkpoints."""
    state = directory / "trainer_state.json" if directory else None
    if not state or not state.is_file():
        return {}
    with reading(state, "name the data with --data, or another checkpoint"):
        return dict(json.loads(state.read_text()).get(section, {}))


_SCORE: dict = {
    **dict.fromkeys(("dataset_type", "dataset_name", "metric_type", "metric_name", "how"), str),
    "dataset_split": (None, str),
    "metric_value": float,
    "ci95": (None, float),
    "complete": bool,
}
_ROW = {"metric": str, "ours": float, "theirs": float, "difference": float, "ci95": (None, [float, float])}
_RESULTS = {
    "compare": {"model": (None, str), "other": str, "rows": [_ROW], "prompt": str, "samples": [str]},
    ...: {"model": (None, str), "weights": (None, str), "scores": (None, [_SCORE])},
}


def read_results(path: Path) -> dict:
    """The results in a file; empty if there is no file. Raises UserError if it holds something else."""
    try:
        results = json.loads(path.read_text()) if path.exists() else {}
        check(results, _RESULTS)
    except (ValueError, RecursionError) as error:
        problem = f"not the results of an evaluation ({first_line(error)})"
        raise UserError(f"{path}: {problem}. Move it away, or name another --output") from None
    return results


def results_path(output: Path | None, loaded: Loaded) -> Path:
    """Where results go, checked before the evaluation starts. Raises UserError if they cannot be written there."""
    path = output or (loaded.directory or Path()) / "results.json"
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{path.parent}: not a directory that can be written to. Name another --output")
    read_results(path)
    return path


def weights_sha256(directory: Path) -> str | None:
    """The SHA-256 of a checkpoint's weights, by its manifest; None for a model without a readable one."""
    with suppress(UserError):
        return manifest_of(directory).get("model.safetensors", (0, None))[1]
    return None


def same_model(path: Path, recorded: dict, name: str, weights: str | None) -> bool:
    """Whether a result that `path` has `recorded` is of the model `name` with these weights (their SHA-256). If either
    SHA-256 is missing, the names decide: both are one directory, or `name` is the directory of `path` and the recorded
    name does not exist here (any more)."""
    if weights and recorded.get("weights"):
        return weights == recorded["weights"]
    recorded_path, model_path = Path(recorded.get("model") or name).resolve(), Path(name).resolve()
    return recorded_path == model_path or (path.parent.resolve() == model_path and not recorded_path.exists())


def own_results(checkpoint: Path) -> dict:
    """The results in a checkpoint that were measured on its own weights. Prints a note about others. Raises
    UserError."""
    path = checkpoint / "results.json"
    if not (results := read_results(path)):
        return {}
    weights = weights_sha256(checkpoint)
    others = [key for key, result in results.items() if not same_model(path, result, str(checkpoint), weights)]
    for key in others:
        print(redact(f"note: not showing {key} in {path}: it was measured on another model"), flush=True)
        del results[key]
    return results


def write_results(path: Path, key: str, value: dict) -> None:
    """Stores `value` under `key`; replaces the file atomically. Its other keys stay, and so do the same model's scores
    under `key` that `value` does not repeat, or repeats on a part of the data only. Raises UserError."""
    if not path.parent.is_dir():  # a run that is training prunes its checkpoints
        raise UserError(
            f"the results above are not stored: {path.parent} was deleted meanwhile, probably by its run, which keeps "
            "save_total_limit checkpoints; wait for the run's end, or name a file with --output"
        )
    results = read_results(path)
    previous = results.get(key, {})
    is_same_model = same_model(path, previous or value, value["model"], value.get("weights"))
    if previous and is_same_model and "scores" in value:
        new_scores = value["scores"]
        value = value | {"scores": (scores := merge_scores(previous.get("scores", []), new_scores))}
        if any(entry["complete"] and entry not in new_scores for entry in scores):
            print(f"note: earlier scores in {path}, on other tasks or on more rows, are kept")
    elif not is_same_model:
        print(redact(f"note: replacing the results of {previous['model']} in {path}"))
    elif previous:
        print(f"note: replacing the earlier {key} in {path}")
    replace_file(path, (json.dumps(results | {key: value}, indent=2) + "\n").encode())
    print(f"wrote {path}")
    if (path.parent / "README.md").exists() and (path.parent / "config.json").exists():  # a model's card
        print(f"note: {path.parent}/README.md does not show this; evaluate the run and export it again for a new card")
