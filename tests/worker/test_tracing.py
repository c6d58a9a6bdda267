"""Traces: one W3C tree from the request to the tool, and no spans without a configured exporter."""

import sys
from typing import Any
from uuid import UUID

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import get_current_span

from interlock import Context, FlowContext, Terminal, tracing
from tests.rig import Rig

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ONE = "name: one\nsteps:\n  - {id: a, tool: t.look}"


@pytest.fixture
def seen(rig: Rig) -> list[Any]:
    """Record the trace context that tools receive."""
    told: list[Any] = []

    @rig.tool("t.look")
    async def look(ctx: Context) -> None:
        told.append(ctx.traceparent)

    @rig.tool("t.plain")
    def plain(ctx: Context) -> None:
        told.append((ctx.traceparent, f"{get_current_span().get_span_context().span_id:016x}"))

    @rig.tool("t.fail")
    async def fail() -> None:
        raise Terminal("no such thing")

    return told


async def _start(rig: Rig, workflow: str, **headers: str) -> UUID:
    started = await rig.http().post("/api/runs", json={"workflow": workflow}, headers=headers)
    assert started.status_code == 201, started.text
    return UUID(started.json()["id"])


def _tree(exported: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exported.get_finished_spans()}


def _id(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def _parent(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


async def test_a_trace_goes_from_the_caller_to_the_tool(
    rig: Rig, seen: list[Any], exported: InMemorySpanExporter
) -> None:
    await rig.apply(ONE)
    await rig.work_until(await _start(rig, "one", traceparent=CALLER))
    tree = _tree(exported)
    request, run, step, tool = (tree[name] for name in ("POST /api/runs", "run one", "step a", "tool t.look"))
    assert _parent(request) == int("b7ad6b7169203331", 16)
    assert (_parent(run), _parent(step), _parent(tool)) == (_id(request), _id(run), _id(step))
    assert {f"{span.context.trace_id:032x}" for span in tree.values() if span.context} == {CALLER[3:35]}
    assert seen == [f"00-{CALLER[3:35]}-{_id(tool):016x}-01"]
    assert run.attributes and run.attributes["interlock.status"] == "succeeded"
    assert request.attributes and request.attributes["http.response.status_code"] == 201
    assert run.start_time and run.end_time and step.start_time and run.start_time <= step.start_time <= run.end_time


async def test_a_run_without_a_caller_has_a_trace_of_its_own(
    rig: Rig, seen: list[Any], exported: InMemorySpanExporter
) -> None:
    await rig.apply(ONE)
    run_id = await rig.start("one")
    await rig.work_until(run_id)
    tree = _tree(exported)
    assert _parent(tree["run one"]) is None and seen[0].startswith(f"00-{run_id.hex}-")


async def test_a_plain_function_is_in_the_trace_too(rig: Rig, seen: list[Any], exported: InMemorySpanExporter) -> None:
    await rig.apply("name: plain\nsteps:\n  - {id: a, tool: t.plain}")
    await rig.work_until(await rig.start("plain"))
    [(traceparent, span_id)] = seen
    assert traceparent.split("-")[2] == span_id == f"{_id(_tree(exported)['tool t.plain']):016x}"


async def test_what_fails_is_marked_and_says_why(rig: Rig, seen: list[Any], exported: InMemorySpanExporter) -> None:
    await rig.apply("name: bad\nsteps:\n  - {id: a, tool: t.fail}")
    await rig.work_until(await rig.start("bad"))
    tree = _tree(exported)
    assert tree["step a"].status.description == "no such thing"
    assert tree["run bad"].status.description == "terminal_error"


async def test_a_run_that_ends_without_a_worker_has_its_span(rig: Rig, exported: InMemorySpanExporter) -> None:
    await rig.apply("name: ask\nsteps:\n  - {id: a, approval: {tier: low}}")
    run_id = await _start(rig, "ask", traceparent=CALLER)
    await rig.cancel(run_id)
    assert "run ask" in _tree(exported)


async def test_children_are_in_the_trace_of_their_parent(
    rig: Rig, seen: list[Any], exported: InMemorySpanExporter
) -> None:
    @rig.flow("parent")
    async def parent(ctx: FlowContext) -> Any:
        await ctx.child("one")

    await rig.apply(ONE)
    await rig.work_until(await _start(rig, "parent", traceparent=CALLER))
    tree = _tree(exported)
    assert _parent(tree["run one"]) == _id(tree["run parent"])
    assert seen[0][3:35] == CALLER[3:35]


async def test_without_an_exporter_the_callers_context_is_handed_on(rig: Rig, seen: list[Any]) -> None:
    await rig.apply(ONE)
    run = await rig.work_until(await _start(rig, "one", traceparent=CALLER))
    assert seen == [CALLER] and run["trigger"]["traceparent"] == CALLER
    run = await rig.work_until(await rig.start("one"))
    assert seen[1:] == [None] and "traceparent" not in run["trigger"]


@pytest.mark.parametrize(
    "header",
    ["", "nonsense", "00-" + "0" * 32 + "-b7ad6b7169203331-01", CALLER.upper(), CALLER + "-x", "ff" + CALLER[2:]],
)
async def test_a_context_that_makes_no_sense_is_left_out(rig: Rig, seen: list[Any], header: str) -> None:
    await rig.apply(ONE)
    await rig.work_until(await _start(rig, "one", traceparent=header))
    assert seen == [None]


def test_without_an_endpoint_nothing_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    tracing.configure()
    assert tracing.spans is None


def test_an_endpoint_without_the_extra_is_said_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    tracing.configure()
    assert tracing.spans is None
    assert "install interlock[otel]" in capsys.readouterr().out
