"""A run's checkpoint for others: as a directory, or on the Hugging Face Hub.

    python -m recipe.hub.export RUN --out my-model             the newest checkpoint as a directory for transformers
    python -m recipe.hub.export RUN --best --dtype bfloat16  the one with the lowest validation loss, in half the bytes
    python -m recipe.hub.export push RUN --repo ORG/NAME       uploaded; without --repo what the run has queued

Such a directory holds model.safetensors, config.json, generation_config.json, the tokenizer's files and README.md, a
model card with what the run recorded and what eval/ has measured (results.json beside the checkpoint).
"""

import argparse
import dataclasses
import math
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import huggingface_hub.constants
import huggingface_hub.utils
import torch
from safetensors.torch import load_file, save_file

if __package__ in (None, ""):  # as a script: import from the repository, not from recipe/
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from recipe.checkpoint.format import checkpoints, newest_valid, step_of, verify
from recipe.config import check_repo_name
from recipe.data.catalog import license_error
from recipe.errors import UserError
from recipe.hub import outbox, upload
from recipe.hub.model_card import CARD
from recipe.hub.package import package, recorded_step, renew_card
from recipe.hub.push import PATIENCE, check_push, describe, names, push_command
from recipe.monitor.metrics import read_metrics
from recipe.redaction import redact

DTYPES = ("float32", "bfloat16", "float16")
Say = Callable[[str], None]


def export(
    run: Path, out: Path, *, best: bool = False, dtype: str = "float32", license: str = "", say: Say = print
) -> Path:
    """Makes `out`, which must not exist, of the newest whole checkpoint of `run`, or the `best` one; returns the
    checkpoint. `run` may also be one checkpoint's own directory. The copy is made under another name and renamed.
    Raises UserError."""
    if out.exists():
        raise UserError(f"--out {out} exists; name another directory, or delete it")
    checkpoint = choose(run, best, say)
    files, made = package(checkpoint, license=license, dtype=dtype)
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for path in files:
            if path.name == "model.safetensors" and dtype != "float32":
                _cast(path, temporary / path.name, dtype)
            else:
                shutil.copyfile(path, temporary / path.name)
        for name, content in made.items():
            (temporary / name).write_bytes(content)
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return checkpoint


def _cast(weights: Path, out: Path, dtype: str) -> None:
    """Rounds fp32 weights to `dtype`. Raises UserError where one is beyond its range."""
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(weights).items()}
    if spoilt := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise UserError(f"--dtype {dtype}: {spoilt[0]} has weights beyond its range; take bfloat16 or float32")
    save_file(tensors, out, {"format": "pt"})
    out.chmod(0o644)  # which safetensors makes private to its owner


def choose(run: Path, best: bool, say: Say) -> Path:
    """The whole checkpoint that is meant by `run`, which may be one itself. Raises UserError."""
    if (run / "trainer_state.json").is_file() or (run / "manifest.json").is_file():
        if best:
            raise UserError(f"{run} is one checkpoint, and --best chooses among a run's; name {run.resolve().parent}")
        if problems := verify(run.resolve()):  # a link to it is as good
            raise UserError(f"{run}: {problems[0]}; name its run, and the newest whole checkpoint is taken")
        return run
    checkpoint = best_valid(run, say) if best else newest_valid(run)
    if checkpoint is None:
        raise UserError(f"{run}: no checkpoint there; name a run directory, such as runs/shakespeare")
    return checkpoint


def best_valid(run: Path, say: Say = print) -> Path | None:
    """Of the checkpoints that are kept, the whole one with the lowest validation loss in metrics.jsonl; None where no
    checkpoint is there. Raises UserError where none was evaluated."""
    losses = {line["step"]: line.get("val_loss") for line in read_metrics(run / "metrics.jsonl")}
    losses = {step: loss for step, loss in losses.items() if loss is not None and math.isfinite(loss)}
    found = checkpoints(run)
    for path in sorted((p for p in found if step_of(p) in losses), key=lambda p: losses[step_of(p)]):
        if not (problems := verify(path)):
            say(f"best       {path}: validation loss {losses[step_of(path)]:.4f}, the lowest of those that are kept")
            return path
        say(f"skipping {path}: {problems[0]}")
    if found:
        raise UserError(
            f"{run}: no checkpoint that is kept and whole was evaluated at its step (eval_steps); leave "
            "--best out for the newest one"
        )
    return None


def push(
    run: Path, repo: str, private: bool, say: Say, *, best: bool = False, license: str = "", card: bool = True
) -> list[outbox.Entry]:
    """Uploads what is queued and, where `repo` is named, the newest checkpoint, or the `best`, to its main; with cards
    that are written now, or without any. Returns what is left. Raises UserError."""
    if not run.is_dir():
        raise UserError(f"{run}: no such run; name its directory, such as runs/shakespeare")
    if best and not repo:
        raise UserError("--best chooses what goes to main of --repo ORG/NAME; name that too")
    try:
        with outbox.alone(run, patience=2):  # which a trainer's process may need to end
            return _push(run, repo, private, say, best, license, card)
    except BlockingIOError:
        raise UserError(f"{run}: its training, or another push, is uploading; wait for that") from None


