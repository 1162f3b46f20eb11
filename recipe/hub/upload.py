"""Uploads a run's checkpoints to the Hugging Face Hub.

The milestones and the final checkpoint belong there: each on a branch of its own, such as step-005000, the final one on
main too. `sync` uploads those on the disk, in one commit for each branch where something differs. `Uploads` calls it in
the background of a training run, and `python -m recipe.hub.export push` in the foreground. Milestones and the
newest checkpoint are never pruned, so that nothing else needs to remember what is left to upload after a failure.

The background is a thread: hashing and sending release the interpreter's lock, and a process of its own slowed the main
thread as much. The requests may fail or hang, but not for longer than their timeouts, and nobody waits for the thread
except the end of the run, with a limit.

The token stays where huggingface_hub finds it, in the environment or in its own file.
"""

from __future__ import annotations

import json
import logging
import math
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub.constants
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils.logging import set_verbosity_error

from recipe.checkpoint.format import checkpoints, model_only, step_of, verify
from recipe.config import Config
from recipe.hub.access import check_access, check_card, is_lasting, limit_requests, open_repository, page, reason
from recipe.hub.model_card import CARD, model_card
from recipe.utils.errors import ExitCode
from recipe.utils.units import some

logger = logging.getLogger(__name__)

MAIN = "main"
_LIMIT = 900.0  # seconds that the end of a run waits for its uploads, at most
_QUIET = 60.0  # seconds between a failure and the next attempt while the run trains, and so between warnings
# Seconds between attempts while somebody waits, together longer than the five minutes of the Hub's rate limits.
_PAUSES = (1, 2, 4, 8, 15, 30, 60, 60, 60, 60, 60)


@dataclass(frozen=True)
class Target:
    """What goes where: the milestones of a run to branches of `repo`, the checkpoint `final` to main too.

    Attributes:
        repo: ORG/NAME on the Hub.
        private: create a private repository, and upload nothing to a public one.
        milestone_steps: checkpoints at multiples of this step are milestones (0: none).
        final: the checkpoint for main; it need not exist yet.
        license: of the weights, for the model card (empty: the run's hub_license).
        card: whether a model card goes with the weights; it replaces one that differs.
    """

    repo: str
    private: bool = False
    milestone_steps: int = 0
    final: Path | None = None
    license: str = ""
    card: bool = True

    def branches(self, run: Path, up_to: float = math.inf) -> dict[str, Path]:
        """{branch: checkpoint} of what is on the disk, the oldest first, up to step `up_to`."""
        steps = {step_of(path): path for path in checkpoints(run)}
        steps = {step: p for step, p in steps.items() if self.milestone_steps and step % self.milestone_steps == 0}
        if self.final and (self.final / "trainer_state.json").is_file():
            steps[recorded_step(self.final)] = self.final
        found = {f"step-{step:06d}": path for step, path in sorted(steps.items()) if step <= up_to}
        return found | {MAIN: self.final} if self.final in found.values() else found


def recorded_step(checkpoint: Path) -> int:
    """The step of a checkpoint, whatever its directory is called."""
    return json.loads((checkpoint / "trainer_state.json").read_text())["step"]


def sync(run: Path, target: Target, known: dict[str, bool], up_to: float = math.inf) -> None:
    """Uploads the checkpoints of `run` up to step `up_to`; huggingface_hub skips files that the Hub has.

    `known` is {branch: whether it is up to date} from earlier calls: False where the checkpoint does not agree with its
    manifest, which is refused with a warning. Raises UserError for a public repository where a private one is wanted
    and for a card that cannot be written or that the Hub refuses, and whatever huggingface_hub raises.
    """
    wanted = {branch: path for branch, path in target.branches(run, up_to).items() if branch not in known}
    if not wanted:
        return
    api = HfApi()
    open_repository(api, target.repo, target.private)
    for branch, checkpoint in wanted.items():
        if problems := verify(checkpoint):
            known[branch] = False
            logger.warning("upload     %s is refused: %s: %s", branch, checkpoint, problems[0])
            continue
        # Not upload_folder: the card is made here, and what else lies beside the model stays here.
        files = [CommitOperationAdd(path.name, str(path)) for path in model_only(checkpoint)]
        if target.card:
            card = model_card(checkpoint, repo=target.repo, license=target.license)
            check_card(card)
            files.append(CommitOperationAdd(CARD, card.encode()))
        api.create_branch(target.repo, branch=branch, exist_ok=True)
        message = f"Step {recorded_step(checkpoint)}"
        api.create_commit(target.repo, files, commit_message=message, revision=branch)
        logger.info("upload     %s is at %s", branch, page(target.repo, branch))
        known[branch] = True


