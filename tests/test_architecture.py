"""The arrows between the files: who may import whom, and where a backend may be named."""

import ast
import re
import subprocess
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec

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


def is_module(name: str) -> bool:
    """Whether there is such a file; nothing is imported."""
    spec, parts = find_spec(name.split(".")[0]), name.split(".")
    for i in range(1, len(parts)):
        spec = spec and PathFinder.find_spec(".".join(parts[: i + 1]), spec.submodule_search_locations or [])
    return spec is not None


ABSENT = """
import importlib, operator, sys
package = importlib.import_module(sys.argv[1])
for name in sys.argv[2:]:
    try:
        operator.attrgetter(name.partition(".")[2])(package)
    except AttributeError:
        print(name)
"""


def test_what_is_used_of_a_package_is_imported():
    """After `import torch` alone torch.distributed.run.main is an AttributeError, unless something else has imported
    it, as most of a test run has: here each package is alone in a process."""
    used = {}  # modules that their file does not import by their names
    for path in FILES:
        tree = ast.parse(path.read_text())
        aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        bound = {a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in aliases}
        imported = {f"{name}." for name in imports(path)}
        for node in ast.walk(tree):
            first, *rest = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else [""]
            name = ".".join([bound.get(first, ""), *rest])
            if not re.fullmatch(r"\w+(\.\w+)+", name) or name.split(".")[0] in {*sys.stdlib_module_names, "recipe"}:
                continue
            if is_module(name) and not any(own.startswith(f"{name}.") for own in imported):
                used.setdefault(name.split(".")[0], set()).add(name)
    assert "torch.nn.functional" in used["torch"]
    processes = [
        subprocess.Popen([sys.executable, "-c", ABSENT, package, *names], stdout=subprocess.PIPE, text=True)
        for package, names in used.items()
    ]
    absent = [name for process in processes for name in process.communicate()[0].split()]
    assert [process.returncode for process in processes] == [0] * len(processes)
    assert absent == []


def test_files_fit_in_a_head():
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 320, path
