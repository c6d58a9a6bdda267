"""Diagrams, enums, labels and docs match the tables, and the package does not repeat them elsewhere."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import interlock
from interlock.api import AppContext, create_app
from interlock.api.run_watcher import Follower
from interlock.engine.access.key_store import Salts, Signing
from interlock.engine.access.tenants import Principals
from interlock.engine.policies import Policies
from interlock.engine.proof.evidence import EvidenceSigner
from interlock.engine.workflows import Plans
from interlock.integrations.artifacts import Artifacts
from interlock.lifecycle import (
    COUPLINGS,
    MACHINES,
    MAY_APPEND,
    ApprovalState,
    Machine,
    ReceiptState,
    RunReason,
    RunState,
    StepState,
    Tier,
    WorkerState,
)
from interlock.lifecycle.render import label_sets, mermaid, reference
from interlock.settings import Settings
from interlock.store.pool import Database
from interlock.telemetry import exposition
from interlock.tools import Registry
from tests.lifecycle import expected
from tests.rig import Rig
from tests.store.functions import BODIES, EVERY_TEXT

SOURCE = Path(interlock.__file__).parent
EVERY_MACHINE = pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)


@EVERY_MACHINE
def test_the_diagram_draws_each_transition_and_no_other(machine: Machine) -> None:
    drawn = set()
    for line in mermaid(machine).splitlines():
        if found := re.fullmatch(r"  (\w+) --> (\w+): (.+)", line):
            source, target, events = found.groups()
            drawn |= {(source, event, target) for event in events.split(", ")}
    assert drawn == expected.TABLES[machine.name]


@EVERY_MACHINE
def test_the_diagram_begins_at_the_initial_state_and_ends_at_the_terminal_ones(machine: Machine) -> None:
    lines = mermaid(machine).splitlines()
    assert lines[:2] == ["stateDiagram-v2", f"  [*] --> {expected.STATES[machine.name][0]}"]
    assert {line.split()[0] for line in lines if line.endswith("--> [*]")} == expected.TERMINAL[machine.name]


def test_the_reference_page_explains_every_state_transition_and_coupling() -> None:
    page = reference(MACHINES)
    for machine in MACHINES:
        assert f"## {machine.name.capitalize()}" in page
        assert mermaid(machine) in page
        for state in machine.states:
            assert f"| `{state}` | {state.doc} |" in page
        for source, event, target in expected.TABLES[machine.name]:
            assert f"| `{source}` | {event} | `{target}` |" in page
    for coupling in COUPLINGS:
        assert f"| {coupling.machine} | {coupling.event} | {coupling.fires} | {coupling.with_event} |" in page


def test_the_reference_page_in_docs_is_the_one_that_is_rendered() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "lifecycles.md"
    if not page.exists():
        pytest.skip("docs/reference is not generated")
    assert page.read_text(encoding="utf-8") == reference(MACHINES)


@EVERY_MACHINE
def test_a_transition_counter_has_the_labels_of_the_table(machine: Machine) -> None:
    assert label_sets(machine) == sorted({(source, target) for source, _, target in expected.TABLES[machine.name]})


async def test_what_is_counted_while_a_run_executes_is_in_the_label_sets(rig: Rig) -> None:
    @rig.tool("t.do")
    async def do() -> None: ...

    @rig.tool("t.pay", writes=True, risk="low")
    async def pay() -> None: ...

    await rig.apply("{name: gated, steps: [{id: a, tool: t.do}, {id: gate, approval: {}}, {id: b, tool: t.pay}]}")
    run_id = await rig.start("gated")
    await rig.work_until(run_id, "waiting_approval")
    await rig.approve(run_id, who=await rig.person("ann", "approver"))
    assert (await rig.work_until(run_id))["status"] == "succeeded"

    counted: dict[str, set[tuple[str, str]]] = {}
    for family in text_string_to_metric_families(exposition().decode()):
        if found := re.fullmatch(r"interlock_(\w+)_transitions", family.name):
            labels = {
                (s.labels["from_state"], s.labels["to_state"]) for s in family.samples if "from_state" in s.labels
            }
            counted[found[1]] = labels
    for machine in MACHINES:
        assert counted.get(machine.name, set()) <= set(label_sets(machine))
    assert ("waiting_approval", "running") in counted["run"]
    assert ("waiting_approval", "succeeded") in counted["step"]
    assert ("requested", "approved") in counted["approval"]
    assert ("attempted", "succeeded") in counted["receipt"]
    assert ("idle", "running") in counted["worker"]


def test_the_openapi_enums_list_exactly_the_states(tmp_path: Path) -> None:
    database, settings = Database("postgresql://nowhere/", Settings()), Settings()
    notary = EvidenceSigner(Signing(settings), Salts(settings), Artifacts(tmp_path.as_uri()))
    policies, principals = Policies(database, Registry()), Principals(database)
    follower = Follower(database, principals)
    app = create_app(AppContext(database, settings, Plans(database), principals, policies, follower, notary))
    schemas = app.openapi()["components"]["schemas"]
    for name, words in {
        "RunState": expected.STATES["run"],
        "StepState": expected.STATES["step"],
        "ApprovalState": expected.STATES["approval"],
        "ReceiptState": expected.STATES["receipt"],
        "WorkerState": expected.STATES["worker"],
        "RunReason": expected.REASONS,
        "Tier": ["low", "med", "high"],
    }.items():
        assert sorted(schemas[name]["enum"]) == sorted(words), name
    views = {"Run": "RunState", "Step": "StepState", "Approval": "ApprovalState", "Receipt": "ReceiptState"}
    for name, enum in views.items():
        assert schemas[name]["properties"]["status"]["$ref"].endswith(f"/{enum}")


# ---------------------------------------------------------------- no repeated lists

_ENUMS = {enum.__name__: enum for enum in (RunState, StepState, ApprovalState, ReceiptState, WorkerState)}


def collections_of_states(tree: ast.AST) -> Iterator[tuple[int, frozenset[str]]]:
    """Return each tuple, list, set or dict's keys with the states it spells out, as members or as text."""
    known = {str(state) for enum in _ENUMS.values() for state in enum}
    for node in ast.walk(tree):
        match node:
            case ast.Tuple(elts=members) | ast.List(elts=members) | ast.Set(elts=members) | ast.Dict(keys=members):
                pass
            case _:
                continue
        words = set()
        for member in members:
            match member:
                case ast.Constant(value=str(text)) if text in known:
                    words.add(text)
                case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in _ENUMS:
                    words.add(str(_ENUMS[owner][name]))
        if words:
            yield node.lineno, frozenset(words)