class Uploads:
    """Uploads the checkpoints of a run in the background, one sync at a time; an upload that fails raises nothing."""

    def __init__(self, run: Path, target: Target | None):
        """Without a `target`, as on all processes but the main one, `start` and `wait` do nothing."""
        self._run, self._target = run, target
        self._known: dict[str, bool] = {}
        self._thread: threading.Thread | None = None
        self._one_at_a_time = threading.Lock()
        self._hopeless = False
        self._not_before = 0.0  # time.monotonic() of the next attempt during the run, and of the next warning
        if target:
            disable_progress_bars()
            set_verbosity_error()  # a branch that is up to date is no warning
            limit_requests()

    def start(self, step: int) -> None:
        """Starts to upload what was evaluated up to `step`, unless an upload is running or failed in the last minute.
        Call it after the metrics of `step` were written, since a model card has them."""
        busy = self._thread is not None and self._thread.is_alive()
        if self._target and not busy and time.monotonic() >= self._not_before:
            self._begin(step, pauses=())

    def wait(self, limit: float = _LIMIT, stopped: Callable[[], bool] = lambda: False) -> ExitCode:
        """Uploads all that is left; returns DONE where everything is on the Hub, USER_ERROR where the Hub or a damaged
        checkpoint refuses it, RUN_AGAIN where it failed. Ends after `limit` seconds, after some attempts that fail, or
        when `stopped()`."""
        if self._target is None:
            return ExitCode.DONE
        if missing := self._missing():
            logger.info("upload     waiting for %s (Ctrl-C leaves the rest for later)", missing)
            deadline = time.monotonic() + limit
            self._begin(math.inf, _PAUSES)
            while self._thread.is_alive() and time.monotonic() < deadline and not stopped():
                self._thread.join(0.05)
        if not (missing := self._missing()):
            return ExitCode.DONE
        command = f"python -m recipe.hub.export push {shlex.quote(str(self._run))} --repo {self._target.repo}"
        logger.warning("upload     not on the Hub: %s; to upload it, run %s", missing, command)
        refused = self._hopeless or False in self._known.values()
        return ExitCode.USER_ERROR if refused else ExitCode.RUN_AGAIN

    def _begin(self, up_to: float, pauses: Sequence[float]) -> None:
        self._thread = threading.Thread(target=self._upload, args=(up_to, pauses), name="upload", daemon=True)
        self._thread.start()

    def _upload(self, up_to: float, pauses: Sequence[float]) -> None:
        """Uploads everything up to a step, with another attempt after each of the pauses."""
        with self._one_at_a_time:
            for pause in (0, *pauses):
                time.sleep(pause)
                if self._hopeless or self._try(up_to):
                    break

    def _try(self, up_to: float) -> bool:
        """Whether a sync succeeded."""
        try:
            sync(self._run, self._target, self._known, up_to)
            return True
        except Exception as error:
            self._hopeless = is_lasting(error)
            if time.monotonic() >= self._not_before:
                again = "" if self._hopeless else "; trying again later"
                logger.warning("upload     to %s failed: %s%s", self._target.repo, reason(error), again)
                self._not_before = time.monotonic() + _QUIET
            return False

    def _missing(self) -> str:
        return some([branch for branch in self._target.branches(self._run) if not self._known.get(branch)])


def open_uploads(config: Config, engine) -> Uploads:
    """The uploads of a training run; they do nothing unless it has push_to_hub. Collective.

    Raises UserError, on all processes, where the token must not write to hub_model_id. A Hub that cannot be reached is
    no error: the run goes on, and tries again.
    """
    run, run_dir = config.run, Path(config.run.output_dir)
    if not run.push_to_hub:
        return Uploads(run_dir, None)
    final = run_dir / f"step_{config.optimizer.max_steps:08d}"
    target = Target(run.hub_model_id, run.hub_private_repo, run.milestone_steps, final)
    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    if engine.is_main and offline:
        logger.warning("upload     HF_HUB_OFFLINE is set, so this run uploads nothing; run make push later")
    with engine.shared_error("hub_model_id cannot be used"):
        if engine.is_main and not offline:
            check_access(target.repo, target.private, run.hub_license, "hub_model_id")
            logger.info("upload     to %s, each checkpoint during training", page(target.repo))
    return Uploads(run_dir, target if engine.is_main and not offline else None)
