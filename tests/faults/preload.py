"""What a run imports, imported once, by the server from which the runs are forked.

Nothing of it may start a thread: a fork takes one thread along and leaves the others' locks as they are.
"""

import threading
from importlib.util import find_spec
from pathlib import Path

import eval.hellaswag
import eval.sample  # noqa: F401
import recipe.train
from recipe.data import tokenizer

tokenizer.encoding()
if find_spec("deepspeed"):
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - on the way to any optimizer of ZeRO

    import recipe.engine.deepspeed  # noqa: F401


def threads() -> int:
    """Of this process, Python's and others'."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()


assert threads() == 1, f"{threads()} threads before the first fork"
