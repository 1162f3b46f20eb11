"""A run's checkpoint for others: as a directory, or on the Hugging Face Hub.

    python -m recipe.hub.export RUN --out my-model          the newest checkpoint as a directory for transformers
    python -m recipe.hub.export RUN --best --dtype bfloat16 the one with the lowest validation loss, in half the bytes
    python -m recipe.hub.export push RUN --repo ORG/NAME    upload the milestones and the newest checkpoint

Such a directory holds model.safetensors, config.json, generation_config.json, the tokenizer's files and README.md, a
model card with what the run recorded and what eval/ has measured (results.json beside the checkpoint).
"""

import argparse
import json
import logging
import math
import shutil
import sys
from pathlib import Path

import huggingface_hub.constants
import torch
from safetensors.torch import load_file, save_file

if __package__ in (None, ""):  # as a script: import from the repository, not from recipe/
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from recipe.catalog import license_error
from recipe.checkpoint.format import checkpoints, model_only, newest_valid, step_of, verify
from recipe.config import check_repo_name
from recipe.errors import ExitCode, UserError
from recipe.hub.access import check_access, failure_of
from recipe.hub.model_card import CARD, model_card
from recipe.hub.upload import Target, Uploads
from recipe.log import set_up_logging
from recipe.monitor.metrics import read_metrics
from recipe.redaction import redact

logger = logging.getLogger("recipe.hub.export")  # __name__ is __main__ where this is the command

# What an export holds, and --force may delete.
_EXPORTED = {
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    CARD,
}
DTYPES = ("float32", "bfloat16", "float16")


def export(
    run: Path, out: Path, *, best: bool = False, dtype: str = "float32", license: str = "", force: bool = False
) -> Path:
    """Writes the newest whole checkpoint of `run`, or the `best` one, to the directory `out`; returns the checkpoint.

    `run` may also be a checkpoint. `force` replaces an earlier export; what is in the way of anything else is an error.
    The directory is complete or absent. Raises UserError.
    """
    _check_out(out, force)
    while True:
        checkpoint = choose(run, best)
        try:
            _write(checkpoint, out, dtype, license)
            return checkpoint
        except FileNotFoundError:
            if checkpoint.exists():
                raise
            logger.info("%s was pruned by the run meanwhile; looking for the next one", checkpoint)


def _write(checkpoint: Path, out: Path, dtype: str, license: str) -> None:
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for path in model_only(checkpoint):
            if dtype == "float32" or path.name not in ("model.safetensors", "config.json"):
                shutil.copyfile(path, temporary / path.name, follow_symlinks=False)
        if dtype != "float32":
            _cast(checkpoint / "model.safetensors", temporary / "model.safetensors", dtype)
            config = json.loads((checkpoint / "config.json").read_text()) | {"dtype": dtype}
            (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (temporary / CARD).write_text(model_card(checkpoint, license=license, dtype=dtype))
        if out.exists():
            shutil.rmtree(out)
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _check_out(out: Path, force: bool) -> None:
    """Raises UserError unless `out` is free, or `force` and it holds an export and nothing else."""
    if not (out.exists() or out.is_symlink()):
        return
    if not force:
        raise UserError(f"--out {out} exists; replace it with --force (make export ARGS=--force), or name another")
    names = {path.name for path in out.iterdir()} if out.is_dir() and not out.is_symlink() else set()
    if more := names - _EXPORTED:
        raise UserError(f"--out {out} holds {sorted(more)[0]}, which no export writes; name another directory")
    if not {"model.safetensors", "config.json"} <= names:
        raise UserError(f"--out {out} is no earlier export, and --force replaces nothing else; name another directory")


def _cast(weights: Path, out: Path, dtype: str) -> None:
    """Rounds fp32 weights to `dtype`. Raises UserError where one is beyond its range."""
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(weights).items()}
    if beyond := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise UserError(f"--dtype {dtype}: {beyond[0]} has weights beyond its range; choose bfloat16 or float32")
    save_file(tensors, out, {"format": "pt"})
    out.chmod(0o644)  # safetensors makes it private to its owner


def choose(run: Path, best: bool) -> Path:
    """The newest whole checkpoint of `run`, or the `best` one, or `run` itself if it is one. Raises UserError."""
    if (run / "trainer_state.json").is_file() or (run / "manifest.json").is_file():
        if best:
            raise UserError(f"{run} is one checkpoint, and --best chooses among a run's; name {run.resolve().parent}")
        if problems := verify(run.resolve()):  # a link to it is as good
            raise UserError(f"{run}: {problems[0]}; name its run, and the newest whole checkpoint is taken")
        return run
    checkpoint = best_valid(run) if best else newest_valid(run)
    if checkpoint is None:
        raise UserError(f"{run}: no checkpoint there; name a run directory, such as runs/shakespeare")
    return checkpoint


