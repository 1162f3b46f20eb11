"""The logger `recipe`, through which commands print: its lines appear above a progress bar, and do not break it.

INFO and WARNING go to standard output; the error that ends a program goes to standard error (engine/launch.py).
"""

import io
import logging
import os
import select
import signal
import sys

from tqdm import tqdm

from recipe.utils.redaction import redact


class _ProgressBarHandler(logging.Handler):
    """Prints each record, with secrets hidden, to the current sys.stdout. A full disk or a closed pipe must not end the
    run."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stdout is None:  # closed before the program began
            return
        try:
            tqdm.write(redact(self.format(record)), file=sys.stdout)
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        except (OSError, ValueError):
            pass  # the stream buffers what it could not write until the next line


def print_error(text: str) -> None:
    """Prints to standard error. If that is a full disk or a closed pipe, neither the print nor the flush at the end of
    the program may replace the program's exit code by another."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def end_if_unread(error: BaseException) -> None:
    """Ends this process silently, as `cat` ends, if `error` says that the reader of its output (`| head`) is gone."""
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    is_unread = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))  # Linux, macOS
    if isinstance(error, BrokenPipeError) and is_unread:  # else it was another pipe
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)


def escape_output() -> None:
    """From now on standard output has escapes such as \\u4eca for characters that its encoding lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # not in a notebook
        sys.stdout.reconfigure(errors="backslashreplace")


def set_up_logging(*, main: bool = True) -> None:
    """Lets the logger `recipe` print, on the `main` process only. Call it once in each process."""
    escape_output()
    logger = logging.getLogger("recipe")
    logger.handlers = [_ProgressBarHandler() if main else logging.NullHandler()]
    logger.setLevel(logging.INFO)
    logger.propagate = False