def _push(run: Path, repo: str, private: bool, say: Say, best: bool, license: str, card: bool) -> list[outbox.Entry]:
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE is set; unset it where the Hub can be reached, and push there")
    checkpoint, queued = None, outbox.entries(run)
    if repo:
        check_repo_name(repo, "--repo")
        checkpoint = choose(run, best, say)
    elif not queued:
        say(f"upload     nothing of {run} is queued; --repo ORG/NAME uploads its newest checkpoint")
    wanted = {(entry.repo, entry.private) for entry in queued} | ({(repo, private)} if repo else set())
    for name, hidden in sorted(wanted):
        check_push(name, hidden, say, field="--repo" if name == repo else "push_to_hub")
    if checkpoint:
        say(f"upload     {checkpoint}, to main of {repo}")
        files, made = package(checkpoint, repo=repo, license=license, card=card)
        outbox.enqueue(run, files, made, recorded_step(checkpoint), repo, private, [outbox.MAIN])
    for entry in queued:
        if not card:
            (entry.path / CARD).unlink(missing_ok=True)
        elif error := renew_card(run, entry, license=license):
            say(error)
        dataclasses.replace(entry, error=None, held=False).write()  # what was refused is tried again
    huggingface_hub.utils.disable_progress_bars()

    def tell(event: str, **values) -> None:
        if line := describe({"event": event, **values}, run):
            say(line)

    with upload.hub_client(upload.TIMEOUT):
        upload.drain(run, tell, PATIENCE)
    return outbox.entries(run)


def _newest_run(runs: Path = Path("runs")) -> Path:
    found = [run for run in runs.glob("*") if checkpoints(run)]
    if not found:
        raise UserError("no run under runs/; train one first (make train) or name it")
    return max(found, key=lambda run: checkpoints(run)[-1].stat().st_mtime)


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code: 0 done, 1 something is left to upload, 2 a mistake of the user's."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return push_main(argv[1:]) if argv[:1] == ["push"] else export_main(argv)
    except (UserError, OSError) as e:
        print(f"error: {redact(str(e))}", file=sys.stderr)
        return 2


def _parser(**about) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, **about)
    parser.add_argument(
        "--best",
        action="store_true",
        help="of the checkpoints that are kept, the one with the lowest "
        "validation loss in metrics.jsonl, instead of the newest",
    )
    parser.add_argument(
        "--license",
        default="",
        help="licence of the weights in the card, by the Hub's name for it, "
        "or other (default: the run's hub_license, which is mit, as of this project's code, unless "
        "you chose another; whether your data allow it is for you to know)",
    )
    return parser


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    args = parser.parse_args(argv)
    if args.license and (error := license_error(args.license)):
        raise UserError(f"--license {error}")
    return args


def export_main(argv: list[str]) -> int:
    parser = _parser(prog="python -m recipe.hub.export", description=__doc__)
    parser.add_argument("run", nargs="?", type=Path, help="run directory or checkpoint (default: newest run)")
    parser.add_argument("--run", dest="run_option", type=Path, metavar="RUN", help="the same, as an option")
    parser.add_argument("--out", type=Path, default=Path("model"), help="directory to make (default: model)")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the weights, default float32, which is what a checkpoint holds",
    )
    args = _parse(parser, argv)
    run = args.run_option or args.run or _newest_run()
    checkpoint = export(run, args.out, best=args.best, dtype=args.dtype, license=args.license)
    files = sorted(args.out.iterdir())
    print(f"exported   {checkpoint} to {args.out}, {sum(p.stat().st_size for p in files) / 1e6:,.1f} MB, {args.dtype}")
    print(f"files      {', '.join(p.name for p in files)}")
    print(f"load       transformers.AutoModelForCausalLM.from_pretrained({str(args.out)!r})")
    print(f"card       {args.out / CARD}; results that eval/ writes beside the checkpoint stand in it")
    return 0


def push_main(argv: list[str]) -> int:
    """Returns 0 when all is up, 1 when something is left."""
    parser = _parser(
        prog="python -m recipe.hub.export push",
        description="Upload a run's checkpoints, each with its model card. A README.md that is on the branch is "
        "replaced\n(its history stays), unless --no_card is given.",
    )
    parser.add_argument("run", type=Path, help="run directory, such as runs/shakespeare")
    parser.add_argument("--repo", default="", help="ORG/NAME: the run's newest checkpoint goes there, on main")
    parser.add_argument("--private", action="store_true", help="--repo makes a private repository")
    parser.add_argument("--no_card", action="store_true", help="leave README.md on the Hub as it is")
    args = _parse(parser, argv)
    say = partial(print, flush=True)
    try:
        left = push(args.run, args.repo, args.private, say, best=args.best, license=args.license, card=not args.no_card)
    except KeyboardInterrupt:
        left = outbox.entries(args.run)
    if left:
        say(f"upload     still queued: {names(left)}; {push_command(args.run)} tries again")
        return 1
    say("upload     all is up")
    return 0


if __name__ == "__main__":
    sys.exit(main())
