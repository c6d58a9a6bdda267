"""The documents: their link targets exist, and generated parts are up to date."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from docs import codes, generate
from interlock.cli import app
from interlock.lifecycle import MACHINES, RunState
from interlock.telemetry import Metrics

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md") for path in ROOT.glob(pattern) if path.is_file()
)
_LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]*))?\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
TEMPLATES = sorted((ROOT / "src" / "interlock" / "console" / "templates").glob("*.html"))
_TYPED = re.compile(r"^\$ (.*(?:\\\n.*)*)|`([^`\n]*)`", re.MULTILINE)
_FILLED_IN = re.compile(r"\{\{.*?\}\}|\{%.*?%\}")
_COMMAND = re.compile(r"(?:^|[\s/>\"])interlock((?: [^\s\"`<>|&#]+)+)")
_TEST = re.compile(r"\btest_[a-z0-9_]+\b(?!\.py)")
_METRIC = re.compile(r"`(interlock_[a-z_]+)(?:\{.*?\})?`")


def broken_links(page: Path, text: str) -> list[str]:
    return [
        f"{target}#{place}" if place else target
        for target, place in _LINK.findall(text)
        if "://" not in target and not leads_somewhere((page.parent / target).resolve() if target else page, place)
    ]


def leads_somewhere(path: Path, place: str) -> bool:
    return path.exists() and (not place or place in places_of(path.read_text(encoding="utf-8")))


def places_of(text: str) -> set[str]:
    """Return the headings as GitHub's link anchors."""
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(text)}


def test_every_link_leads_somewhere() -> None:
    broken = {str(page.relative_to(ROOT)): broken_links(page, page.read_text(encoding="utf-8")) for page in PAGES}
    assert {page: links for page, links in broken.items() if links} == {}


def test_a_broken_link_would_be_found() -> None:
    text = "[here](docs/nowhere.md) [there](ARCHITECTURE.md#why-not) [back](#status) [why](ARCHITECTURE.md#why)"
    assert broken_links(ROOT / "README.md", text) == ["docs/nowhere.md", "ARCHITECTURE.md#why-not"]


def test_every_test_that_is_named_exists() -> None:
    """Either in `tests/`, or in the document itself as an example."""
    named = {name for page in PAGES for name in _TEST.findall(page.read_text(encoding="utf-8"))}
    files = [*(ROOT / "tests").rglob("test_*.py"), *PAGES]
    written = {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))}
    assert named - written == set()


def unknown_metrics(text: str) -> set[str]:
    collectors: Any = Metrics().registry._collector_to_names
    known = {name for names in collectors.values() for name in names}
    return set(_METRIC.findall(text)) - known


def test_every_metric_that_is_named_exists() -> None:
    unknown = {page.name: unknown_metrics(page.read_text(encoding="utf-8")) for page in PAGES}
    assert {page: names for page, names in unknown.items() if names} == {}


def test_a_metric_that_does_not_exist_would_be_found() -> None:
    assert unknown_metrics("`interlock_run_active{status}` and `interlock_lane_drift_total`") == {
        "interlock_lane_drift_total"
    }


def test_the_vocabulary_has_every_state_and_only_those() -> None:
    text = (ROOT / "docs" / "vocabulary.md").read_text(encoding="utf-8")
    of_runs = text.partition("## States of a run")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([a-z_]+)`", of_runs, re.MULTILINE) == [str(state) for state in RunState]
    named = set(re.findall(r"`([a-z_]+)`", text.partition("## States of a step")[2].partition("\n## ")[0]))
    states = {str(state) for machine in MACHINES for state in machine.states}
    assert named - states == {"attempt", "last_error", "ready", "failed_retryable", "failed_terminal"}


def lock_order(text: str) -> str:
    found = re.search(r"\b(job, supervisor, worker, [a-z, ]+)", text)
    assert found is not None
    return found[1].strip()


def test_the_lock_order_is_that_of_the_sql() -> None:
    sql = (ROOT / "src" / "interlock" / "store" / "migrations" / "0005_queue.sql").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "internals" / "queue.md").read_text(encoding="utf-8")
    assert lock_order(page) == lock_order(sql.replace("\n-- ", " "))


def test_the_reference_is_what_the_code_says() -> None:
    assert generate.differences() == {}


def test_a_page_that_differs_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(generate.PAGES, "settings.md", lambda: "# Other\n")
    assert generate.check() == 1
    assert "docs/reference/settings.md is out of date" in capsys.readouterr().err


def test_every_code_is_listed_with_a_status() -> None:
    listed = {code.code: code.status for code in codes.codes_in(generate.SOURCE)}
    assert listed["RUN_NOT_FOUND"] == 404
    assert listed["IDEMPOTENCY_KEY_REUSED"] == 422
    assert listed["SELF_APPROVAL"] == 403
    # As the API answers them: see tests/governed/test_approvals.py.
    assert (listed["NOT_AN_APPROVER"], listed["REASON_REQUIRED"]) == (403, 422)
    assert all(400 <= status < 600 for status in listed.values())


# ---------------------------------------------------------------- commands


def typed_in(page: Path) -> str:
    """Return what readers type: in a document, lines after a prompt and code spans; in a template, all of it."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".html":
        return _FILLED_IN.sub("x", text).replace("\\n", "\n")
    return "\n".join(line or code for line, code in _TYPED.findall(text))


def unknown_commands(text: str) -> Iterator[str]:
    for found in _COMMAND.findall(text):
        if (unknown := _unknown_in(found.split())) is not None:
            yield f"{unknown} in interlock{found}"


@cache
def _interlock() -> Any:
    return get_command(app)


def _unknown_in(words: list[str]) -> str | None:
    command = _interlock()
    for word in words:
        if word == "--":
            return None
        if word.startswith("-") and word != "-":
            if word not in {name for option in command.params for name in option.opts} | {"--help"}:
                return word
        elif hasattr(command, "commands") and word in command.commands:
            command = command.commands[word]
        elif hasattr(command, "commands") and re.fullmatch("[a-z-]+", word) and command.no_args_is_help:
            return word
    return None


def test_every_command_that_somebody_is_told_to_type_exists() -> None:
    unknown = {page.name: list(unknown_commands(typed_in(page))) for page in (*PAGES, *TEMPLATES)}
    assert {page: commands for page, commands in unknown.items() if commands} == {}


def test_a_command_that_does_not_exist_would_be_found() -> None:
    text = "interlock run events RUN --follow\ninterlock run show RUN --events\n.venv/bin/interlock run look RUN"
    assert [line.partition(" ")[0] for line in unknown_commands(text)] == ["--events", "look"]