def best_valid(run: Path) -> Path | None:
    """The whole checkpoint with the lowest validation loss in metrics.jsonl, among those that are kept; None where
    there is no checkpoint. Raises UserError where none was evaluated."""
    losses = {line["step"]: line.get("val_loss") for line in read_metrics(run / "metrics.jsonl")}
    losses = {step: loss for step, loss in losses.items() if loss is not None and math.isfinite(loss)}
    found = checkpoints(run)
    for path in sorted((p for p in found if step_of(p) in losses), key=lambda p: losses[step_of(p)]):
        if not (problems := verify(path)):
            logger.info("best       %s has the lowest validation loss of those kept, %.4f", path, losses[step_of(path)])
            return path
        logger.warning("skipping %s: %s", path, problems[0])
    if found:
        raise UserError(
            f"{run}: no whole checkpoint that is kept was evaluated at its step (eval_steps); without --best the "
            "newest one is taken"
        )
    return None


def push(run: Path, repo: str, *, private: bool = False, best: bool = False, license: str = "", card: str = "renew"):
    """Uploads the milestones of `run` that the Hub does not have, and the newest checkpoint, or the `best`, to main.

    Returns whether everything is on the Hub. Raises UserError.
    """
    if not repo:
        raise UserError("--repo is empty; name the repository to upload to, ORG/NAME (make push REPO=ORG/NAME)")
    check_repo_name(repo, "--repo")
    if not run.is_dir():
        raise UserError(f"{run}: no such run; name its directory, such as runs/shakespeare")
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE is set; unset it where the Hub can be reached, and push there")
    final = choose(run, best)
    config = json.loads((final / "trainer_state.json").read_text()).get("config", {})
    target = Target(
        repo,
        private=private or bool(config.get("hub_private_repo")),
        milestone_steps=config.get("milestone_steps", 0),
        final=final,
        license=license,
        card=card,
    )
    try:
        check_access(repo, target.private, "--repo")
    except UserError:
        raise
    except Exception as error:
        where = huggingface_hub.constants.ENDPOINT
        raise UserError(
            redact(f"{where} cannot be reached ({failure_of(error).reason}); push again when there is a network")
        ) from None
    return Uploads(run, target).wait(limit=math.inf)


def _newest_run(runs: Path = Path("runs")) -> Path:
    found = [run for run in runs.glob("*") if checkpoints(run)]
    if not found:
        raise UserError("no run under runs/; train one first (make train) or name it")
    return max(found, key=lambda run: checkpoints(run)[-1].stat().st_mtime)


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code: 0 done, 2 a mistake of the user's, 75 something is left to upload."""
    argv = sys.argv[1:] if argv is None else argv
    set_up_logging()
    try:
        return push_main(argv[1:]) if argv[:1] == ["push"] else export_main(argv)
    except (UserError, OSError) as e:
        print(f"error: {redact(str(e))}", file=sys.stderr)
        return ExitCode.USER_ERROR


def _parser(**about) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, **about)
    parser.add_argument(
        "--best",
        action="store_true",
        help="the checkpoint with the lowest validation loss in metrics.jsonl, among those kept, instead of the newest",
    )
    parser.add_argument(
        "--license",
        default="",
        help="license of the weights in the card, by the Hub's name for it, or other (default: the run's hub_license, "
        "which is mit unless you chose another; whether your data allow it is for you to know)",
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
    parser.add_argument("--out", type=Path, default=Path("model"), help="directory to write (default: model)")
    parser.add_argument("--force", action="store_true", help="replace an earlier export in --out")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of the weights (default: float32, as in the checkpoint)"
    )
    args = _parse(parser, argv)
    run = args.run_option or args.run or _newest_run()
    checkpoint = export(run, args.out, best=args.best, dtype=args.dtype, license=args.license, force=args.force)
    files = sorted(args.out.iterdir())
    print(f"exported   {checkpoint} to {args.out}, {sum(p.stat().st_size for p in files) / 1e6:,.1f} MB, {args.dtype}")
    print(f"files      {', '.join(p.name for p in files)}")
    print(f"load       transformers.AutoModelForCausalLM.from_pretrained({str(args.out)!r})")
    print(f"card       {args.out / CARD}; it has the results that eval/ writes beside the checkpoint")
    return ExitCode.DONE


def push_main(argv: list[str]) -> int:
    parser = _parser(
        prog="python -m recipe.hub.export push",
        description="Upload a run's milestones to branches and its newest checkpoint to main, each with its model "
        "card.\nWhat is there already is not uploaded again. A README.md that differs is replaced (its history stays),"
        "\nunless --no_card is given.",
    )
    parser.add_argument("run", type=Path, help="run directory, such as runs/shakespeare")
    parser.add_argument("--repo", default="", help="ORG/NAME on the Hub")
    parser.add_argument("--private", action="store_true", help="create a private repository, push to no public one")
    parser.add_argument("--no_card", action="store_true", help="leave README.md on the Hub as it is")
    args = _parse(parser, argv)
    card = "none" if args.no_card else "renew"
    try:
        done = push(args.run, args.repo, private=args.private, best=args.best, license=args.license, card=card)
    except KeyboardInterrupt:
        done = False
    if done:
        logger.info("upload     everything is on the Hub")
    return ExitCode.DONE if done else ExitCode.RUN_AGAIN


if __name__ == "__main__":
    sys.exit(main())
