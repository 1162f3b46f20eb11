"""Pushing checkpoints to the Hugging Face Hub while the run goes on, such that the run never suffers from it.

The trainer puts a checkpoint into the queue of outbox.py, which takes milliseconds, and a process of its own uploads.
Whatever goes wrong there is a line of the log, and the checkpoint stays queued: `python -m recipe.hub.export push RUN`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import huggingface_hub.constants
from huggingface_hub import HfApi

from recipe.checkpoint.format import model_only, step_of
from recipe.config import ROOT
from recipe.errors import UserError
from recipe.hub import outbox, upload
from recipe.hub.package import evaluated, package, renew_card

PATIENCE = 300  # seconds without anything new on the Hub after which nobody waits for it any more
_SILENCE = 3600  # the same where it does not fail either: a large file
_CHECK_TIMEOUT, _CHECK_PATIENCE = 10, 15  # seconds, before step 0
_RESTARTS = 3  # of a process that died without having uploaded anything in between
_BETWEEN_LINES = 60.0  # seconds, of those that say the same
_FAREWELL = 5  # seconds in which the process may end by itself
_TAIL = 2_000_000  # bytes of metrics.jsonl of which a card is written while the run waits: some 20 ms

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write (huggingface.co/settings/tokens)"

Say = Callable[[str], None]


def push_command(run: Path) -> str:
    return f"python -m recipe.hub.export push {shlex.quote(str(run))}"


# Before the first step


def check_push(repo_id: str, private: bool, say: Say, field: str = "push_to_hub") -> None:
    """Makes the repository, if it is not there. Raises UserError where the token will not be let in; a Hub that cannot
    be reached is no error: the uploads wait for it."""
    subject = f"{field} {repo_id}"
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        say(f"push       HF_HUB_OFFLINE is set: checkpoints for {repo_id} are queued, and not uploaded by this run")
        return
    start, failures = time.monotonic(), 0
    with upload.hub_client(_CHECK_TIMEOUT):
        while True:
            try:
                if not huggingface_hub.get_token():
                    raise UserError(f"{subject}: no token of the Hub is here; {_LOG_IN}")
                api = HfApi()
                _check_rights(api.whoami(), repo_id)
                upload.open_repo(api, repo_id, private)
                say(f"push       to {upload.page(repo_id)}, each checkpoint while the run goes on")
                return
            except UserError:
                raise
            except upload.Refused as error:
                raise UserError(f"{subject}: {upload.clean(str(error))}") from None
            except Exception as error:
                kind, reason, after = upload.judge(error)
            if kind == "permanent":
                raise UserError(f"{subject}: the Hub says {reason}; {_LOG_IN}")
            failures += 1
            wait = max(after, 2 ** (failures - 1))
            if time.monotonic() - start + wait > _CHECK_PATIENCE:
                say(
                    f"push       the Hub cannot be reached ({reason}): checkpoints are queued, and tried again, at "
                    "least every minute, while the run goes on"
                )
                return
            time.sleep(wait)


def _check_rights(me: dict, repo_id: str) -> None:
    """Raises Refused where the account or its token, as whoami describes them, may not write to `repo_id`."""
    namespace = repo_id.split("/")[0]
    roles = {org["name"].lower(): org.get("roleInOrg") for org in me.get("orgs", [])}
    if namespace.lower() not in (me["name"].lower(), *roles):
        names = ", ".join([me["name"], *(org["name"] for org in me.get("orgs", []))])
        raise upload.Refused(
            f"the token is {me['name']}'s, who is no member of {namespace}; name a repository of {names}"
        )
    if roles.get(namespace.lower()) in ("read", "no_access"):
        raise upload.Refused(
            f"{me['name']} may only read in {namespace}; ask there for the role write, or name "
            f"{me['name']}/{repo_id.split('/')[1]}"
        )
    token = me.get("auth", {}).get("accessToken", {})
    fine = token.get("fineGrained", {}).get("scoped")
    allowed = {
        scope["entity"].get("name", "").lower() for scope in fine or [] if "repo.write" in scope.get("permissions", [])
    }
    if token.get("role") == "read" or (fine is not None and not allowed & {namespace.lower(), repo_id.lower()}):
        raise upload.Refused(f"the token may not write there; {_LOG_IN}")


# While the run goes on


class Uploads:
    """The uploads of a run; main process only. Nothing of it raises, nothing of it waits but `close`."""

    def __init__(self, run: Path, repo: str, private: bool, say: Say, *, milestone_steps: int, last_step: int):
        """Checkpoints at multiples of `milestone_steps` (0: none) and at `last_step` go up; the latter to main too."""
        self.run, self.repo, self.private, self._say = run, repo, private, say
        self._milestone_every, self._last_step = milestone_steps, last_step
        self._process: subprocess.Popen | None = None
        self._closed = False
        self._unread, self._deaths = b"", 0
        self._moved: set[tuple] = set()
        self._moved_at, self._failing_since = time.monotonic(), None
        self._said: dict[str, tuple[str, float]] = {}  # of each checkpoint, why it failed, and when that was said
        self._troubles: dict[str, float] = {}  # lines, and when they were said
        self._lock, self._held, self._everything = threading.Lock(), True, False  # held perhaps, from before
        self._guard(self._begin)

    def add(self, checkpoint: Path, again: bool = True) -> None:
        """Queues a committed checkpoint, if it is to go up; `again` false: if it was not queued before."""
        self._guard(self._add, checkpoint, again)

    def report(self) -> None:
        """Lets go of what has been evaluated, says what is new, and starts the process again if it died; call it now
        and then, and after each line of metrics.jsonl."""
        self._guard(self._release)
        self._guard(self._hear)
        self._guard(self._keep_alive)

    def close(self, wait: bool, stop: Callable[[], bool] = lambda: False) -> None:
        """Ends the uploads; with `wait`, once all is up, or has failed for some minutes, or `stop()` says so. Once."""
        if self._closed:
            return
        self._closed = True
        self._everything = wait  # or else the same command goes on, and evaluates what it has not
        self._guard(self._release)
        try:
            if wait and self._waiting():
                self._say(f"upload     waiting for {self._waiting()} of {self.repo}; Ctrl-C leaves it queued")
                self._moved_at = time.monotonic()  # from now on somebody waits
                self._failing_since = self._failing_since and self._moved_at
                said = self._moved_at
                while self._waiting() and not stop() and self._process and not self._hopeless():
                    time.sleep(0.1)
                    self.report()
                    if time.monotonic() - said > _BETWEEN_LINES / 2:
                        said = time.monotonic()
                        self._say(f"upload     waiting for {self._waiting()}")
        finally:
            self._guard(self._end)

    def _guard(self, do: Callable, *arguments) -> None:
        try:
            do(*arguments)
        except Exception as error:
            self._trouble(f"upload     {upload.judge(error)[1]}; the training goes on")

    def _trouble(self, line: str) -> None:
        now = time.monotonic()  # the same at most once a minute, however often it is tried again
        if now - self._troubles.get(line, float("-inf")) >= _BETWEEN_LINES:
            self._troubles[line] = now
            self._say(line)

    def _begin(self) -> None:
        outbox.sweep(self.run)
        if left := self._left():
            self._say(f"upload     still queued from before: {left}")
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            self._start()

    def _start(self) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DEBUG": "0"}
        (self.run / outbox.QUEUE).mkdir(parents=True, exist_ok=True)
        with open(self.run / outbox.QUEUE / outbox.LOG, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "recipe.hub.upload", str(self.run)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | quiet | {"PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C reaches the whole terminal; the trainer decides what it means
            )
        os.set_blocking(self._process.stdout.fileno(), False)

    def _add(self, checkpoint: Path, again: bool) -> None:
        step = step_of(checkpoint)
        final = step == self._last_step
        wanted = final or (self._milestone_every > 0 and step % self._milestone_every == 0)
        if not wanted or not (again or outbox.is_new(self.run, self.repo, step)):
            return
        todo = [outbox.branch_of(step), *([outbox.MAIN] if final else [])]
        try:
            files, made = package(checkpoint, repo=self.repo, tail=_TAIL)
        except Exception as error:
            self._say(f"upload     {checkpoint.name} has no card: {upload.judge(error)[1]}")
            files, made = model_only(checkpoint), {}
        # It goes up once, with its evaluations, which come after it was saved.
        held = not evaluated(self.run, step)
        outbox.enqueue(self.run, files, made, step, self.repo, self.private, todo, held)
        with self._lock:
            self._held |= held

    def _release(self) -> None:
        with self._lock:
            if not self._held:
                return
            held = [entry for entry in outbox.entries(self.run) if entry.held]
            for entry in held.copy():
                try:
                    if not (self._everything or evaluated(self.run, entry.step)):
                        continue
                    if error := renew_card(self.run, entry, tail=_TAIL):
                        self._trouble(error)
                    dataclasses.replace(entry, held=False).write()
                    held.remove(entry)
                except Exception as error:  # of this one; the others are let go
                    self._trouble(f"upload     {entry.path.name} is held back: {upload.judge(error)[1]}")
            self._held = bool(held)

    def _hear(self) -> None:
        if self._process is None:
            return
        while True:
            try:
                if not (data := os.read(self._process.stdout.fileno(), 1 << 16)):
                    break
            except BlockingIOError:
                break
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, event: dict) -> None:
        now = time.monotonic()
        what = tuple(event.get(k) for k in ("name", "branch", "number", "url"))
        if event["event"] in ("file", "uploaded") and what not in self._moved:  # not the same again after a failure
            self._moved.add(what)
            self._moved_at, self._failing_since, self._deaths = now, None, 0
        if event["event"] == "failing":
            self._failing_since = self._failing_since or now
            reason, when = self._said.get(event["name"], ("", 0.0))
            if reason == event["reason"] and now - when < _BETWEEN_LINES:
                return
            self._said[event["name"]] = event["reason"], now
        if line := describe(event, self.run):
            self._say(line)

    def _keep_alive(self) -> None:
        if self._process is None or (code := self._process.poll()) is None:
            return
        cause = f"killed by signal {-code}" if code < 0 else self._last_words()
        self._close_pipes()
        self._process, self._unread = None, b""
        self._deaths += 1
        if self._deaths > _RESTARTS:
            self._say(
                f"upload     the process that uploads died {self._deaths} times ({cause}), and is not started again"
            )
            return
        self._say(f"upload     the process that uploads died ({cause}); started again")
        self._start()

    def _last_words(self) -> str:
        lines = (self.run / outbox.QUEUE / outbox.LOG).read_text(errors="replace").strip().splitlines()
        return upload.clean(lines[-1]) if lines else "without a word"

    def _hopeless(self) -> bool:
        now = time.monotonic()
        return now - self._moved_at > _SILENCE or (self._failing_since or now) < now - PATIENCE

    def _end(self) -> None:
        if self._process:
            self._hear()
            self._process.stdin.close()
            try:
                self._process.wait(timeout=_FAREWELL)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._hear()
            self._close_pipes()
            self._process = None
            with suppress(BlockingIOError), outbox.alone(self.run, 0):  # it was ended while it deleted what is up
                outbox.sweep(self.run)
        if left := self._left():
            self._say(f"upload     still queued: {left}; {push_command(self.run)} uploads what is left")

    def _close_pipes(self) -> None:
        with suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()

    def _waiting(self) -> str:
        return names([e for e in outbox.entries(self.run) if not (e.error or e.held)])  # nobody takes those

    def _left(self) -> str:
        return names(outbox.entries(self.run))


def names(left: list[outbox.Entry]) -> str:
    more = f" and {len(left) - 3} more" if len(left) > 3 else ""
    return ", ".join(e.path.name for e in left[:3]) + more


def describe(event: dict, run: Path) -> str:
    """The line that a user reads of an event of upload.py; empty for what is not worth one."""
    if event["event"] == "uploaded":
        return f"upload     {event['name']} is at {event['url']}"
    if event["event"] == "card":
        return f"upload     {event['name']} goes up without its card, which the Hub refuses: {event['reason']}"
    if event["event"] == "failing":
        return f"upload     {event['name']}: {event['reason']}; trying again in {event['wait']:.0f} s"
    if event["event"] == "refused":
        reason = f"{event['reason']}; it stays queued, {push_command(run)} tries again"
        return f"upload     {event['name']} is refused: {reason}"
    return ""
