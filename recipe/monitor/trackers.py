"""Logs to TensorBoard, wandb or trackio besides metrics.jsonl, through Accelerate's trackers.

A resumed run continues the same run at the tracker, whose id is in the checkpoint. Steps that a killed run logged after
its last checkpoint are logged again, with the same values.
"""

import json
import logging
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from recipe.config import Config
from recipe.utils.errors import UserError, first_line
from recipe.utils.redaction import redact, redacted

logger = logging.getLogger(__name__)

PROJECT = "gpt2-recipe"


def check_tracker(name: str) -> None:
    """Raises UserError for a tracker that is not installed."""
    if name != "none" and not find_spec(name):
        raise UserError(f"report_to is {name}, which is not installed: pip install -e '.[trackers]'")


def metric_names(record: dict) -> dict[str, float | str]:
    """The measured values and the sample of a metrics.jsonl record, under names that trackers group: val/... for
    evaluations, train/... for everything else, as in transformers' Trainer."""
    prefixes = ("val_loss", "hellaswag", "sample")  # of evaluations
    return {
        f"val/{column.removeprefix('val_')}" if column.startswith(prefixes) else f"train/{column}": value
        for column, value in record.items()
        if column != "step" and isinstance(value, (int, float, str))
    }


class Tracker:
    """The run at the tracker named by `report_to`, from `step` on; `run_id` is its id there. Does nothing if report_to
    is none, and before `start`. If the tracker raises, that is logged once and it is not called again."""

    def __init__(self, config: Config, step: int):
        self.run_id = secrets.token_hex(4)
        self._config, self._step, self._name = config, step, config.run.report_to
        self._tracker: GeneralTracker | None = None

    def start(self) -> None:
        """Opens the run at the tracker; on the main process."""
        if self._name == "none":
            return
        run, step, settings = self._config.run, self._step, redacted(self._config.flat())
        with self._disabled_on_error():
            if self._name == "tensorboard":
                tracker = self._started("tensorboard", run.output_dir, purge_step=step)
                # Accelerate's store_init_configuration would create a separate unnamed run without metrics.
                text = json.dumps(settings, indent=4)  # Markdown shows indented text verbatim
                tracker.log({"configuration": text.strip("{}")}, step=step)
                location = f"tensorboard --logdir {run.output_dir}"
            elif self._name == "wandb":
                tracker, location = self._wandb(run.run_name, run.output_dir)
                tracker.store_init_configuration(settings)
            else:
                name = f"{run.run_name}-{self.run_id}"  # trackio identifies a run by its name
                tracker = self._started(PROJECT, name=name, resume="allow", embed=False)
                tracker.store_init_configuration(settings)
                location = f"trackio show --project {PROJECT}, run {name}"
            self._tracker = tracker
            logger.info("tracker    %s", location)

    def state_dict(self) -> dict:
        """The state for the checkpoint."""
        return {"run_id": self.run_id}

    def load_state_dict(self, state: dict) -> None:
        """Restores what `state_dict` returned."""
        self.run_id = state["run_id"]

    def log(self, record: dict) -> None:
        """Logs a record of metrics.jsonl."""
        if self._tracker is not None:
            with self._disabled_on_error():
                self._tracker.log(metric_names(record), step=record["step"])

    def close(self, *, failed: bool = False) -> None:
        """Ends the run at the tracker; wandb shows whether it has failed."""
        if self._tracker is not None:
            with self._disabled_on_error():
                if failed and self._name == "wandb":
                    import wandb

                    wandb.finish(exit_code=1)
                self._tracker.finish()  # without effect on a finished run

    @contextmanager
    def _disabled_on_error(self) -> Generator[None, None, None]:
        try:
            yield
        except Exception as error:
            self._tracker = None
            reason = redact(first_line(error))
            logger.warning("WARNING    %s: %s; the run goes on without it; metrics.jsonl has all", self._name, reason)

    def _started(self, *arguments, **options) -> GeneralTracker:
        tracker = LOGGER_TYPE_TO_CLASS[self._name](*arguments, **options)
        tracker.start()
        return tracker

    def _wandb(self, name: str, run_dir: str) -> tuple[GeneralTracker, str]:
        """Wandb's tracker, and where to view the run."""
        import wandb

        # By default wandb records the command line, the home directory and the git repository's URL, each of which can
        # contain a password. It would also capture standard output, including the progress bar.
        private = {"x_disable_meta": True, "disable_git": True, "disable_code": True}
        quiet = {"silent": True, "console": "off"}
        # In seconds: to reach the server at the start, and to finish uploads at the end.
        timeouts = {"init_timeout": 30, "finish_timeout": 60}
        # Without a key, wandb.init would ask for one on a terminal; elsewhere it would raise and record nothing.
        offline = "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False)
        self.run_id = os.environ.get("WANDB_RUN_ID", self.run_id)  # such as that of `wandb agent`
        tracker = self._started(
            os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", name),
            id=self.run_id,
            dir=os.environ.get("WANDB_DIR", run_dir),
            resume="allow",
            settings=private | quiet | timeouts,
            **({"mode": "offline"} if offline else {}),
        )
        run = wandb.run
        assert run
        # All sessions at once, which wandb uploads in order: a step below those it has is dropped.
        upload_command = f"wandb sync {Path(run.dir).parents[1]}/offline-run-*{self.run_id}*"
        if run.offline:
            return tracker, f"wandb is offline; to upload: {upload_command}"
        return tracker, f"wandb {run.url or 'is disabled by WANDB_MODE'}"
