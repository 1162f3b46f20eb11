"""TorchTPU's tests, run by `make test-tpu`; they skip without torch_tpu or a C compiler.

The device "tpu" computes real values on this CPU (site/sitecustomize.py), but its times mean nothing. Not tested are a
TPU's kernel for attention and the links between chips.
"""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import processes
from tests.conftest import EQUAL, ROOT, by_step, flags

HERE = Path(__file__).parent
# The environment that Accelerate sets for tpu.yaml.
LAUNCHED = {"CUDA_VISIBLE_DEVICES": "tpu", "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "false"}


def _missing() -> str:
    plugin = find_spec("lammps_jax_pjrt_cpu")
    if not (find_spec("torch_tpu") and plugin):
        return "needs torch_tpu and XLA's CPU plugin: make test-tpu"
    if not (compiler := shutil.which("cc")):
        return "needs a C compiler"
    library = ROOT / ".pytest_cache" / "tpu-shim.so"
    library.parent.mkdir(exist_ok=True)
    temporary = library.with_name(f"{library.name}.{os.getpid()}")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", temporary, HERE / "shim.c", "-ldl"], check=True)
    temporary.replace(library)
    os.environ |= {
        "TPU_LIBRARY_PATH": str(library),
        "CPU_PLUGIN": str(Path(plugin.origin).with_name("pjrt_c_api_cpu_plugin.so")),
        "TPU_CHIPS": "1",
        # XLA's CPU plugin cannot run every program that another process compiled ("Function ... not found").
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "PYTHONWARNINGS": "ignore",  # tcmalloc is not loaded
    }
    from tests.tpu.site import sitecustomize  # noqa: F401  (gives this process a chip)

    return ""


MISSING = _missing()


def pytest_collection_modifyitems(items):
    for item in items:
        if MISSING and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=MISSING))


def environment(chips: int) -> dict:
    """The environment of a subprocess on a machine with that many chips."""
    env = processes.environment({"ACCELERATE_USE_CPU": "false", "TPU_CHIPS": str(chips) if chips else ""})
    env.pop("CUDA_VISIBLE_DEVICES", None)
    path = {"PYTHONPATH": f"{HERE / 'site'}:{ROOT}", "PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}
    return env | path


def launch(line: str, *arguments, chips: int, **options) -> subprocess.Popen:
    """Starts a command line on such a machine."""
    pipe, words = subprocess.PIPE, [*line.split(), *map(str, arguments)]
    return subprocess.Popen(words, cwd=ROOT, env=environment(chips), stdout=pipe, stderr=pipe, text=True, **options)


def train(shards, run: Path, device: str = "tpu", **fields) -> dict:
    """Trains with EQUAL's settings in this process, on one chip or on "cpu"; returns the metrics by step."""
    from accelerate.state import AcceleratorState

    from recipe import train

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (LAUNCHED if device == "tpu" else {"ACCELERATE_USE_CPU": "true"}).items():
            patch.setenv(name, value)
        assert train.main(settings(shards, run, **fields)) == 0
    AcceleratorState._reset_state(reset_partial_state=True)  # the next run may be on another device
    return by_step(run)


def settings(shards, run: Path, **fields) -> list[str]:
    return flags(**(EQUAL | {"dataset_name": shards, "output_dir": run} | fields))


def assert_same(lines: dict, expected: dict, within: float = 1e-5) -> None:
    """The losses and the validation losses of all steps."""
    for name in ("loss", "val_loss"):
        values = {step: line[name] for step, line in expected.items() if line[name] is not None}
        assert values
        assert {step: lines[step][name] for step in values} == pytest.approx(values, abs=within)


@pytest.fixture(scope="session")
def on_cpu(shards, once):
    """optimizer -> the metrics, by step, of the run on the CPU."""

    def get(optim: str) -> dict:
        run, _ = once(f"on-cpu-{optim}", lambda run: train(shards, run, "cpu", optim=optim) and None)
        return by_step(run)

    return get
