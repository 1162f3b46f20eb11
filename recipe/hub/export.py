"""Exports a run's checkpoint to a directory or to the Hugging Face Hub.

    python -m recipe.hub.export RUN --out my-model          the newest checkpoint as a directory for transformers
    python -m recipe.hub.export RUN --best                  the one with the lowest validation loss
    python -m recipe.hub.export push RUN --repo ORG/NAME    upload the milestones to branches, the newest to main

An export holds the model, the tokenizer's files and README.md, a model card with the records of the run and the results
of eval/. A push uploads these files, unless the Hub has them; it replaces a README.md that differs.
"""

import argparse
import logging
import math
import shutil
import sys
from pathlib import Path

import huggingface_hub.constants

from recipe.checkpoint.format import checkpoints, files_of, newest_intact, state_of, step_of, verify
from recipe.config import check_repo_name
from recipe.engine.launch import fail
from recipe.hub.access import check_access
from recipe.hub.model_card import CARD, model_card, model_type
from recipe.hub.upload import Uploads
from recipe.utils.checkpoints import newest_run, val_losses
from recipe.utils.errors import ArgumentParser, ExitCode, UserError
from recipe.utils.log import set_up_logging
from recipe.utils.redaction import redact

logger = logging.getLogger("recipe.hub.export")  # as a command, __name__ is __main__


def export(run: Path, out: Path, *, best: bool = False, license: str = "") -> Path:
    """Writes the newest intact checkpoint of `run`, or the `best` one, or `run` itself if it is one, to `out`, which is
    a new or empty directory; returns the checkpoint. Raises UserError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} exists already; move it away, or name another directory (make export OUT=NAME)")
    checkpoint = choose(run, best)
    card = model_card(checkpoint, license=license)
    out.mkdir(parents=True, exist_ok=True)
    try:
        for path in files_of(checkpoint):
            shutil.copyfile(path, out / path.name, follow_symlinks=False)
        (out / CARD).write_text(card, encoding="utf-8")
    except BaseException:  # so that the same command can be repeated
        shutil.rmtree(out.resolve(), ignore_errors=True)
        raise
    return checkpoint


def choose(run: Path, best: bool, *, to_resume: bool = False) -> Path:
    """The newest intact checkpoint of `run`; or the `best` one, by the validation losses in metrics.jsonl, among those
    still on disk; or `run` itself if it is one. With its optimizer state only if `to_resume`. Raises UserError."""
    if (run / "manifest.json").is_file():
        if best:
            raise UserError(f"{run} is a single checkpoint; for --best, name {run.resolve().parent}")
        if problems := verify(run.resolve(), to_resume=to_resume):  # `run` may be a link
            raise UserError(f"{run}: {problems[0]}; name its run instead, for the newest intact checkpoint")
        return run
    if not best:
        if checkpoint := newest_intact(run, to_resume=to_resume):
            return checkpoint
        raise UserError(f"{run}: no checkpoint there; name a run directory, such as runs/shakespeare")
    losses = val_losses(run)
    for loss, path in sorted((losses[step_of(path)], path) for path in checkpoints(run) if step_of(path) in losses):
        if not verify(path, to_resume=to_resume):
            logger.info("best       %s has the lowest validation loss of those kept, %.4f", path, loss)
            return path
    reason = "no intact checkpoint has a validation loss (eval_steps); omit --best to take the newest"
    raise UserError(f"{run}: {reason}")


def push(args: argparse.Namespace) -> ExitCode:
    """Uploads the missing milestones, and the newest or the best checkpoint to main; returns the exit code."""
    if not args.repo:
        raise UserError("--repo is empty; name the repository to upload to, ORG/NAME (make push REPO=ORG/NAME)")
    check_repo_name(args.repo, "--repo")
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE is set; unset it, on a machine that reaches the Hub")
    final = choose(args.run, args.best, to_resume=args.state)
    config = state_of(final)["config"]
    state = args.state or config.get("push_to_hub") == "state"
    if state and not args.state:
        final = choose(args.run, args.best, to_resume=True)
    private = args.private or bool(config.get("hub_private_repo"))
    license = "" if args.no_card else args.license or config.get("hub_license", "")
    check_access(args.repo, private, license, "--repo")
    milestone_steps = config.get("milestone_steps", 0)
    uploads = Uploads(args.run, args.repo, private, milestone_steps, final, license, card=not args.no_card, state=state)
    code = uploads.wait(limit=math.inf)
    if code == ExitCode.DONE:
        logger.info("upload     everything is on the Hub")
    return code


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    set_up_logging()
    try:
        args = _arguments(sys.argv[1:] if argv is None else argv)
        args.run = args.run or newest_run()
        return args.command(args)
    except (UserError, OSError) as error:
        return fail(error)
    except KeyboardInterrupt:
        return ExitCode.RUN_AGAIN


def _export(args: argparse.Namespace) -> ExitCode:
    checkpoint = export(args.run, args.out, best=args.best, license=args.license)
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"exported   {checkpoint} to {args.out}, {size / 1e6:,.1f} MB")
    if (kind := model_type(args.out)) == "gpt2":
        print(f"load       transformers.AutoModelForCausalLM.from_pretrained({str(args.out)!r})")
    else:
        print(f"load       with code of your own: transformers has no {redact(kind)} model")
    print(f"card       {args.out / CARD}; it has the results that eval/ writes beside the checkpoint")
    return ExitCode.DONE


def _arguments(argv: list[str]) -> argparse.Namespace:
    is_push = argv[:1] == ["push"]
    prog = "python -m recipe.hub.export" + (" push" if is_push else "")
    formatter = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(prog=prog, description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    add("run", nargs="?", type=Path, help="run directory or checkpoint (default: the newest run)")
    add(
        "--best",
        action="store_true",
        help="the checkpoint with the lowest validation loss of those kept, not the newest",
    )
    add(
        "--license",
        default="",
        help="license of the weights for the card, by the Hub's name for it, or other (default: the run's hub_license, "
        "mit unless you set another; check that your data allow it)",
    )
    if is_push:
        add("--repo", default="", help="ORG/NAME on the Hub")
        add("--private", action="store_true", help="create a private repository, and refuse a public one")
        add("--state", action="store_true", help="upload the optimizer state and metrics.jsonl too, for an audit")
        add("--no_card", action="store_true", help="leave README.md on the Hub as it is")
    else:
        add("--out", type=Path, default=Path("model"), help="new directory to write (default: model)")
    parser.set_defaults(command=push if is_push else _export)
    return parser.parse_args(argv[1:] if is_push else argv)


if __name__ == "__main__":
    sys.exit(main())
