"""Messages of a command: the logger `recipe`, whose lines appear above a progress bar instead of within it.

INFO and WARNING go to standard output; the error that ends the program goes to standard error (engine/launch.py).
"""

import logging
import os
import sys

from tqdm import tqdm

from recipe.utils.redaction import redact


class _AboveTheBar(logging.Handler):
    """Prints each record, without secrets, to whatever sys.stdout is now. A full disk under the log, or a reader that
    has gone, must not end a run."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(redact(self.format(record)), file=sys.stdout)
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        except (OSError, ValueError):
            pass  # the stream keeps what it could not write for the next line


def set_up_logging(*, main: bool = True) -> None:
    """Prints the messages of the logger `recipe`: all of them where `main`, else none. Call it once a process."""
    logger = logging.getLogger("recipe")
    logger.handlers = [_AboveTheBar() if main else logging.NullHandler()]
    logger.setLevel(logging.INFO)
    logger.propagate = False
