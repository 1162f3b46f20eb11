"""How a program ends: the exit codes, and the error that is a user's to mend."""

from enum import IntEnum


class UserError(ValueError):
    """A mistake the user can mend. The message names the field or file, the bad value and the way out."""


class ExitCode(IntEnum):
    """Exit codes of every command; those above 2 are sysexits.h's, and 130 is a shell's for Ctrl-C. `recipe.checkpoint`
    also returns 1: a checkpoint is damaged."""

    DONE = 0
    USER_ERROR = 2
    NOT_SAVED = 74  # EX_IOERR: the last checkpoint could not be written
    RUN_AGAIN = 75  # EX_TEMPFAIL: stopped by a signal or a lost process; the same command continues
    LEFT_AT_ONCE = 130  # a second Ctrl-C
