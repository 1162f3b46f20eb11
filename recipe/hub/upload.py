"""Uploads a run's checkpoints to the Hugging Face Hub.

Milestones and the final checkpoint go to branches of their own, such as step-005000, and the final one to main too: in
a thread during training, or by `python -m recipe.hub.export push`, which waits. Milestones and the newest checkpoint
are never pruned, so after a failure the disk itself shows what is still to be uploaded.

Only huggingface_hub reads the token, from the environment or its token file.
"""

import json
import logging
import re
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
from recipe.hub.access import check_access, is_permanent, limit_requests, open_repository, page, reason
from recipe.hub.model_card import CARD, model_card
from recipe.utils.checkpoints import read_metrics
from recipe.utils.errors import ExitCode, UserError, is_transient
from recipe.utils.processes import Processes
from recipe.utils.units import some

logger = logging.getLogger(__name__)

MAIN, METRICS = "main", "metrics.jsonl"
STATE = {"manifest.json", "trainer_state.json", "optimizer.safetensors", METRICS}
# Names that transformers and PEFT give the files of a model and of a tokenizer.
_OF_A_MODEL = re.compile(
    r"adapter_config\.json|(generation_)?config\.json|(added_tokens|special_tokens_map|tokenizer(_config)?)\.json|"
    r"merges\.txt|vocab\.(json|txt)|(spiece|tokenizer)\.model|chat_template\.(jinja|json)|"
    r"additional_chat_templates/[^/]+\.jinja|(adapter_model|model|pytorch_model)(-\d+-of-\d+)?\.(bin|safetensors)"
    r"(\.index\.json)?"
)
WAIT_LIMIT_S = 900.0  # the longest that a finished run waits for its uploads
SCAN_INTERVAL_S = 1.0  # between two scans of the run's directory, which may take longer than a step
RETRY_PAUSE_S = 60.0  # between a failure and the next attempt
MAX_FAILURES = 6  # while `wait` runs: with RETRY_PAUSE_S, longer than the Hub's five-minute rate limits


def branch_of(step: int) -> str:
    """The name of a checkpoint's branch."""
    return f"step-{step:06d}"