def retyped(text: str) -> list[tuple[int, frozenset[str]]]:
    """Return collections that spell out a machine's terminal, open or complete set of states."""
    machines = [m for m in MACHINES if m.name in ("run", "step", "approval", "receipt", "worker")]
    lists = {frozenset(map(str, of)) for m in machines for of in (m.terminal, m.open, frozenset(m.states))}
    lists = {of for of in lists if len(of) > 1}
    return [(line, words) for line, words in collections_of_states(ast.parse(text)) if any(of <= words for of in lists)]


def modules() -> list[Path]:
    return [path for path in sorted(SOURCE.rglob("*.py")) if path.parent.name != "lifecycle"]


def test_no_module_retypes_a_set_of_states() -> None:
    found = {str(path.relative_to(SOURCE)): retyped(path.read_text(encoding="utf-8")) for path in modules()}
    assert {path: sets for path, sets in found.items() if sets} == {}


def test_a_retyped_set_would_be_found() -> None:
    assert retyped('ENDED = {"succeeded", "failed", "canceled"}')
    assert retyped("ENDED = (RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELED)")
    assert retyped("COLOURS = {RunState.SUCCEEDED: 1, RunState.FAILED: 2, RunState.CANCELED: 3}")
    assert not retyped("(RunState.FAILED, RunState.CANCELED)")


def test_no_statement_spells_out_where_a_run_ended() -> None:
    """An ended run has `completed_at`; only the CHECK and the functions of the triggers, which are rendered, list the
    three states.
    """
    for name, statement in EVERY_TEXT.items():
        if name.endswith("_may_move()"):
            continue
        for listed in re.findall(r"\bIN \(('[^)]*)\)", statement):
            words = {word.strip(" '") for word in listed.split(",")}
            assert not expected.TERMINAL["run"] <= words, name


def test_only_a_worker_that_may_append_is_looked_for_when_appending() -> None:
    found = re.search(r"FROM interlock.worker WHERE id = holder AND status IN \(([^)]*)\)", BODIES["write_runs"])
    assert found is not None
    assert {word.strip(" '") for word in found[1].split(",")} == MAY_APPEND


def test_reasons_and_tiers_are_terms_too() -> None:
    assert all(term.doc for term in (*RunReason, *Tier))
