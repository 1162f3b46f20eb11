"""Uploads a run's checkpoints to the Hugging Face Hub.

The milestones and the final checkpoint are uploaded, each to its own branch, such as step-005000, and the final one to
main too: in a thread beside a training run, or by `python -m recipe.hub.export push`, which waits. Milestones and the
newest checkpoint are never pruned, so nothing else needs to remember what is left to upload after a failure.

The token stays where huggingface_hub finds it, in the environment or in its token file.
"""

import json
import logging
import shlex
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub.constants
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils.logging import set_verbosity_error

from recipe.checkpoint.format import checkpoint_path, checkpoints, files_of, state_of, step_of, verify
from recipe.config import Config
from recipe.hub.access import check_access, is_lasting, limit_requests, open_repository, page, reason
from recipe.hub.model_card import CARD, model_card
from recipe.utils.checkpoints import read_metrics
from recipe.utils.errors import ExitCode
from recipe.utils.processes import Processes
from recipe.utils.units import some

logger = logging.getLogger(__name__)

MAIN, METRICS = "main", "metrics.jsonl"
_STATE = {"manifest.json", "trainer_state.json", "optimizer.safetensors", METRICS}
LIMIT = 900.0  # seconds that a finished run waits for its uploads, at most
LOOK = 1.0  # seconds between two looks into the run's directory, which may take longer than a step
PAUSE = 60.0  # seconds between a failure and the next attempt
ATTEMPTS = 6  # failures allowed while `wait` runs: with PAUSE, longer than the Hub's five-minute rate limits


def branch_of(step: int) -> str:
    """The name of a checkpoint's branch."""
    return f"step-{step:06d}"


