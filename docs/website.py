"""What mkdocs needs to make one website of this repository: see mkdocs.yml.

The documents keep the places and links that they have in the repository. The site adds those outside of `docs/`, and a
page for every other file that a document links to, so that a link to a test shows the test.
"""

import hashlib
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mermaidx
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_ROOT_DOCUMENTS = ("README", "ARCHITECTURE", "CONTRIBUTING", "CHANGELOG", "SECURITY", "CODE_OF_CONDUCT")
_LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#])")
_MARK = Path("src/interlock/console/static/mark.svg")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sql": "sql", ".cedar": "text", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = [*files.documentation_pages()]
    for path in (*(ROOT / f"{name}.md" for name in _ROOT_DOCUMENTS), *sorted((ROOT / "examples").rglob("*.md"))):
        page = File.generated(config, uri_of(path), abs_src_path=str(path))
        pages.append(page)
        files.append(page)
    files.append(File.generated(config, "images/mark.svg", abs_src_path=str(ROOT / _MARK)))
    known = {file.src_uri for file in files}
    for path in sorted({path for page in pages for path in links_of(Path(page.abs_src_path or ""))}):
        if uri_of(path) not in known:
            files.append(File.generated(config, uri_of(path), content=source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return the page with links to the site's pages instead of links to the repository's files."""
    if page.file.generated_by and page.file.abs_src_path is None:
        return markdown
    here = Path(page.file.abs_src_path or "").parent

    def on_site(found: re.Match[str]) -> str:
        path = (here / found[1]).resolve()
        if "://" in found[1] or not path.is_relative_to(ROOT) or not path.exists():
            return found[1]
        return posixpath.relpath(uri_of(path), posixpath.dirname(page.file.src_uri) or ".")

    return _LINK.sub(on_site, markdown)


def links_of(page: Path) -> Iterator[Path]:
    """Yield the files of the repository that a document links to."""
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve()
        if "://" not in target and path.is_relative_to(ROOT) and path.is_file():
            yield path


def uri_of(path: Path) -> str:
    """Return where the site has this file of the repository."""
    place = path.relative_to(ROOT)
    if place.parts[0] == "docs":
        return Path(*place.parts[1:]).as_posix()
    if len(place.parts) == 1 and place.stem in _ROOT_DOCUMENTS:
        return "index.md" if place.stem == "README" else place.name.lower()
    if place.parts[0] == "examples" and place.suffix == ".md":
        return place.as_posix()
    return f"source/{place.as_posix()}.md"


def source_page(path: Path) -> str:
    language = _LANGUAGES.get(path.suffix, "text")
    name = path.relative_to(ROOT).as_posix()
    return (
        f"---\nsearch: {{exclude: true}}\nhide: [toc]\n---\n# {path.name}\n\n`{name}`\n\n"
        f"``````{language}\n{path.read_text(encoding='utf-8').rstrip()}\n``````\n"
    )


def diagram(source: str, *_: Any, **__: Any) -> str:
    """Return a Mermaid diagram as SVG. It takes a second or two to draw, so the virtual environment keeps it."""
    name = f"d{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    kept = Path(sys.prefix) / "diagrams" / f"{name}.svg"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        # The ids of all diagrams begin with the same word: several on one page would share their styles.
        kept.write_text(mermaidx.render(source).svg().replace("my-svg", name), encoding="utf-8")
    return f'<div class="diagram">{kept.read_text(encoding="utf-8")}</div>'
