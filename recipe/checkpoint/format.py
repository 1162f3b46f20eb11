"""Portable checkpoints: a `from_pretrained` directory plus the optimizer's moments by name, atomic and verified.

    step_00005000/
      model.safetensors       weights under transformers' names, fp32
      optimizer.safetensors   exp_avg.<name> and exp_avg_sq.<name>, fp32
      trainer_state.json      step, configuration, what else the loop needs to go on
      config.json, generation_config.json, tokenizer files
      manifest.json           size and SHA-256 of each file above

Nothing here depends on the engine or on how many processes there were, and nothing is pickled. A checkpoint is
written under a temporary name, flushed to the disk and renamed: what bears its final name is whole.

    python -m recipe.checkpoint list runs/shakespeare
    python -m recipe.checkpoint verify runs/shakespeare/step_00000500
"""

import argparse
import errno
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from recipe import faults
from recipe.errors import UserError

_TRAINERS_OWN = {"optimizer.safetensors", "trainer_state.json"}  # and not the model's
_NAME = re.compile(r"step_(\d{8,})")
_TEMPORARY, _DELETING = ".saving-", ".deleting-"
_NEEDED = ("model.safetensors", "optimizer.safetensors", "trainer_state.json", "config.json")
_OTHER_FILES = 16_000_000  # bytes, at most, beside the tensors: tokenizer, configuration, the loop's state


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    state: dict


def save_checkpoint(
    run: Path,
    step: int,
    weights: dict[str, torch.Tensor],
    moments: dict[str, torch.Tensor],
    state: dict,
    model_files: dict[str, bytes],
) -> Path:
    """Commits `run`/step_XXXXXXXX and returns it. Call on one process, with fp32 tensors on the CPU that nobody changes
    meanwhile. OSError, also for too little room, leaves earlier checkpoints untouched and nothing of this one.

    `model_files` is what `transformers` needs beside the weights, config and tokenizer: {file name: content}.
    """
    final = run / f"step_{step:08d}"
    temporary = run / f"{_TEMPORARY}{final.name}"
    faults.at("save.begin")
    sweep(run)
    run.mkdir(parents=True, exist_ok=True)
    _check_room(run, weights, moments)
    try:
        temporary.mkdir()
        files = {name: [content] for name, content in model_files.items()}
        files["model.safetensors"] = safetensors_parts(weights, {"format": "pt"})
        files["optimizer.safetensors"] = safetensors_parts(moments)
        files["trainer_state.json"] = _halves(json.dumps(state | {"step": step}, indent=2))
        manifest = {name: _write(temporary / name, parts) for name, parts in files.items()}
        _write(temporary / "manifest.json", _halves(json.dumps({"files": manifest}, indent=2)))
        _fsync(temporary)
        faults.at("save.rename.before")
        if final.exists():  # damaged, and passed over at resume: the same step, made again
            final.rename(run / f"{_DELETING}{final.name}")
        temporary.rename(final)
        _fsync(run)
        faults.at("save.rename.after")
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def safetensors_parts(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> list:
    """A safetensors file of fp32 tensors in memory as buffers to be written one after the other; the same bytes as
    safetensors' own `save`, which would hold them all a second time. The format: 8 bytes, little-endian, with the
    header's length; the header, JSON; the tensors, at the offsets it names (https://huggingface.co/docs/safetensors).
    """
    header: dict = {"__metadata__": metadata} if metadata else {}
    arrays, end = [], 0
    for name, tensor in sorted(tensors.items()):
        array = tensor.contiguous().numpy()
        assert array.dtype == "<f4", f"{name} is {array.dtype}"
        start, end = end, end + array.nbytes
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [start, end]}
        arrays.append(memoryview(array.reshape(-1)).cast("B"))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *arrays]


def _write(path: Path, parts: list) -> dict:
    """Writes a file and brings it to the disk; its entry in the manifest, reckoned from what was meant to be written
    and not from what can be read back."""
    faults.at(f"save.{path.name}.before")
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as f:
        for number, part in enumerate(parts):
            if number == len(parts) // 2:
                f.flush()
                faults.at(f"save.{path.name}.during")
            f.write(part)
            digest.update(part)
            size += len(part)
        f.flush()
        os.fsync(f.fileno())
    faults.at(f"save.{path.name}.after")
    return {"bytes": size, "sha256": digest.hexdigest()}


