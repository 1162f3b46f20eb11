"""Every link to a file or heading and every file named in the documentation exists. `make lint` runs this too."""

import re

import pytest

from tests.conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    titles = re.findall("^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_named_exist(page):
    text = page.read_text()
    for target, heading in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if not re.match(r"\w+:", target):
            linked = page.parent / target if target else page
            assert linked.exists(), target
            assert not heading or heading in anchors(linked.read_text()), f"{target}#{heading}"
    for path in re.findall(r"`((?:recipe|eval|accelerate_configs|ds_configs|tests)/[\w./-]+)`", text):
        assert (ROOT / path).exists() or page.name == "CHANGELOG.md", path  # it names deleted files


def test_the_readme_links_every_page():
    readme = PAGES[0].read_text()
    assert [page.name for page in PAGES if page.parent == ROOT / "docs" and f"(docs/{page.name})" not in readme] == []
