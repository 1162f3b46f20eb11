"""Uploads a run's checkpoints to the Hugging Face Hub.

The milestones and the final checkpoint are uploaded, each to its own branch, such as step-005000; the final one also
goes to main. `sync` uploads those on the disk, with one commit for each branch that differs. `Uploads` calls it in a
thread beside a training run, and `python -m recipe.hub.export push` waits for it. Milestones and the newest checkpoint
are never pruned, so nothing else needs to remember what is left to upload after a failure.

The token stays where huggingface_hub finds it, in the environment or in its token file.
"""

from __future__ import annotations

import json
import logging
import shlex
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub.constants
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils.logging import set_verbosity_error

from recipe.checkpoint.format import checkpoint_path, checkpoints, files_of, step_of, verify
from recipe.config import Config
from recipe.hub.access import check_access, is_lasting, limit_requests, open_repository, page, reason
from recipe.hub.model_card import CARD, model_card
from recipe.monitor.metrics import read_metrics
from recipe.utils.errors import ExitCode
from recipe.utils.processes import Processes
from recipe.utils.units import some

logger = logging.getLogger(__name__)

MAIN, METRICS = "main", "metrics.jsonl"
LIMIT = 900.0  # seconds that a finished run waits for its uploads, at most
PAUSE = 60.0  # seconds between a failure and the next attempt
ATTEMPTS = 6  # failures allowed while `wait` runs: with PAUSE, longer than the Hub's five-minute rate limits


@dataclass(frozen=True)
class Target:
    """What is uploaded where: a run's milestones to branches of `repo`, the checkpoint `final` to main too.

    Attributes:
        repo: ORG/NAME on the Hub.
        private: create a private repository, and upload nothing to a public one.
        milestone_steps: checkpoints at multiples of this step are milestones (0: none).
        final: the checkpoint for main; it need not exist yet.
        license: of the weights, for the model card (empty: the run's hub_license).
        card: whether to upload a model card with the weights; it replaces one that differs.
        state: whether to upload the optimizer state and metrics.jsonl too.
    """

    repo: str
    private: bool = False
    milestone_steps: int = 0
    final: Path | None = None
    license: str = ""
    card: bool = True
    state: bool = False

    def branches(self, run: Path) -> dict[str, Path]:
        """{branch: checkpoint} for the checkpoints on the disk, oldest first."""
        steps = {step_of(path): path for path in checkpoints(run)}
        steps = {step: p for step, p in steps.items() if self.milestone_steps and step % self.milestone_steps == 0}
        final = {}
        if self.final and (self.final / "trainer_state.json").is_file():
            steps[recorded_step(self.final)] = self.final
            final = {MAIN: self.final}
        return {branch_of(step): path for step, path in sorted(steps.items())} | final


def branch_of(step: int) -> str:
    """The name of a checkpoint's branch."""
    return f"step-{step:06d}"


def recorded_step(checkpoint: Path) -> int:
    """The step recorded in a checkpoint, whatever its directory's name."""
    return json.loads((checkpoint / "trainer_state.json").read_text())["step"]


def sync(target: Target, wanted: dict[str, Path], known: dict[str, bool]) -> None:
    """Uploads the checkpoints of {branch: checkpoint}; huggingface_hub skips files that the Hub has.

    Records each branch in `known`: True, or False with a warning if the checkpoint does not match its manifest and is
    not uploaded. Raises UserError if the repository is public but a private one is wanted or if a card cannot be
    written, and whatever huggingface_hub raises.
    """
    api = HfApi()
    open_repository(api, target.repo, target.private)
    for branch, checkpoint in wanted.items():
        if problems := verify(checkpoint):
            known[branch] = False
            logger.warning("upload     %s is refused: %s: %s", branch, checkpoint, problems[0])
            continue
        # Not upload_folder: the card is generated here, and other files beside the model are not uploaded.
        files = [CommitOperationAdd(path.name, str(path)) for path in files_of(checkpoint, state=target.state)]
        step = recorded_step(checkpoint)
        if target.state:
            lines = [line for line in read_metrics(checkpoint.resolve().parent / METRICS) if line["step"] <= step]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            files.append(CommitOperationAdd(METRICS, text.encode()))
        if target.card:
            card = model_card(checkpoint, repo=target.repo, license=target.license, audit=target.state)
            files.append(CommitOperationAdd(CARD, card.encode()))
        api.create_branch(target.repo, branch=branch, exist_ok=True)
        message = f"Step {step}"
        api.create_commit(target.repo, files, commit_message=message, revision=branch)
        logger.info("upload     %s is at %s", branch, page(target.repo, branch))
        known[branch] = True