@dataclass
class Uploads:
    """Uploads a run's checkpoints in a thread, one attempt at a time; a failed upload raises nothing.

    Only the end of the run waits for the thread, for a limited time: requests may fail, or hang until they time out.
    Without a `repo`, as on all processes but the main one, `start` and `wait` do nothing.

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
        self.accepted: dict[str, bool] = {}  # by branch: True if it is on the Hub, False if it was refused
        self._thread = threading.Thread()
        self._failures = 0
        self._not_before = 0.0  # time.monotonic() of the next attempt
        if self.repo:
            disable_progress_bars()
            set_verbosity_error()  # no warning about a branch that is up to date
            limit_requests()

    def branches(self) -> dict[str, Path]:
        """{branch: checkpoint} for the checkpoints on the disk, oldest first."""
        steps = {step_of(path): path for path in checkpoints(self.run)}
        steps = {step: p for step, p in steps.items() if self.milestone_steps and step % self.milestone_steps == 0}
        final = {}
        if self.final and (self.final / "trainer_state.json").is_file():
            steps[state_of(self.final)["step"]] = self.final  # its directory may have any name
            final = {MAIN: self.final}
        return {branch_of(step): path for step, path in sorted(steps.items())} | final

    def sync(self, branches: dict[str, Path]) -> None:
        """Uploads the checkpoints of {branch: checkpoint}; huggingface_hub skips files that the Hub has. A checkpoint
        that does not match its manifest, or has a file from which no card can be written, is refused, with a warning.
        Raises UserError if the repository is public but must be private, and whatever huggingface_hub raises."""
        api = HfApi()
        open_repository(api, self.repo, self.private)
        for branch, checkpoint in branches.items():
            if not (problems := verify(checkpoint, to_resume=self.state)):
                try:
                    self._commit(api, branch, checkpoint)
                except UserError as error:  # of a file of this checkpoint's; the others go on
                    if is_transient(error):
                        raise
                    problems = [str(error)]
            if problems:
                logger.warning("upload     not uploading %s: %s: %s", branch, checkpoint, problems[0])
            self.accepted[branch] = not problems

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
        # Delete what is another step's, from an earlier push or from main, of which a new branch is a copy, or another
        # model's: from_pretrained would read an adapter or the special tokens of a model that this one replaces.
        written, names = {file.path_in_repo for file in files}, api.list_repo_files(self.repo, revision=branch)
        stale = sorted(name for name in {*names} - written if name in STATE or _OF_A_MODEL.fullmatch(name))
        if others := [name for name in stale if name not in STATE]:
            logger.warning("upload     deleting another model's %s from %s", ", ".join(others), branch)
        files += map(CommitOperationDelete, stale)
        api.create_commit(self.repo, files, commit_message=f"Step {step}", revision=branch)
        logger.info("upload     %s is at %s", branch, page(self.repo, branch))

    def start(self) -> None:
        """Starts uploading the checkpoints on the disk, unless an upload is running or has just failed. Call it after
        the metrics of the newest checkpoint's step are written, since the model card shows them."""
        if self._thread.is_alive() or time.monotonic() < self._not_before:
            return
        self._not_before = time.monotonic() + SCAN_INTERVAL_S
        try:
            branches = self._pending()
        except (OSError, UserError):  # the directory cannot be read for a moment, which must not end a training run
            return
        if branches:
            self._thread = threading.Thread(target=self._upload, args=(branches,), name="upload", daemon=True)
            self._thread.start()

    def wait(self, limit: float = WAIT_LIMIT_S, stop_requested: Callable[[], bool] = lambda: False) -> ExitCode:
        """Uploads everything that is missing, for at most `limit` seconds or MAX_FAILURES failures, or until
        `stop_requested()`. Returns DONE if everything is on the Hub, USER_ERROR if a checkpoint is damaged or refused,
        else RUN_AGAIN."""
        deadline = time.monotonic() + limit
        self._failures, self._not_before = 0, 0.0
        try:
            if names := self._missing():
                logger.info("upload     waiting for %s (Ctrl-C stops waiting)", some(names))
            while self._thread.is_alive() or (self._pending() and self._failures < MAX_FAILURES):
                if time.monotonic() >= deadline or stop_requested():
                    break
                self.start()
                time.sleep(0.05)
            if not (names := self._missing()):
                return ExitCode.DONE
        except (OSError, UserError) as error:
            logger.warning("upload     not finished: %s; the same command, without --fresh, uploads the rest", error)
            return ExitCode.RUN_AGAIN
        cause = "with what was refused above put right, " if False in self.accepted.values() else ""
        way_out = f"; {cause}the same command, without --fresh, uploads the rest"
        logger.warning("upload     not on the Hub: %s%s", some(names), way_out)
        return ExitCode.USER_ERROR if False in self.accepted.values() else ExitCode.RUN_AGAIN

    def _pending(self) -> dict[str, Path]:
        """{branch: checkpoint} of those on the disk that are neither on the Hub nor refused."""
        branches = self.branches() if self.repo else {}
        return {branch: path for branch, path in branches.items() if branch not in self.accepted}

    def _missing(self) -> list[str]:
        return [*self._pending(), *(branch for branch, accepted in self.accepted.items() if not accepted)]

    def _upload(self, branches: dict[str, Path]) -> None:
        try:
            self.sync(branches)
        except Exception as error:
            refused = is_permanent(error)
            if refused:
                self.accepted = dict.fromkeys(branches, False) | self.accepted
            self._failures += 1
            self._not_before = time.monotonic() + RETRY_PAUSE_S
            suffix = "" if refused else "; trying again later"
            logger.warning("upload     to %s failed: %s%s", self.repo, reason(error), suffix)


def open_uploads(config: Config, processes: Processes) -> Uploads:
    """The uploads of a training run; they do nothing without push_to_hub. A collective call. Raises UserError, on all
    processes, if the token may not write to hub_model_id; if the Hub is unreachable, the run tries again later."""
    run, run_dir = config.run, Path(config.run.output_dir)
    if not run.push_to_hub:
        return Uploads(run_dir)
    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    with processes.shared_error("hub_model_id cannot be used"):
        if processes.is_main and offline:
            logger.warning("upload     HF_HUB_OFFLINE is set, so this run uploads nothing; `make push` can do so later")
        elif processes.is_main:
            check_access(run.hub_model_id, run.hub_private_repo, run.hub_license, "hub_model_id")
            which = f"one every {run.milestone_steps:,} steps and the last" if run.milestone_steps else "the last"
            logger.info("upload     checkpoints to %s: %s", page(run.hub_model_id), which)
    if offline or not processes.is_main:
        return Uploads(run_dir)
    final = checkpoint_path(run_dir, config.optimizer.max_steps)
    state = run.push_to_hub == "state"
    return Uploads(run_dir, run.hub_model_id, run.hub_private_repo, run.milestone_steps, final, state=state)
