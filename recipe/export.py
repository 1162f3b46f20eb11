"""`python -m recipe.export --run RUN --out DIR`: a run's latest checkpoint as a clean model directory."""

import argparse
import shutil
import sys
from pathlib import Path

from recipe.checkpoint import checkpoints, newest_valid
from recipe.config import UserError

# What belongs to the trainer and not to the model.
_TRAINERS_OWN = {"optimizer.safetensors", "trainer_state.json", "manifest.json", "results.json"}


def export(run: Path, out: Path) -> Path:
    """Copies the model's files of the newest whole checkpoint to `out`, which must not exist; returns the checkpoint.

    `run` may also be one checkpoint's own directory. The copy is made under another name and renamed.
    """
    if out.exists():
        raise UserError(f"--out {out} exists; name another directory, or delete it")
    checkpoint = run if (run / "trainer_state.json").is_file() else newest_valid(run)
    if checkpoint is None:
        raise UserError(f"{run}: no checkpoint there; name a run directory, such as runs/shakespeare")
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for path in sorted(checkpoint.iterdir()):
        if path.is_file() and path.name not in _TRAINERS_OWN:
            shutil.copyfile(path, temporary / path.name)
    temporary.rename(out)
    return checkpoint


def _newest_run(runs: Path = Path("runs")) -> Path:
    found = [run for run in runs.glob("*") if checkpoints(run)]
    if not found:
        raise UserError("no run under runs/; train one first (make train) or name it with --run")
    return max(found, key=lambda run: checkpoints(run)[-1].stat().st_mtime)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="run directory, or one checkpoint of it (default: the newest run)")
    parser.add_argument("--out", type=Path, default=Path("model"), help="directory to make")
    args = parser.parse_args(argv)
    try:
        checkpoint = export(args.run or _newest_run(), args.out)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(f"exported {checkpoint} to {args.out}")
    print(f"load it: transformers.AutoModelForCausalLM.from_pretrained({str(args.out)!r})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
