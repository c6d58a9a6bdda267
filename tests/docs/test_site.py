"""The documentation site: built strictly from the repository's files, complete, and without a network."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.reader import ROOT

_LOADED = re.compile(
    r"<(?:script|img|iframe)\b[^>]*\bsrc=\"?(https?:|//)|<link\b(?![^>]*\brel=\"?canonical)[^>]*\bhref=\"?(https?:|//)"
)


def loads_from_elsewhere(html: str) -> bool:
    return _LOADED.search(html) is not None


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return folder


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert len(pages) > 60
    assert [page.name for page in pages if loads_from_elsewhere(page.read_text(encoding="utf-8"))] == []


def test_a_page_that_loads_a_font_or_a_script_would_be_found() -> None:
    assert loads_from_elsewhere('<link rel="stylesheet" href="https://fonts.example/x.css">')
    assert loads_from_elsewhere('<script src="https://cdn.example/mermaid.js"></script>')
    assert not loads_from_elsewhere('<script src="assets/bundle.js"></script><a href="https://cel.dev">CEL</a>')


def test_diagrams_are_drawn_when_the_site_is_built(site: Path) -> None:
    page = (site / "reference" / "lifecycles.html").read_text(encoding="utf-8")
    assert page.count('<div class="diagram"><svg') == 7
    assert "stateDiagram-v2" not in page


def test_a_link_to_a_test_shows_the_test(site: Path) -> None:
    assert 'href="source/tests/worker/test_drive.py.html"' in (site / "index.html").read_text(encoding="utf-8")
    shown = (site / "source" / "tests" / "worker" / "test_drive.py.html").read_text(encoding="utf-8")
    assert "<code>tests/worker/test_drive.py</code>" in shown


def test_every_document_is_in_the_navigation() -> None:
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())
    listed = set(_leaves(yaml.safe_load(text)["nav"]))
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert docs - listed == set()


def _leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [leaf for part in (nav.values() if isinstance(nav, dict) else nav) for leaf in _leaves(part)]
