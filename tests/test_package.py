"""An installation without the clone has every file that the code reads."""

import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.conftest import ROOT, environment


def test_a_wheel_has_every_file_of_the_packages(tmp_path):
    paths = (path for package in ("recipe", "eval") for path in (ROOT / package).rglob("*") if path.is_file())
    paths = (path.relative_to(ROOT) for path in paths)
    names = {str(path) for path in paths if not any(part.startswith((".", "__pycache__")) for part in path.parts)}
    for name in ("pyproject.toml", "README.md", "LICENSE", *names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    missing = names - set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in missing if not name.startswith("recipe/notebooks/")} == set()


@pytest.mark.skipif(not shutil.which("uv"), reason="needs uv")
def test_uv_runs_in_the_environment_as_it_is(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=tmp_path, check=True)
    line = ("uv", "run", "--offline", "python", "-c", "import sys; print(sys.prefix)")
    result = subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == (f"{tmp_path}/.venv\n", "")
