"""Uploads a run's checkpoints to the Hugging Face Hub.

The milestones and the final checkpoint belong there: each on a branch of its own, such as step-005000, the final one on
main too. `sync` uploads those that are on the disk and not on the Hub, in one commit for each branch. `Uploads` calls
it in the background of a training run, and `python -m recipe.hub.export push` in the foreground. Milestones and the
newest checkpoint are never pruned, so that nothing else needs to remember what is left to upload after a failure.

The background is a thread: hashing and sending release the interpreter's lock, and a process of its own slowed the main
thread as much. The requests may fail or hang, but not for longer than their timeouts, and nobody waits for the thread
but the end of the run, with a limit.

The token stays where huggingface_hub finds it, in the environment or in its own file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import huggingface_hub.constants
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.utils import disable_progress_bars

from recipe.checkpoint.format import checkpoints, model_only, step_of, verify
from recipe.config import Config
from recipe.errors import UserError
from recipe.hub.access import Failure, check_access, clean, failure_of, limit_requests, open_repository, page
from recipe.hub.model_card import CARD, model_card

logger = logging.getLogger(__name__)

MAIN = "main"
_WEIGHTS = "model.safetensors"
_LIMIT = 900.0  # seconds that the end of a run waits for its uploads, at most
_PAUSE = 60.0  # seconds between a failure and the next attempt while the run trains, and so between warnings
_RETRIES = (1, 2, 4, 8)  # seconds between attempts while somebody waits


@dataclass(frozen=True)
class Target:
    """What goes where: the milestones of a run to branches of `repo`, the checkpoint `final` to main too.

    Attributes:
        repo: ORG/NAME on the Hub.
        private: create a private repository, and upload nothing to a public one.
        milestone_steps: checkpoints at multiples of this step are milestones (0: none).
        final: the checkpoint for main; it need not exist yet.
        license: of the weights, for the model card (empty: the run's hub_license).
        card: "new" uploads a model card with new weights, "renew" replaces the card of earlier uploads if it differs,
            "none" uploads no card.
    """

    repo: str
    private: bool = False
    milestone_steps: int = 0
    final: Path | None = None
    license: str = ""
    card: str = "new"

    def branches(self, run: Path, up_to: int | None = None) -> dict[str, Path]:
        """{branch: checkpoint} of what is on the disk, the oldest first, up to step `up_to` (None: all)."""
        steps = {step_of(path): path for path in checkpoints(run)}
        steps = {step: p for step, p in steps.items() if self.milestone_steps and step % self.milestone_steps == 0}
        if self.final and (self.final / "trainer_state.json").is_file():
            steps[recorded_step(self.final)] = self.final
        found = {branch_of(step): p for step, p in sorted(steps.items()) if up_to is None or step <= up_to}
        return found | {MAIN: self.final} if self.final in found.values() else found


def branch_of(step: int) -> str:
    return f"step-{step:06d}"


def recorded_step(checkpoint: Path) -> int:
    """The step of a checkpoint, whatever its directory is called."""
    return json.loads((checkpoint / "trainer_state.json").read_text())["step"]


@dataclass
class Known:
    """What earlier calls of `sync` found: branches that are up to date, and why others are refused for good."""

    uploaded: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)


def sync(run: Path, target: Target, known: Known, up_to: int | None = None) -> None:
    """Uploads the checkpoints of `run` up to step `up_to` (None: all) that the Hub does not have; adds to `known`.

    A checkpoint that does not agree with its manifest, or holds a symbolic link, is refused with a warning. Raises
    UserError for a public repository where a private one is wanted, and whatever huggingface_hub raises, which
    `failure_of` explains.
    """
    wanted = target.branches(run, up_to)
    wanted = {branch: path for branch, path in wanted.items() if branch not in known.uploaded | known.refused.keys()}
    if not wanted:
        return
    api = HfApi()
    open_repository(api, target.repo, target.private)
    there = {branch.name for branch in api.list_repo_refs(target.repo).branches}
    for branch, checkpoint in wanted.items():
        card = _card(checkpoint, target)
        if branch not in there or not _is_up_to_date(api, target, branch, checkpoint, card):
            if problem := _problem(checkpoint):
                known.refused[branch] = problem
                logger.warning("upload     %s is refused: %s: %s", branch, checkpoint, problem)
                continue
            if branch not in there:
                api.create_branch(target.repo, branch=branch, exist_ok=True)
            _commit(api, target, branch, checkpoint, card)
            logger.info("upload     %s is at %s", branch, page(target.repo, branch))
        known.uploaded.add(branch)


def _problem(checkpoint: Path) -> str:
    """Why a checkpoint must not be uploaded, or empty. Reads every byte."""
    if links := sorted(path.name for path in checkpoint.iterdir() if path.is_symlink()):
        return f"{links[0]} is a symbolic link"
    return "; ".join(verify(checkpoint)[:1])


def _card(checkpoint: Path, target: Target) -> bytes | None:
    if target.card == "none":
        return None
    try:
        return model_card(checkpoint, repo=target.repo, license=target.license).encode()
    except Exception as error:  # whatever it is, the weights matter more than their description
        logger.warning("upload     %s has no model card: %s", checkpoint, clean(f"{type(error).__name__}: {error}"))
        return None


def _is_up_to_date(api: HfApi, target: Target, branch: str, checkpoint: Path, card: bytes | None) -> bool:
    """Whether the branch has this checkpoint's very weights, and its card where that is to be renewed."""
    found = {file.path: file for file in api.get_paths_info(target.repo, [_WEIGHTS, CARD], revision=branch)}
    expected = json.loads((checkpoint / "manifest.json").read_text())["files"][_WEIGHTS]["sha256"]
    if _WEIGHTS not in found or found[_WEIGHTS].lfs is None or found[_WEIGHTS].lfs.sha256 != expected:
        return False
    if card is None or target.card != "renew":
        return True
    blob = hashlib.sha1(b"blob %d\0" % len(card) + card).hexdigest()  # the name that git gives to a file's content
    return CARD in found and found[CARD].blob_id == blob


def _commit(api: HfApi, target: Target, branch: str, checkpoint: Path, card: bytes | None) -> None:
    """Uploads the model's files and the card in one commit; files that are there already are not sent again."""
    # create_commit and not upload_folder: the card is made here, and what the trainer put beside the model stays.
    files = [CommitOperationAdd(path.name, str(path)) for path in model_only(checkpoint)]
    options = {"commit_message": f"Step {recorded_step(checkpoint)}", "revision": branch}
    with_card = [*files, CommitOperationAdd(CARD, card)] if card else files
    try:
        api.create_commit(target.repo, with_card, **options)
    except ValueError as error:
        if not (card and str(error).startswith("Invalid metadata in README.md")):
            raise
        logger.warning("upload     %s goes up without its card, which the Hub refuses: %s", branch, clean(str(error)))
        api.create_commit(target.repo, files, **options)


class Uploads:
    """Brings the checkpoints of a run to the Hub in the background; one sync at a time, and nothing of it raises."""

    def __init__(self, run: Path, target: Target | None):
        """Without a `target`, which is so on all processes but one, `start` and `wait` do nothing."""
        self._run, self._target, self._known = run, target, Known()
        self._thread: threading.Thread | None = None
        self._failure: Failure | None = None
        self._not_before = 0.0  # time.monotonic() of the next attempt
        if target:
            disable_progress_bars()
            limit_requests()

    def start(self, step: int) -> None:
        """Begins to upload what was evaluated up to `step`, unless that is going on, or failed in the last minute.
        Call it after the metrics of `step` were written, since a model card has them."""
        if self._target and time.monotonic() >= self._not_before:
            self._begin(step)

    def wait(self, limit: float = _LIMIT, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Uploads all that is left and returns whether everything is on the Hub. Ends after `limit` seconds, after
        some attempts that fail, or when `stopped()`."""
        if self._target is None:
            return True
        deadline = time.monotonic() + limit
        if missing := self._missing():
            logger.info("upload     waiting for %s (at most %.0f s; Ctrl-C leaves the rest for later)", missing, limit)
        for pause in (0, *_RETRIES):
            wake = time.monotonic() + max(pause, self._failure.after if pause and self._failure else 0)
            while time.monotonic() < min(wake, deadline) and not stopped():
                time.sleep(0.05)
            # What runs already may have begun before the last checkpoint was there; the second one takes the rest.
            for _ in range(2):
                self._begin(None)
                while self._running() and time.monotonic() < deadline and not stopped():
                    self._thread.join(0.05)
            if stopped() or time.monotonic() >= deadline or self._failure is None or self._failure.lasting:
                break
        if missing := self._missing():
            run, repo = shlex.quote(str(self._run)), self._target.repo
            logger.warning(
                "upload     not on the Hub: %s; python -m recipe.hub.export push %s --repo %s uploads it",
                missing,
                run,
                repo,
            )
        return not missing

    def _begin(self, up_to: int | None) -> None:
        if self._running() or (self._failure and self._failure.lasting):
            return
        thread = threading.Thread(target=self._sync, args=(up_to,), name="upload", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads to be had; the next call tries again
            return
        self._thread = thread

    def _running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _sync(self, up_to: int | None) -> None:
        try:
            sync(self._run, self._target, self._known, up_to)
            self._failure = None
        except Exception as error:
            self._failure = failure_of(error)
            later = "" if self._failure.lasting else "; trying again later"
            if time.monotonic() >= self._not_before:
                logger.warning("upload     to %s failed: %s%s", self._target.repo, self._failure.reason, later)
                self._not_before = time.monotonic() + max(_PAUSE, self._failure.after)

    def _missing(self) -> str:
        missing = [b for b in self._target.branches(self._run) if b not in self._known.uploaded]
        return ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")


def open_uploads(config: Config, engine) -> Uploads:
    """The uploads of a training run; they do nothing unless it has push_to_hub. Collective.

    Raises UserError, on all processes, where the token must not write to hub_model_id. A Hub that cannot be reached is
    no error: the run goes on, and tries again.
    """
    run, error = config.run, ""
    run_dir = Path(run.output_dir)
    if not run.push_to_hub:
        return Uploads(run_dir, None)
    target = Target(
        run.hub_model_id,
        private=run.hub_private_repo,
        milestone_steps=run.milestone_steps,
        final=run_dir / f"step_{config.optimizer.max_steps:08d}",
    )
    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    if engine.is_main and offline:
        logger.warning("upload     HF_HUB_OFFLINE is set, so this run uploads nothing; make push does, later")
    elif engine.is_main:
        try:
            check_access(target.repo, target.private, "hub_model_id")
            logger.info("upload     to %s, each checkpoint while the run goes on", page(target.repo))
        except UserError as e:
            error = str(e)
        except Exception as e:
            logger.warning("upload     the Hub cannot be reached (%s); the run tries again later", failure_of(e).reason)
    if error := engine.from_main(error):
        raise UserError(error)
    return Uploads(run_dir, target if engine.is_main and not offline else None)
