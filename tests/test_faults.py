"""A sample of each group of tests/faults (`make test-faults` runs them all), and that the seam is where it says."""

import re

import pytest

from recipe import faults
from tests.conftest import ROOT
from tests.faults.groups import GROUPS
from tests.faults.runner import Lab, Lost

SOURCES = sorted((ROOT / "recipe").rglob("*.py"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    lab = Lab((base.parent if base.name.startswith("popen-") else base) / "faults")  # one for all workers
    yield lab
    lab.close()


# The others are tests of their own: tests/test_push.py, tests/test_secrets.py, tests/test_bad_inputs.py.
@pytest.mark.parametrize("group", [group for group in GROUPS if group not in ("hub", "secrets", "bad inputs")])
def test_a_sample_of_the_table_is_survived(lab, tmp_path, group):
    cases = [case for case in GROUPS[group]() if case.quick]
    assert cases
    for i, case in enumerate(cases):
        directory = tmp_path / str(i)
        directory.mkdir()
        try:
            case.check(lab, directory)
        except Lost as lost:
            pytest.fail(f"{case.name}: {lost}")


def test_a_forked_run_is_a_launched_run_to_the_bit(lab):
    lab.compare_with_launchers("one")  # `make test-faults` compares every engine


def test_a_fault_that_does_not_happen_is_a_loss(lab, tmp_path):
    from tests.faults.groups import killed

    with pytest.raises(Lost, match="not injected"):
        killed(lab, tmp_path, "one", "step.begin", 99, 0)


def test_the_points_are_those_that_the_code_comes_by():
    """Of a file of a checkpoint the name is put in when it is written."""
    found = set()
    for path in SOURCES:
        for point in re.findall(r'faults\.(?:at|of)\(\s*f?"([^"]+)"', path.read_text()):
            found |= {point.replace(part, name) for name in faults._FILES for part in re.findall(r"{.*?}", point)} or {
                point
            }
    by_itself = {"step.gradient"}  # which faults.in_gradients asks for
    assert found | by_itself == set(faults.POINTS)


def test_one_file_reads_the_variable_and_nobody_goes_around_it():
    readers = [path for path in SOURCES if "RECIPE_FAULT" in path.read_text()]
    assert readers == [ROOT / "recipe" / "faults.py"]
    for path in SOURCES:
        assert "from recipe.faults import" not in path.read_text(), path  # a fork reads the variable anew


@pytest.mark.parametrize("text", ["kill", "kill@nowhere", "burn@step.begin", "kill@step.begin:x", "kill@step.begin/a"])
def test_a_fault_that_is_misspelt_is_refused(text):
    with pytest.raises(ValueError, match="is not ACTION@POINT"):
        faults._parse(text, "0")