def _halves(text: str) -> list[bytes]:
    data = text.encode()
    return [data[: len(data) // 2], data[len(data) // 2 :]]


def _check_room(run: Path, *tensors: dict[str, torch.Tensor]) -> None:
    """Before hours are spent on filling a disk that will not hold it. Raises OSError."""
    needed = sum(t.nbytes for part in tensors for t in part.values()) + _OTHER_FILES
    if (free := shutil.disk_usage(run).free) < needed:
        raise OSError(errno.ENOSPC, f"a checkpoint takes {needed / 1e9:.3g} GB, {free / 1e9:.3g} GB are free", str(run))


def prune(run: Path, newest: int, save_total_limit: int, milestone_steps: int) -> list[Path]:
    """Deletes all but the `save_total_limit` checkpoints up to step `newest`, just committed, and those at multiples
    of `milestone_steps` (0: none). What claims to be newer is damaged, or the run would have gone on from there: it
    stays, and does not count."""
    old = [p for p in checkpoints(run) if step_of(p) <= newest and not p.is_symlink()][:-save_total_limit]
    old = [p for p in old if not (milestone_steps and step_of(p) % milestone_steps == 0)]
    for path in old:
        # Renamed first, so that a deletion cut short leaves nothing that looks like a checkpoint.
        doomed = path.rename(run / f"{_DELETING}{path.name}")
        faults.at("save.prune")
        shutil.rmtree(doomed)
    return old


def sweep(run: Path) -> None:
    """Deletes what a save or a deletion that was cut short has left."""
    for leftover in [*run.glob(f"{_DELETING}*"), *run.glob(f"{_TEMPORARY}*")]:
        shutil.rmtree(leftover, ignore_errors=True)


def checkpoints(run: Path) -> list[Path]:
    """Committed checkpoints of a run, oldest first, unverified."""
    return sorted((p for p in run.glob("step_*") if _NAME.fullmatch(p.name)), key=step_of)


def step_of(path: Path) -> int:
    return int(_NAME.fullmatch(path.name).group(1))


def model_only(checkpoint: Path) -> list[Path]:
    """The files of a whole checkpoint that `from_pretrained` reads; not what was put beside them since."""
    names = json.loads((checkpoint / "manifest.json").read_text())["files"].keys() - _TRAINERS_OWN
    return sorted(checkpoint / name for name in names)


def newest_valid(run: Path, say: Callable[[str], None] = print) -> Path | None:
    """The newest checkpoint whose every file verifies, None where there is none at all; each damaged one passed over is
    named through `say`. Raises UserError where one cannot be read, which may pass, or all are damaged: to start again
    from nothing is not for the run to decide."""
    found = checkpoints(run)
    for path in reversed(found):
        try:
            problems = verify(path)
        except OSError as e:
            raise UserError(
                f"{path} cannot be read: {e.strerror}; try again, or move it out of {run} to go on from an earlier one"
            ) from None
        if not problems:
            return path
        say(f"skipping {path}: {problems[0]}")
    if found:
        raise UserError(
            f"{run}: none of its {len(found)} checkpoints is whole; --fresh starts over, and keeps them aside"
        )
    return None


def verify(path: Path) -> list[str]:
    """What is wrong with a checkpoint, file by file; empty if nothing is. Reads every byte. Raises OSError where a file
    is there and cannot be read."""
    if path.is_symlink() and not path.resolve().is_relative_to(path.parent.resolve()):
        return ["it is a link out of the run"]
    try:
        listed = json.loads((path / "manifest.json").read_text())["files"]
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in listed.items()}
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError) as e:
        return [f"manifest.json unreadable ({e})"]
    if away := [name for name in files if name in ("", "..") or Path(name).name != name]:
        return [f"manifest.json names {away[0]!r}, which is not a file of this directory"]
    problems = [f"manifest.json does not list {name}" for name in _NEEDED if name not in files]
    for name, (size, sha256) in files.items():
        file = path / name
        try:
            if file.is_symlink():
                problems.append(f"{name} is a link")
            elif not file.is_file():
                problems.append(f"{name} is missing")
            elif file.stat().st_size != size:
                problems.append(f"{name} has {file.stat().st_size} bytes, {size} were written")
            elif _sha256(file) != sha256:
                problems.append(f"{name} does not have the checksum it was written with")
        except ValueError as e:  # a name that no file can have
            problems.append(f"{name!r}: {e}")
    return problems


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a verified checkpoint onto the CPU."""
    state = json.loads((path / "trainer_state.json").read_text())
    weights, moments = load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors")
    return Checkpoint(path, state["step"], weights, moments, state)


# Fields that make it another run: the same step would mean other weights or other data.
# Not the path of the data: shards may move, or be streamed instead, and are known by their checksums.
_IDENTITY = ("n_layer", "n_head", "n_embd", "n_positions", "sequence_length", "total_batch_tokens", "seed")


def check_same_run(state: dict, config: dict, run: Path) -> list[str]:
    """Compares a checkpoint's configuration with `config` (flat dicts); returns a line for each harmless difference.

    Raises UserError, naming the fields, where architecture, data or batch differ: that is another run.
    """
    before = state["config"]
    name, now = before.get("run_name"), config.get("run_name")
    if name and now and name != now:
        raise UserError(
            f"{run} holds another run: {name!r}, of {before.get('config')}, and not {now!r}. Choose "
            f"another output_dir, go on with that run by --run_name {name}, or start over with --fresh"
        )

    def differing(names) -> list[str]:
        return [f"{k} {before[k]!r} -> {config[k]!r}" for k in names if k in before and before[k] != config[k]]

    if changed := differing(_IDENTITY):
        raise UserError(
            f"{run} holds a run with other settings: {', '.join(changed)}. Put those back, choose another output_dir, "
            "or start over with --fresh (make train FRESH=1)"
        )
    silent = {"config", "output_dir", "run_name", "fresh", "price_per_hour", "dry_run"}
    return [f"resuming with {line}" for line in differing(k for k in config if k not in _IDENTITY and k not in silent)]


def move_aside(run: Path) -> Path:
    """Renames a run's directory to the next free `<run>.old-N`; nothing of it is deleted."""
    n = next(n for n in range(1, 10**6) if not run.with_name(f"{run.name}.old-{n}").exists())
    return run.rename(run.with_name(f"{run.name}.old-{n}"))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code: 0 all is whole, 1 something is damaged, 2 nothing is there."""
    parser = argparse.ArgumentParser(prog="python -m recipe.checkpoint", description="Checkpoints of a run.")
    commands = parser.add_subparsers(dest="command", required=True)
    verifying = commands.add_parser("verify", help="read every byte and compare it with what was written")
    verifying.add_argument("path", type=Path, metavar="DIR", help="a checkpoint, or a run for all of its checkpoints")
    listing = commands.add_parser("list", help="a run's checkpoints, oldest first, verified")
    listing.add_argument("path", type=Path, metavar="RUN")
    args = parser.parse_args(argv)
    found = checkpoints(args.path)
    if args.command == "verify" and (not found or (args.path / "manifest.json").exists()):
        found = [args.path]
    if not found or not args.path.is_dir():
        print(f"error: {args.path}: no checkpoint there; name a run, such as runs/shakespeare", file=sys.stderr)
        return 2
    damaged = 0
    for path in found:
        try:
            problems = verify(path)
        except OSError as e:
            problems = [f"cannot be read: {e}"]
        damaged += bool(problems)
        files = [p.stat() for p in path.iterdir()]
        size = sum(f.st_size for f in files)
        if args.command == "list":
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
            print(f"{path}  {size / 1e6:,.1f} MB  {when}  {'DAMAGED: ' + problems[0] if problems else 'whole'}")
        elif problems:
            print("\n".join(f"{path}: {problem}" for problem in problems))
        else:
            print(f"{path}: whole, {len(files)} files, {size / 1e6:,.1f} MB")
    return 1 if damaged else 0
