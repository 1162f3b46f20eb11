"""Builds shim.c, which changes the system calls of programs that preload it."""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")


@functools.cache
def built() -> str:
    """The library's path for LD_PRELOAD; empty without a compiler, without Linux, or with a space in it, which splits
    that variable."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or not compiler or " " in str(SOURCE):
        return ""
    name = f"shim-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    library = SOURCE.parents[2] / ".pytest_cache" / name
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        temporary = library.with_name(f"{name}.{os.getpid()}")
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", temporary, SOURCE, "-ldl", "-lpthread"], check=True)
        temporary.replace(library)
    return str(library)
