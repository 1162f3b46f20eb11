"""The arrows between the files: who may import whom, and where a backend may be named."""

import ast
import re

import pytest

from tests.conftest import ROOT

RECIPE = ROOT / "recipe"
FILES = sorted([*RECIPE.rglob("*.py"), *(ROOT / "eval").rglob("*.py")])

# What each module of recipe/ may import of recipe/; a key may be a package. `train` is imported by
# nothing but the measurements, which run it.
ALLOWED = {
    "catalog": set(),
    "redact": set(),
    "cli": {"redact"},
    "config": {"catalog", "cli"},
    "faults": set(),
    "loss": set(),
    "model": {"config", "loss"},
    "optim": {"config"},
    "metrics": {"cli", "faults"},
    "checkpoint": {"config", "faults"},
    "saver": {"checkpoint"},
    "lock": {"config"},
    "guard": {"config"},
    "stopping": set(),
    "feed": {"config", "data"},
    "data": {"cli", "config", "data", "faults", "redact"},
    "device": {"config"},
    "launch": {"config", "redact"},
    "attention": set(),
    "engine": {"attention", "config", "device", "feed", "launch", "optim", "stopping", "trackers", "xla", "zero"},
    "trackers": {"config", "redact"},
    "xla": {"config", "engine", "optim"},
    "zero": {"config", "device", "engine", "launch", "optim"},
    "plan": {"config", "data"},
    "about": {"config", "data", "device", "engine", "redact"},
    "live": {"config", "data", "engine", "faults", "loss", "model"},
    "panel": {"cli", "config", "data", "engine", "fit", "metrics", "plan", "redact"},
    "progress": {"cli", "plan"},
    "rundir": {"checkpoint", "config", "lock"},
    "scores": {"redact"},
    "card": {"catalog", "config", "metrics", "plan", "redact", "scores"},
    "package": {"card", "checkpoint", "data", "metrics", "outbox", "upload"},
    "outbox": {"data"},
    "upload": {"faults", "outbox", "redact"},
    "push": {"checkpoint", "config", "outbox", "package", "upload"},
    "start": {"cli", "config", "data", "engine", "checkpoint", "launch", "lock", "model", "push", "redact", "rundir"},
    "fit": {"checkpoint", "cli", "config", "data", "device", "engine", "plan", "start"},
    "export": {"card", "catalog", "config", "checkpoint", "metrics", "outbox", "package", "push", "redact", "upload"},
    "speed": {"attention", "config", "loss", "data", "device", "engine", "faults", "fit", "guard", "metrics", "model",
              "optim", "plan", "start", "train"},
    "bench": {"config", "device", "plan", "speed"},
    "notebooks": set(),
    "train": {"about", "cli", "config", "data", "engine", "faults", "fit", "guard", "launch", "checkpoint", "model",
              "live", "push", "redact", "saver", "start", "stopping", "optim", "metrics", "panel", "plan", "progress",
              "trackers"},
}  # fmt: skip


def imports(path) -> set[str]:
    """Dotted names imported anywhere in a file, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(path) -> str:
    return path.relative_to(RECIPE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", [p for p in FILES if RECIPE in p.parents and p != RECIPE / "__init__.py"], ids=str)
def test_recipe_imports_only_along_the_arrows(path):
    used = {name.split(".")[1] for name in imports(path) if name.startswith("recipe.")}
    assert used - {room(path)} <= ALLOWED[room(path)]


@pytest.mark.parametrize("path", [p for p in FILES if ROOT / "eval" in p.parents], ids=str)
def test_evaluation_knows_nothing_of_the_trainer(path):
    assert not {name for name in imports(path) if name.split(".")[0] == "recipe"}


def test_no_backend_is_named_outside_the_engine():
    """Branches on cuda, xla, mps or deepspeed belong into the engines and what they know of the device."""
    branch = re.compile(r"""["'](cuda|xla|mps|deepspeed)["']|torch\.(cuda|mps|xla)\b|deepspeed\.|torch_xla""")
    for path in RECIPE.rglob("*.py"):
        if path.name in ("engine.py", "device.py", "launch.py", "zero.py", "xla.py"):
            continue
        code = re.sub(r'""".*?"""|#.*', "", path.read_text(), flags=re.DOTALL)
        assert not branch.search(code), f"{path}: {branch.search(code).group()}"


def test_files_fit_in_a_head():
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 320, path
