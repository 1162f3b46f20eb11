"""TensorBoard, wandb and trackio beside metrics.jsonl, through Accelerate's trackers, and never in the way of the run.

A thread of the main process talks to the tracker: one that is slow, broken or gone costs a warning, never a step.
A resumed run goes on in the run that it had there, whose id is in the run's directory.
"""

import json
import netrc
import os
import queue
import secrets
import shlex
import sqlite3
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from accelerate.tracking import GeneralTracker

from recipe.config import Config
from recipe.errors import UserError
from recipe.redaction import redact, redacted

TRACKERS = ("tensorboard", "wandb", "trackio")
PROJECT = "gpt2-recipe"
RUN_FILE = ".tracker.json"  # in the run's directory
_START = 10.0  # seconds that the first step waits for the tracker
_END = 30.0  # seconds that the run's end waits for it
_WANDB_INIT = 60.0  # seconds that wandb's server may take to answer
_WANDB_END = 20.0  # seconds after which wandb gives up uploading; what it has on the disk stays
_WAITING = 10_000  # records that wait for a tracker that does not take them
_GROUPS = {
    "val_loss": "val/loss",
    "tokens": "tokens",
    "tokens_per_second": "speed/tokens_per_second",
    "mfu": "speed/mfu",
    "data_wait": "speed/data_wait",
    "save_wait": "speed/save_wait",
    "seconds": "speed/seconds",
    "peak_memory_bytes": "device/peak_memory_bytes",
    "compilations": "device/compilations",
}


def check_tracker(name: str) -> None:
    """Raises UserError for a tracker that is not known or not installed; Accelerate would drop it without a word."""
    if name and name not in TRACKERS:
        raise UserError(f"tracker {name!r} is not known; choose from {', '.join(TRACKERS)}")
    if name and not find_spec(name):
        raise UserError(f"tracker {name} is not installed: pip install -e '.[trackers]'")


def metric_names(record: dict) -> dict[str, float]:
    """What was measured, of a line of metrics.jsonl, under the names that trackers group by: train/loss, val/loss."""
    return {
        _GROUPS.get(column) or f"{'val' if column.startswith('hellaswag') else 'train'}/{column}": value
        for column, value in record.items()
        if isinstance(value, (int, float)) and column != "step"
    }


def tracker_run(run_dir: Path, *, resumed: bool) -> dict:
    """This run's run at the tracker, which is kept in `run_dir`: its id, where the run is, and the last step logged if
    the process that logged it came to its end. A new one for a run that begins, and for a copy of a directory that
    still is where it was: the two would write into one."""
    path, here = run_dir / RUN_FILE, redact(str(run_dir.resolve()))
    known = _read_run(path)
    moved = bool(known) and known["directory"] != here
    copied = moved and _read_run(Path(os.path.expanduser(known["directory"])) / RUN_FILE).get("id") == known["id"]
    if not known or not resumed or copied:
        known = {"id": secrets.token_hex(4)}
    write_tracker_run(run_dir, known | {"directory": here, "step": None})  # a kill from now on leaves it unknown
    return known


def write_tracker_run(run_dir: Path, run: dict) -> None:
    temporary = run_dir / f"{RUN_FILE}.tmp"
    with suppress(OSError):  # a full disk: the next process begins another run there
        temporary.write_text(json.dumps(run))
        temporary.replace(run_dir / RUN_FILE)


def _read_run(path: Path) -> dict:
    try:
        known = json.loads(path.read_text())
        return known if all(isinstance(known[key], str) for key in ("id", "directory")) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def has_wandb_key(settings) -> bool:
    """Whether wandb would find credentials, going by its settings (which read the environment and its own files) and
    by the netrc file, where `wandb login` stores a key under the name of the server."""
    if settings.api_key or settings.identity_token_file:
        return True
    host = urlsplit(settings.base_url).netloc
    # wandb >= 0.31 names its server otherwise, and goes on to take keys that were stored under the former name.
    hosts = [host, "api.wandb.ai"] if host.endswith("forge.coreweave.com") else [host]
    names = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    path = next((p for p in (Path(name).expanduser() for name in names) if p.exists()), None)
    try:
        entries = netrc.netrc(path) if path else None
    except (OSError, netrc.NetrcParseError):
        return False
    return entries is not None and any((entries.authenticators(host) or ("", "", ""))[2] for host in hosts)