class Uploads:
    """Uploads a run's checkpoints in a thread, one sync at a time; a failed upload raises nothing.

    Only the end of the run waits for the thread, and not longer than a limit: requests may fail, or hang until they
    time out.
    """

    def __init__(self, run: Path, target: Target | None):
        """Without a `target`, as on all processes but the main one, `start` and `wait` do nothing."""
        self._run, self._target = run, target
        self._known: dict[str, bool] = {}  # branch: whether it is on the Hub, or is refused
        self._thread = threading.Thread()
        self._failures = 0
        self._not_before = 0.0  # time.monotonic() of the next attempt
        if target:
            disable_progress_bars()
            set_verbosity_error()  # a branch that is up to date is no warning
            limit_requests()

    def start(self) -> None:
        """Starts uploading the checkpoints on the disk, unless an upload is running or failed in the last minute. Call
        it after the metrics of the newest checkpoint's step are written, since the model card shows them."""
        wanted = self._unknown()
        if wanted and not self._thread.is_alive() and time.monotonic() >= self._not_before:
            self._thread = threading.Thread(
                target=self._upload, args=(self._target, wanted), name="upload", daemon=True
            )
            self._thread.start()

    def wait(self, limit: float = LIMIT, stopped: Callable[[], bool] = lambda: False) -> ExitCode:
        """Uploads everything that is left. Ends after `limit` seconds, after ATTEMPTS failures, or when `stopped()`.

        Returns DONE if everything is on the Hub, USER_ERROR if the Hub refuses it or a checkpoint is damaged, RUN_AGAIN
        if it failed.
        """
        if self._target is None:
            return ExitCode.DONE
        if missing := self._missing():
            logger.info("upload     waiting for %s (Ctrl-C leaves the rest for later)", some(missing))
        deadline = time.monotonic() + limit
        self._failures, self._not_before = 0, 0.0
        while self._thread.is_alive() or (self._unknown() and self._failures < ATTEMPTS):
            if time.monotonic() >= deadline or stopped():
                break
            self.start()
            time.sleep(0.05)
        if not (missing := self._missing()):
            return ExitCode.DONE
        command = f"python -m recipe.hub.export push {shlex.quote(str(self._run))} --repo {self._target.repo}"
        logger.warning("upload     not on the Hub: %s; to upload it, run %s", some(missing), command)
        return ExitCode.USER_ERROR if False in self._known.values() else ExitCode.RUN_AGAIN

    def _unknown(self) -> dict[str, Path]:
        """{branch: checkpoint} of those on the disk that are neither on the Hub nor refused."""
        branches = self._target.branches(self._run) if self._target else {}
        return {branch: path for branch, path in branches.items() if branch not in self._known}

    def _missing(self) -> list[str]:
        return [*self._unknown(), *(branch for branch, there in self._known.items() if not there)]

    def _upload(self, target: Target, wanted: dict[str, Path]) -> None:
        try:
            sync(target, wanted, self._known)
        except Exception as error:
            refused = is_lasting(error)
            if refused:
                self._known = dict.fromkeys(wanted, False) | self._known
            self._failures += 1
            self._not_before = time.monotonic() + PAUSE
            again = "" if refused else "; trying again later"
            logger.warning("upload     to %s failed: %s%s", target.repo, reason(error), again)


def open_uploads(config: Config, processes: Processes) -> Uploads:
    """The uploads of a training run; they do nothing without push_to_hub. Collective.

    Raises UserError, on all processes, if the token may not write to hub_model_id. An unreachable Hub is not an error:
    the run goes on and tries again.
    """
    run, run_dir = config.run, Path(config.run.output_dir)
    if not run.push_to_hub:
        return Uploads(run_dir, None)
    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    with processes.shared_error("hub_model_id cannot be used"):
        if processes.is_main and offline:
            logger.warning("upload     HF_HUB_OFFLINE is set, so this run uploads nothing; run make push later")
        elif processes.is_main:
            check_access(run.hub_model_id, run.hub_private_repo, run.hub_license, "hub_model_id")
            logger.info("upload     to %s, each checkpoint during training", page(run.hub_model_id))
    if offline or not processes.is_main:
        return Uploads(run_dir, None)
    final = checkpoint_path(run_dir, config.optimizer.max_steps)
    state = run.push_to_hub == "state"
    return Uploads(run_dir, Target(run.hub_model_id, run.hub_private_repo, run.milestone_steps, final, state=state))
