"""TensorBoard, wandb and trackio beside metrics.jsonl, through Accelerate's trackers.

A tracker that raises an exception costs one warning, and is not called again: metrics.jsonl has everything. A resumed
run continues its run at the tracker, whose id the checkpoint holds. Steps that a killed run had logged after its last
checkpoint are logged again: TensorBoard hides the first ones, wandb drops the second ones, trackio shows both. Their
values are the same.
"""

import json
import logging
import os
import secrets
from importlib.util import find_spec
from pathlib import Path

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from recipe.config import Config
from recipe.utils.errors import UserError, first_line
from recipe.utils.redaction import redact, redacted

logger = logging.getLogger(__name__)

PROJECT = "gpt2-recipe"
_GROUPS = {
    "val_loss": "val/loss",
    "tokens": "tokens",
    "sample": "sample",
    "tokens_per_second": "speed/tokens_per_second",
    "mfu": "speed/mfu",
    "data_wait": "speed/data_wait",
    "save_wait": "speed/save_wait",
    "seconds": "speed/seconds",
    "peak_memory_bytes": "device/peak_memory_bytes",
    "compilations": "device/compilations",
}


def check_tracker(name: str) -> None:
    """Raises UserError for a tracker that is not installed."""
    if name != "none" and not find_spec(name):
        raise UserError(f"report_to is {name}, which is not installed: pip install -e '.[trackers]'")


def metric_names(record: dict) -> dict[str, float | str]:
    """The measured values of a line of metrics.jsonl, and its sample, under the names by which trackers group:
    train/loss, val/loss."""
    return {
        _grouped(column): value
        for column, value in record.items()
        if isinstance(value, (int, float, str)) and column != "step"
    }


def _grouped(column: str) -> str:
    whole, slash, data_set = column.partition("/")  # val_loss/NAME is a data set's
    group = _GROUPS.get(whole) or f"{'val' if whole.startswith('hellaswag') else 'train'}/{whole}"
    return group + slash + data_set


class Tracker:
    """The run at the tracker that `report_to` names; does nothing if that is none, or without `active`.

    A context manager, on the main process. `run_id` is that of the checkpoint from which the run resumes at `step`.

    Attributes:
        run_id: the run's id at the tracker, for the checkpoint.
    """

    def __init__(self, config: Config, step: int, run_id: str | None, *, active: bool):
        self.run_id = run_id or secrets.token_hex(4)
        self._name = config.run.report_to
        self._tracker: GeneralTracker | None = None
        if not active or self._name == "none":
            return
        settings = redacted(config.flat())
        try:
            place, options = getattr(self, f"_{self._name}")(config.run.run_name, Path(config.run.output_dir), step)
            self._tracker = LOGGER_TYPE_TO_CLASS[self._name](*place, **options)
            self._tracker.start()
            if self._name == "tensorboard":  # Accelerate's would be a nameless run of its own, without any metric
                text = json.dumps(settings, indent=4)  # which Markdown shows as it is, for it is indented
                self._tracker.log({"configuration": text.strip("{}")}, step=step)
            else:
                self._tracker.store_init_configuration(settings)
            logger.info("tracker    %s", self._where(config))
        except Exception as error:
            self._leave_alone(error)

    def state_dict(self) -> dict:
        """For the checkpoint."""
        return {"run_id": self.run_id}

    def log(self, record: dict) -> None:
        """Logs a line of metrics.jsonl."""
        if self._tracker is not None:
            try:
                self._tracker.log(metric_names(record), step=record["step"])
            except Exception as error:
                self._leave_alone(error)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *_error) -> None:
        if self._tracker is not None:
            try:
                self._tracker.finish()
            except Exception as error:
                self._leave_alone(error)

    def _leave_alone(self, error: Exception) -> None:
        self._tracker = None
        reason = redact(first_line(error))
        logger.warning("WARNING    %s: %s; the run continues without it, metrics.jsonl has all", self._name, reason)

    # The arguments of Accelerate's classes

    def _tensorboard(self, name: str, run_dir: Path, step: int) -> tuple[tuple, dict]:
        return ("tensorboard", run_dir), {"purge_step": step}

    def _wandb(self, name: str, run_dir: Path, step: int) -> tuple[tuple, dict]:
        # wandb's own record of the run holds the command line, the home directory and the address of the git
        # repository, each of which can hold a password. It would also take over standard output, and the bar with it.
        private = {"x_disable_meta": True, "disable_git": True, "disable_code": True}
        quiet = {"silent": True, "console": "off"}
        # Seconds: for the server at the start, and for what is not uploaded at the end.
        patience = {"init_timeout": 30, "finish_timeout": 60}
        import wandb

        # Without a key wandb.init would ask for one at a terminal, and elsewhere raise an exception and keep nothing.
        offline = "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False)
        return (os.environ.get("WANDB_PROJECT", PROJECT),), {
            "name": os.environ.get("WANDB_NAME", name),
            "id": os.environ.get("WANDB_RUN_ID", self.run_id),
            "dir": os.environ.get("WANDB_DIR", str(run_dir)),
            "resume": "allow",
            "settings": private | quiet | patience,
        } | ({"mode": "offline"} if offline else {})

    def _trackio(self, name: str, run_dir: Path, step: int) -> tuple[tuple, dict]:
        # trackio knows a run by its name.
        return (PROJECT,), {"name": f"{name}-{self.run_id}", "resume": "allow", "embed": False}

    def _where(self, config: Config) -> str:
        """Where to look at the run, for the terminal."""
        if self._name == "tensorboard":
            return f"tensorboard --logdir {config.run.output_dir}"
        if self._name == "trackio":
            return f"trackio show --project {PROJECT}, run {config.run.run_name}-{self.run_id}"
        run = self._tracker.tracker
        if run.offline:
            return f"wandb is offline; to upload: wandb sync {Path(run.dir).parent}"
        return f"wandb {run.url}"
