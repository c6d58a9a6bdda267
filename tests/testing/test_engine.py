"""The kit for users' tests: the engine, its clock, its fakes and its people."""

import time
from typing import Any

import pytest

from interlock import FlowContext, StepFailed, Terminal
from interlock.errors import Invalid
from interlock.testing import Engine, NoFake, Scratch
from interlock.tools import Registry, flow, tool

GATED = """
name: gated
steps:
  - {id: ask, approval: {tier: high, two_person: true, summary: "${input.what}"}}
  - {id: act, tool: t.act, input: {what: "${input.what}"}}
"""


@pytest.fixture
async def engine(interlock_scratch: Scratch) -> Any:
    shelf = Registry()

    @tool("t.act", writes=True, risk="low", register=shelf)
    async def act(what: str) -> str:
        raise NotImplementedError

    @flow("nap", register=shelf)
    async def nap(ctx: FlowContext, input: dict[str, Any]) -> Any:
        before = ctx.now()
        await ctx.sleep(input["for"])
        return [await ctx.call("t.act", what="woke"), (ctx.now() - before).total_seconds()]

    async with Engine.open(interlock_scratch, tools=shelf) as engine:
        yield engine


async def test_time_stands_still_until_it_is_moved(engine: Engine) -> None:
    act = engine.fake("t.act", "done")
    run = await engine.run("nap", {"for": "30d"})
    assert run.status == "waiting_external" and act.calls == []
    await engine.advance("29d")
    assert (await engine.look(run)).status == "waiting_external"
    await engine.advance("1d")
    run = await engine.look(run)
    assert (run.status, run.result) == ("succeeded", ["done", 30 * 86400.0]), run.error


async def test_two_people_are_two(engine: Engine) -> None:
    engine.fake("t.act", "done")
    await engine.apply(GATED)
    run = await engine.run("gated", {"what": "x"})
    run = await engine.approve(run)
    [question] = await engine.approvals(run, status="approved")
    assert run.status == "succeeded" and len({vote.by for vote in question.votes}) == 2


async def test_one_of_two_is_not_enough(engine: Engine) -> None:
    engine.fake("t.act", "done")
    await engine.apply(GATED)
    run = await engine.run("gated", {"what": "x"})
    run = await engine.approve(run, by=await engine.person("only"))
    assert run.status == "waiting_approval"
    run = await engine.reject(run, reason="no")
    assert (run.status, run.reason) == ("failed", "rejected")
    with pytest.raises(LookupError, match="asks nobody anything; it is failed"):
        await engine.approve(run)


async def test_questions_are_answered_as_they_come(engine: Engine) -> None:
    engine.fake("t.act", "done")
    await engine.apply(GATED)
    said = {"yes": True, "no": False, "later": None}
    engine.answer(lambda question: said[question.summary])
    found = [await engine.run("gated", {"what": what}) for what in said]
    assert [run.status for run in found] == ["succeeded", "failed", "waiting_approval"]


async def test_a_fake_is_validated_and_judged_like_the_tool(engine: Engine) -> None:
    act = engine.fake("t.act", "done")
    await engine.apply("name: wrong\nsteps:\n  - {id: a, tool: t.act, input: {what: 5}}")
    assert "what: expected a string" in (await engine.run("wrong")).error["message"]
    await engine.policy('@id("no") forbid(principal, action, resource);')
    run = await engine.run("nap", {"for": 0})
    assert (run.reason, act.calls) == ("policy_denied", [])


async def test_a_fake_answers_what_the_test_says(engine: Engine) -> None:
    act = engine.fake("t.act", does=lambda what: what.upper())
    assert (await engine.run("nap", {"for": 0})).result[0] == "WOKE"
    act.raises = Terminal("no")
    assert (await engine.run("nap", {"for": 0})).reason == "terminal_error"
    assert act.calls == [{"what": "woke"}] * 2


async def test_a_fake_of_no_tool_needs_a_signature(engine: Engine) -> None:
    with pytest.raises(Invalid, match=r"no tool t\.new is registered; import the module"):
        engine.fake("t.new", 1)
    with pytest.raises(Invalid, match=r"no tool t\.actt is registered; did you mean `t\.act`\?"):
        engine.fake("t.actt", 1)
    engine.fake("t.new", does=lambda what: what, writes=True)
    assert engine.tools.find("t.new") is not None
    with pytest.raises(Invalid, match="writes cannot be said of it again"):
        engine.fake("t.new", 1, writes=False)


async def test_a_tool_without_a_fake_is_not_called(engine: Engine) -> None:
    """new-user 10: a test without a fake changed a real system."""
    with pytest.raises(
        NoFake, match=r"no fake for t\.act.*engine\.fake\('t\.act', RESULT\).*allow_real_tools\('t\.act'\)"
    ):
        await engine.run("nap", {"for": 0})
    engine.allow_real_tools("t.*")
    run = await engine.run("nap", {"for": 0})
    assert run.steps[-1].last_error["type"] == "NotImplementedError"
    with pytest.raises(Invalid, match=r"no tool t\.other is registered"):
        engine.allow_real_tools("t.other")


async def test_a_flow_that_catches_the_error_does_not_hide_the_missing_fake(interlock_scratch: Scratch) -> None:
    shelf = Registry()

    @tool("t.read", register=shelf)
    async def read() -> None: ...

    @flow("careless", register=shelf)
    async def careless(ctx: FlowContext) -> str:
        try:
            await ctx.call("t.read")
        except StepFailed:
            return "never mind"
        return "read"

    async with Engine.open(interlock_scratch, tools=shelf) as engine:
        with pytest.raises(NoFake, match=r"t\.read"):
            await engine.run("careless")


async def test_engines_know_nothing_of_each_other(engine: Engine, interlock_scratch: Scratch) -> None:
    engine.fake("t.act", "done")
    async with Engine.open(interlock_scratch, tools=Registry()) as other:
        assert other.tools.all() == []
        assert await other.approvals() == []


async def test_an_engine_takes_milliseconds(interlock_scratch: Scratch) -> None:
    took = []
    for _ in range(3):
        began = time.perf_counter()
        async with Engine.open(interlock_scratch) as engine:
            await engine.apply(GATED)
        took.append(time.perf_counter() - began)
    assert min(took) < 0.5, took


async def test_events_come_from_outside_before_their_wait_or_after_it(engine: Engine) -> None:
    await engine.apply("{name: paid, steps: [{id: a, wait: {event: e, correlation: '${input.of}', timeout: 1h}}]}")
    waiting = await engine.run("paid", {"of": "1"})
    assert await engine.event("e", 1, {"n": 1})
    assert (await engine.look(waiting)).result == {"n": 1}
    assert not await engine.event("e", "2", {"n": 2})
    assert (await engine.run("paid", {"of": "2"})).result == {"n": 2}
    late = await engine.run("paid", {"of": "3"})
    await engine.advance("1h")
    assert (await engine.look(late)).reason == "external_timeout"


async def test_the_one_worker_does_steps_for_every_label(engine: Engine) -> None:
    engine.fake("t.act", "done")
    await engine.apply("{name: far, steps: [{id: a, tool: t.act, runs_on: gpu, input: {what: x}}]}")
    assert (await engine.run("far")).status == "succeeded"
