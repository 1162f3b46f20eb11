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

from recipe.checkpoint.format import checkpoints, model_only, newest_whole, step_of, verify
from recipe.config import check_repo_name
from recipe.hub.access import check_access
from recipe.hub.model_card import CARD, model_card
from recipe.hub.upload import Target, Uploads
from recipe.monitor.metrics import read_metrics
from recipe.utils.errors import ExitCode, UserError
from recipe.utils.log import set_up_logging
from recipe.utils.redaction import redact

logger = logging.getLogger("recipe.hub.export")  # __name__ is __main__ where this is the command

DTYPES = ("float32", "bfloat16", "float16")


def export(
    run: Path, out: Path, *, best: bool = False, dtype: str = "float32", license: str = "", force: bool = False
) -> Path:
    """Writes the newest whole checkpoint of `run`, or the `best` one, to the directory `out`; returns the checkpoint.

    `run` may also be a checkpoint. `force` replaces the files of an earlier export, and no others. Raises UserError.
    """
    if out.exists() and not force:
        raise UserError(f"--out {out} exists; replace it with --force (make export ARGS=--force), or name another")
    checkpoint = choose(run, best)
    card = model_card(checkpoint, license=license, dtype=dtype)
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        for path in model_only(checkpoint):
            shutil.copyfile(path, temporary / path.name, follow_symlinks=False)
        if dtype != "float32":
            _cast(temporary, dtype)
        (temporary / CARD).write_text(card)
        out.mkdir(exist_ok=True)
        for path in temporary.iterdir():
            path.replace(out / path.name)
        return checkpoint
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _cast(model: Path, dtype: str) -> None:
    """Rounds the fp32 weights of a model to `dtype`. Raises UserError where one is beyond its range."""
    weights = model / "model.safetensors"
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(weights).items()}
    if beyond := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise UserError(f"--dtype {dtype}: {beyond[0]} has weights beyond its range; choose bfloat16 or float32")
    save_file(tensors, weights, {"format": "pt"})
    weights.chmod(0o644)  # safetensors makes it private to its owner
    config = json.loads((model / "config.json").read_text()) | {"dtype": dtype}
    (model / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def choose(run: Path, best: bool) -> Path:
    """The newest whole checkpoint of `run`, or the `best` one, or `run` itself if it is one. Raises UserError."""
    if (run / "manifest.json").is_file():
        if best:
            raise UserError(f"{run} is one checkpoint, and --best chooses among a run's; name {run.resolve().parent}")
        if problems := verify(run.resolve()):  # a link to it is as good
            raise UserError(f"{run}: {problems[0]}; name its run, and the newest whole checkpoint is taken")
        return run
    checkpoint = best_valid(run) if best else newest_whole(run)
    if checkpoint is None:
        raise UserError(f"{run}: no checkpoint there; name a run directory, such as runs/shakespeare")
    return checkpoint


def best_valid(run: Path) -> Path | None:
    """The whole checkpoint with the lowest validation loss in metrics.jsonl, among those that are kept; None where
    there is no checkpoint. Raises UserError where none was evaluated."""
    losses = {line["step"]: line.get("val_loss") for line in read_metrics(run / "metrics.jsonl")}
    found = checkpoints(run)
    evaluated = [path for path in found if losses.get(step_of(path)) is not None]
    for path in sorted(evaluated, key=lambda path: losses[step_of(path)]):
        if not (problems := verify(path)):
            logger.info("best       %s has the lowest validation loss of those kept, %.4f", path, losses[step_of(path)])
            return path
        logger.warning("skipping %s: %s", path, problems[0])
    if found:
        raise UserError(
            f"{run}: none of the whole checkpoints was evaluated at its step (eval_steps); omit --best to take the "
            "newest one"
        )
    return None


def push(args: argparse.Namespace) -> ExitCode:
    """Uploads the milestones of a run that the Hub does not have, and the newest checkpoint, or the best, to main.

    Returns what Uploads.wait does. Raises UserError.
    """
    repo = args.repo
    if not repo:
        raise UserError("--repo is empty; name the repository to upload to, ORG/NAME (make push REPO=ORG/NAME)")
    check_repo_name(repo, "--repo")
    run = args.run or _newest_run()
    if not run.is_dir():
        raise UserError(f"{run}: no such run; name its directory, such as runs/shakespeare")
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE is set; unset it where the Hub can be reached, and push there")
    final = choose(run, args.best)
    config = json.loads((final / "trainer_state.json").read_text()).get("config", {})
    private = args.private or bool(config.get("hub_private_repo"))
    license = "" if args.no_card else args.license or config.get("hub_license", "")
    target = Target(repo, private, config.get("milestone_steps", 0), final, license, card=not args.no_card)
    check_access(repo, private, license, "--repo")
    code = Uploads(run, target).wait(limit=math.inf)
    if code == ExitCode.DONE:
        logger.info("upload     everything is on the Hub")
    return code


def _newest_run(runs: Path = Path("runs")) -> Path:
    found = [run for run in runs.glob("*") if checkpoints(run)]
    if not found:
        raise UserError("no run under runs/; train one first (make train) or name it")
    return max(found, key=lambda run: checkpoints(run)[-1].stat().st_mtime)


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    set_up_logging()
    try:
        return push(_push_arguments(argv[1:])) if argv[:1] == ["push"] else _export_command(_export_arguments(argv))
    except (UserError, OSError) as e:
        print(f"error: {redact(str(e))}", file=sys.stderr)
        return ExitCode.USER_ERROR
    except KeyboardInterrupt:
        return ExitCode.RUN_AGAIN


def _export_command(args: argparse.Namespace) -> ExitCode:
    run = args.run or _newest_run()
    checkpoint = export(run, args.out, best=args.best, dtype=args.dtype, license=args.license, force=args.force)
    files = sorted(args.out.iterdir())
    print(f"exported   {checkpoint} to {args.out}, {sum(p.stat().st_size for p in files) / 1e6:,.1f} MB, {args.dtype}")
    print(f"files      {', '.join(p.name for p in files)}")
    print(f"load       transformers.AutoModelForCausalLM.from_pretrained({str(args.out)!r})")
    print(f"card       {args.out / CARD}; it has the results that eval/ writes beside the checkpoint")
    return ExitCode.DONE


def _parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The arguments of both commands."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, description=description, formatter_class=formatter)
    parser.add_argument("run", nargs="?", type=Path, help="run directory or checkpoint (default: the newest run)")
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


def _export_arguments(argv: list[str]) -> argparse.Namespace:
    parser = _parser("python -m recipe.hub.export", __doc__)
    parser.add_argument("--out", type=Path, default=Path("model"), help="directory to write (default: model)")
    parser.add_argument("--force", action="store_true", help="replace an earlier export in --out")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of the weights (default: float32, as in the checkpoint)"
    )
    return parser.parse_args(argv)


def _push_arguments(argv: list[str]) -> argparse.Namespace:
    parser = _parser(
        "python -m recipe.hub.export push",
        "Upload a run's milestones to branches and its newest checkpoint to main, each with its model card.\nWhat is "
        "there already is not uploaded again. A README.md that differs is replaced (its history stays),\nunless "
        "--no_card is given.",
    )
    parser.add_argument("--repo", default="", help="ORG/NAME on the Hub")
    parser.add_argument("--private", action="store_true", help="create a private repository, push to no public one")
    parser.add_argument("--no_card", action="store_true", help="leave README.md on the Hub as it is")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
