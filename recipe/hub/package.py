"""What of a checkpoint is for others: the files that transformers loads and a model card, nothing of the trainer's."""

from __future__ import annotations

import json
from pathlib import Path

from recipe.checkpoint.format import model_only
from recipe.data.tokenizer import END_OF_TEXT
from recipe.hub.model_card import CARD, card_of
from recipe.hub.outbox import Entry
from recipe.hub.upload import judge
from recipe.monitor.metrics import read_metrics


def recorded_step(checkpoint: Path) -> int:
    """The step of a checkpoint, whatever its directory is called."""
    return json.loads((checkpoint / "trainer_state.json").read_text())["step"]


def package(
    checkpoint: Path, *, repo: str = "", license: str = "", dtype: str = "float32", card: bool = True, tail: int = 0
) -> tuple[list[Path], dict[str, bytes]]:
    """(files to be taken as they are, {name: content} of the others). Checkpoints of earlier versions are put right.
    Raises what `card_of` raises, whose arguments the others are."""
    files = {path.name: path for path in model_only(checkpoint)}
    config = json.loads(files["config.json"].read_text())
    wanted = {
        "config.json": {"dtype": dtype},
        "generation_config.json": {"bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TEXT},
        "tokenizer_config.json": {"model_max_length": config["n_positions"]} if "n_positions" in config else {},
    }
    made = {}
    for name, values in wanted.items():
        before = json.loads(files[name].read_text()) if name in files else None
        if before and before | values != before:
            made[name] = (json.dumps(before | values, indent=2) + "\n").encode()
    if card:
        made[CARD] = card_of(checkpoint, repo=repo, license=license, dtype=dtype, tail=tail).encode()
    return [path for name, path in files.items() if name not in made], made


def renew_card(run: Path, entry: Entry, **options) -> str:
    """Writes a queued checkpoint's card anew, if the checkpoint is still there; returns why it kept the card of before,
    in a line for the user, where that is not the card that `options`, package's, ask for."""
    checkpoint, license = run / f"step_{entry.step:08d}", options.get("license")
    try:
        if checkpoint.exists():
            entry.put(CARD, package(checkpoint, repo=entry.repo, **options)[1][CARD])
        elif license and f"\nlicense: {license}\n" not in (entry.path / CARD).read_text():
            return (
                f"upload     {entry.path.name} keeps its card, without --license {license}: its checkpoint "
                f"is no longer in {run}; change the licence in the card on the Hub"
            )
    except Exception as error:  # the weights are worth more than what is said of them
        return f"upload     {entry.path.name} has no new card: {judge(error)[1]}"
    return ""


def evaluated(run: Path, step: int) -> bool:
    """Whether the line of `step`, or one after it, is in metrics.jsonl; where there is none, nobody writes it."""
    path = run / "metrics.jsonl"
    return not path.exists() or any(line["step"] >= step for line in read_metrics(path, tail=65_536))