class Tracker:
    """The run's tracker, as a context; does nothing where none is wanted.

    `begin(project, **options)` starts Accelerate's tracker, and is False on all processes but the main one; `step` is
    that of the checkpoint the run goes on from, or 0.
    """

    def __init__(
        self, config: Config, step: int, begin: Callable[..., GeneralTracker] | bool, say: Callable[[str], None]
    ):
        self._name = config.run.tracker if begin else ""
        self._config, self._step, self._begin, self._say = config, step, begin, say
        self._run_dir, self._settings = Path(config.run.output_dir), redacted(config.flat())
        self._records: queue.Queue[dict | None] = queue.Queue(_WAITING)
        self._ready, self._failed, self._warned = threading.Event(), False, False
        # A daemon: nothing that hangs in it keeps the process.
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)

    def __enter__(self) -> "Tracker":
        if self._name:
            run = tracker_run(self._run_dir, resumed=self._step > 0)
            self._id, self._logged = run["id"], run.get("step")
            self._thread.start()
            if not self._ready.wait(_START):
                self._say(f"tracker    {self._name} is slow to start; the run goes on, and what it logs is kept for it")
        return self

    def log(self, record: dict) -> None:
        """Hands over a line of metrics.jsonl; returns at once."""
        if self._thread.is_alive():
            try:
                self._records.put_nowait(dict(record))
            except queue.Full:
                self._warn(f"it has not taken {_WAITING} records; what follows is in metrics.jsonl alone")

    def __exit__(self, kind, *_error) -> None:
        """Waits, not for ever, until the tracker has taken everything."""
        if not self._thread.ident:  # was never begun
            return
        self._failed = kind is not None
        with suppress(queue.Full):
            self._records.put_nowait(None)
        self._thread.join(_END)
        if self._thread.is_alive():
            self._warned = True  # there is no more to say
            self._say(f"WARNING    tracker {self._name}: no end of it after {_END:.0f} s; left as it is")
            # wandb's hook would have the process's end wait; this takes it away.
            if self._name == "wandb" and (wandb := sys.modules.get("wandb")):
                threading.Thread(target=wandb.teardown, daemon=True).start()
                self._thread.join(1.0)

    def _warn(self, error: object) -> None:
        if not self._warned:
            self._warned = True
            lines = str(error).strip().splitlines() or [repr(error)]
            self._say(
                f"WARNING    tracker {self._name}: {redact(lines[0])}; the run goes on, and metrics.jsonl has all"
            )

    # In the thread

    def _work(self) -> None:
        try:
            with self._heard():
                tracker = getattr(self, f"_begin_{self._name}")()
                self._ready.set()
                while (record := self._records.get()) is not None:
                    self._write(tracker, record)
                    self._records.task_done()
                if self._name == "wandb":
                    tracker.tracker.finish(exit_code=int(self._failed))
                else:
                    tracker.finish()
                here = redact(str(self._run_dir.resolve()))
                write_tracker_run(self._run_dir, {"id": self._id, "directory": here, "step": self._logged})
        except Exception as error:
            self._warn(error)
        finally:
            self._ready.set()
            if self._name == "wandb" and (wandb := sys.modules.get("wandb")):
                with suppress(Exception):
                    wandb.teardown()  # here: at the process's end it may raise, or wait

    def _write(self, tracker: GeneralTracker, record: dict) -> None:
        values, step = metric_names(record), record["step"]
        try:
            if self._name != "wandb":
                tracker.log(values, step=step)
            elif step != self._logged:  # that of a run that was stopped comes again when it goes on
                tracker.log({"step": step} | values)  # wandb's own steps cannot go back, as a killed run's do
            self._logged = step
        except Exception as error:
            self._warn(error)
            if self._name == "tensorboard":  # whose writer has ended: the next record makes another
                tracker.tracker.file_writer = tracker.tracker.all_writers = None

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """Context in which the libraries' own complaints about what they could not write are ours."""
        warned, raised = warnings.showwarning, threading.excepthook

        def on_warning(message, category, filename, *rest) -> None:
            mine = self._name == "trackio" and "trackio" in Path(filename).parts
            self._warn(message) if mine else warned(message, category, filename, *rest)

        def on_exception(args) -> None:
            mine = type(args.thread).__module__.startswith("tensorboard.")
            self._warn(args.exc_value) if mine else raised(args)

        warnings.showwarning, threading.excepthook = on_warning, on_exception
        try:
            yield
        finally:
            warnings.showwarning, threading.excepthook = warned, raised

    def _begin_tensorboard(self) -> GeneralTracker:
        from torch.utils.tensorboard.summary import hparams

        # Points of this step and later ones that an earlier process has written are no longer shown.
        tracker = self._begin("tensorboard", purge_step=self._step)
        values = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in self._settings.items()}
        # Accelerate's way would write them as a run of their own, and one more whenever the run goes on.
        for summary in hparams(values, dict.fromkeys(("train/loss", "val/loss"))):
            tracker.tracker.file_writer.add_summary(summary)
        tracker.tracker.flush()
        self._say(f"tracker    tensorboard --logdir {shlex.quote(str(self._run_dir))}")
        return tracker

    def _begin_wandb(self) -> GeneralTracker:
        import wandb

        configured = wandb.setup(wandb.Settings(silent=True)).settings
        mode, reason = configured.mode, ""
        if mode not in ("offline", "dryrun", "disabled") and not has_wandb_key(configured):
            mode, reason = "offline", "no API key was found (wandb login keeps one)"
        try:
            tracker = self._start_wandb(wandb, mode)
        except Exception as error:
            if mode in ("offline", "dryrun", "disabled"):
                raise
            with suppress(Exception):
                wandb.teardown()  # its service holds the run that could not begin
            reason = redact(str(error).strip().partition("\n")[0])
            tracker = self._start_wandb(wandb, "offline")
        tracker.store_init_configuration(self._settings)
        run = tracker.tracker
        run.define_metric("*", step_metric="step")
        if run.disabled:
            self._say("tracker    wandb is disabled, by WANDB_MODE or its settings")
        elif run.offline:
            where = Path(run.settings.sync_dir).parent
            where = where.relative_to(Path.cwd()) if where.is_relative_to(Path.cwd()) else where
            command = f"wandb sync {shlex.quote(str(where))}/offline-run-*-{run.id}"  # one for each process of the run
            self._say(f"tracker    wandb, offline{': ' * bool(reason)}{reason}; to upload:\n  {command}")
        else:
            self._say(f"tracker    wandb {run.url}")
        return tracker

    def _start_wandb(self, wandb, mode: str) -> GeneralTracker:
        wanted = {
            "silent": True,  # what is to be said is said here
            "console": "off",
            "init_timeout": _WANDB_INIT,
            "finish_timeout": _WANDB_END,
            # wandb's own description of the run holds the command line, the home directory, the account's name and
            # the address of the git repository, which may hold a password. The device's utilization stays on.
            "x_disable_meta": True,
            "disable_git": True,
            "disable_code": True,
        }
        settings = wandb.Settings(**{k: v for k, v in wanted.items() if k in wandb.Settings.model_fields})
        names = {"name": os.environ.get("WANDB_NAME") or self._config.run.run_name}
        names |= {"id": os.environ.get("WANDB_RUN_ID") or self._id}
        place = {} if os.environ.get("WANDB_DIR") else {"dir": str(self._run_dir)}
        project = os.environ.get("WANDB_PROJECT") or PROJECT
        return self._begin(project, mode=mode, resume="allow", settings=settings, **names, **place)

    def _begin_trackio(self) -> GeneralTracker:
        for module in ("trackio", "trackio.run", "trackio.utils"):
            import_module(module).print = lambda *words, **options: None  # what is to be said is said here
        name = f"{self._config.run.run_name}-{self._id}"  # trackio finds the run to go on with by its name
        if self._step:
            self._forget_in_trackio(name)
        tracker = self._begin(
            PROJECT, name=name, config=dict(self._settings), resume="allow" if self._step else "never", embed=False
        )
        tracker.tracker.config["_Username"] = None  # the name of the account at Hugging Face
        if space := os.environ.get("TRACKIO_SPACE_ID"):
            self._say(f"tracker    trackio run {name}: https://huggingface.co/spaces/{space}")
        else:
            self._say(f"tracker    trackio run {name}: trackio show --project {PROJECT}")
        return tracker

    def _forget_in_trackio(self, name: str) -> None:
        """Deletes the rows that will be written again; on this disk alone, where trackio keeps them if not told
        otherwise."""
        path = import_module("trackio.sqlite_storage").SQLiteStorage.get_project_db_path(PROJECT)
        with suppress(sqlite3.Error):  # they will stand there twice
            if path.exists():
                with closing(sqlite3.connect(path, timeout=10)) as database, database:
                    database.execute("DELETE FROM metrics WHERE run_name = ? AND step >= ?", (name, self._step))