@dataclass
class Uploads:
    """Uploads a run's checkpoints in a thread, one attempt at a time; a failed upload raises nothing.

    Only the end of the run waits for the thread, and not longer than a limit: requests may fail, or hang until they
    time out. Without a `repo`, as on all processes but the main one, `start` and `wait` do nothing.

    Attributes:
        run: its directory.
        repo: ORG/NAME on the Hub.
        private: create a private repository, and upload nothing to a public one.
        milestone_steps: checkpoints at multiples of this step are milestones (0: none).
        final: the checkpoint for main; it need not exist yet.
        license: of the weights, for the model card (empty: the run's hub_license).
        card: whether to upload a model card with the weights; it replaces one that differs.
        state: whether to upload the optimizer state and metrics.jsonl too.
    """

    run: Path
    repo: str = ""
    private: bool = False
    milestone_steps: int = 0
    final: Path | None = None
    license: str = ""
    card: bool = True
    state: bool = False

    def __post_init__(self):
        self.known: dict[str, bool] = {}  # whether a branch is on the Hub; False for one that is refused
        self._thread = threading.Thread()
        self._failures = 0
        self._not_before = 0.0  # time.monotonic() of the next attempt
        if self.repo:
            disable_progress_bars()
            set_verbosity_error()  # a branch that is up to date is no warning
            limit_requests()

    def branches(self) -> dict[str, Path]:
        """{branch: checkpoint} for the checkpoints on the disk, oldest first."""
        steps = {step_of(path): path for path in checkpoints(self.run)}
        steps = {step: p for step, p in steps.items() if self.milestone_steps and step % self.milestone_steps == 0}
        final = {}
        if self.final and (self.final / "trainer_state.json").is_file():
            steps[state_of(self.final)["step"]] = self.final  # whatever its directory's name
            final = {MAIN: self.final}
        return {branch_of(step): path for step, path in sorted(steps.items())} | final

    def sync(self, wanted: dict[str, Path]) -> None:
        """Uploads the checkpoints of {branch: checkpoint}; huggingface_hub skips files that the Hub has. One that does
        not match its manifest is refused, with a warning. Raises UserError if the repository is public but a private
        one is wanted or if a card cannot be written, and whatever huggingface_hub raises."""
        api = HfApi()
        open_repository(api, self.repo, self.private)
        for branch, checkpoint in wanted.items():
            if problems := verify(checkpoint):
                logger.warning("upload     %s is refused: %s: %s", branch, checkpoint, problems[0])
            else:
                self._commit(api, branch, checkpoint)
            self.known[branch] = not problems

    def _commit(self, api: HfApi, branch: str, checkpoint: Path) -> None:
        # Not upload_folder: the card is generated here, and other files beside the model are not uploaded.
        files: list = [CommitOperationAdd(path.name, str(path)) for path in files_of(checkpoint, state=self.state)]
        step = state_of(checkpoint)["step"]
        if self.state:
            lines = [line for line in read_metrics(checkpoint.resolve().parent / METRICS) if line["step"] <= step]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            files.append(CommitOperationAdd(METRICS, text.encode()))
        if self.card:
            card = model_card(checkpoint, repo=self.repo, license=self.license, audit=self.state)
            files.append(CommitOperationAdd(CARD, card.encode()))
        api.create_branch(self.repo, branch=branch, exist_ok=True)
        # An earlier push's, or main's, of which a new branch is a copy: the state of another step.
        others = _STATE - {file.path_in_repo for file in files}
        there = api.list_repo_files(self.repo, revision=branch) if others else []
        files += [CommitOperationDelete(name) for name in sorted(others.intersection(there))]
        api.create_commit(self.repo, files, commit_message=f"Step {step}", revision=branch)
        logger.info("upload     %s is at %s", branch, page(self.repo, branch))

    def start(self) -> None:
        """Starts uploading the checkpoints on the disk, unless an upload is running or failed in the last minute. Call
        it after the metrics of the newest checkpoint's step are written, since the model card shows them."""
        if self._thread.is_alive() or time.monotonic() < self._not_before:
            return
        self._not_before = time.monotonic() + LOOK
        if wanted := self._unknown():
            self._thread = threading.Thread(target=self._upload, args=(wanted,), name="upload", daemon=True)
            self._thread.start()

    def wait(self, limit: float = LIMIT, stop_requested: Callable[[], bool] = lambda: False) -> ExitCode:
        """Uploads everything that is missing, for at most `limit` seconds or ATTEMPTS failures, or until
        `stop_requested()`. Returns DONE if everything is on the Hub, USER_ERROR if a checkpoint is damaged or refused,
        else RUN_AGAIN."""
        if missing := self._missing():
            logger.info("upload     waiting for %s (Ctrl-C leaves the rest for later)", some(missing))
        deadline = time.monotonic() + limit
        self._failures, self._not_before = 0, 0.0
        while self._thread.is_alive() or (self._unknown() and self._failures < ATTEMPTS):
            if time.monotonic() >= deadline or stop_requested():
                break
            self.start()
            time.sleep(0.05)
        if not (missing := self._missing()):
            return ExitCode.DONE
        command = f"python -m recipe.hub.export push {shlex.quote(str(self.run))} --repo {self.repo}"
        logger.warning("upload     not on the Hub: %s; to upload it, run %s", some(missing), command)
        return ExitCode.USER_ERROR if False in self.known.values() else ExitCode.RUN_AGAIN

    def _unknown(self) -> dict[str, Path]:
        """{branch: checkpoint} of those on the disk that are neither on the Hub nor refused."""
        branches = self.branches() if self.repo else {}
        return {branch: path for branch, path in branches.items() if branch not in self.known}

    def _missing(self) -> list[str]:
        return [*self._unknown(), *(branch for branch, there in self.known.items() if not there)]

    def _upload(self, wanted: dict[str, Path]) -> None:
        try:
            self.sync(wanted)
        except Exception as error:
            refused = is_lasting(error)
            if refused:
                self.known = dict.fromkeys(wanted, False) | self.known
            self._failures += 1
            self._not_before = time.monotonic() + PAUSE
            again = "" if refused else "; trying again later"
            logger.warning("upload     to %s failed: %s%s", self.repo, reason(error), again)


def open_uploads(config: Config, processes: Processes) -> Uploads:
    """The uploads of a training run; they do nothing without push_to_hub. Collective. Raises UserError, on all
    processes, if the token may not write to hub_model_id; with an unreachable Hub the run goes on and tries again."""
    run, run_dir = config.run, Path(config.run.output_dir)
    if not run.push_to_hub:
        return Uploads(run_dir)
    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    with processes.shared_error("hub_model_id cannot be used"):
        if processes.is_main and offline:
            logger.warning("upload     HF_HUB_OFFLINE is set, so this run uploads nothing; run make push later")
        elif processes.is_main:
            check_access(run.hub_model_id, run.hub_private_repo, run.hub_license, "hub_model_id")
            logger.info("upload     to %s, each checkpoint during training", page(run.hub_model_id))
    if offline or not processes.is_main:
        return Uploads(run_dir)
    final = checkpoint_path(run_dir, config.optimizer.max_steps)
    state = run.push_to_hub == "state"
    return Uploads(run_dir, run.hub_model_id, run.hub_private_repo, run.milestone_steps, final, state=state)
