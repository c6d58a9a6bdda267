"""The executor: one attempt at one step, and the classification of a tool's results and errors."""

import asyncio
import sys
import threading
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx2
import orjson
import pytest
from pydantic import BaseModel

from interlock.definition.expression import Scope
from interlock.definition.workflow import parse
from interlock.engine.access.key_store import Salts
from interlock.engine.access.secrets import Secrets
from interlock.errors import Retryable, Terminal
from interlock.journal import Journal, StepSnapshot
from interlock.settings import Settings
from interlock.store.pool import Database
from interlock.tools import Canceled, Context, Registry, Veil, tool
from interlock.worker import thread_runner
from interlock.worker.executor import execute
from interlock.worker.outcome import CallOutcome, Done, Failed, Interrupted, sort
from interlock.worker.output_encoding import encode_output
from interlock.worker.tool_call import ExecutionResources, RunOrigin, prepare
from tests.rig import Rig

RUN, TENANT = UUID(int=1), UUID(int=2)
NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)


class Bench:
    """A workbench with one step, which calls `t.do`."""

    def __init__(self, threads: ThreadPoolExecutor, data_dir: Path) -> None:
        settings = Settings(data_dir=data_dir)
        # No test here reads a secret: reading one would fail on this missing database.
        secrets = Secrets(Database("postgresql://nowhere/", settings))
        self.shop = ExecutionResources(Registry(), threads, 1000, Salts(settings), secrets)

    def tool(self, function: Any = None, /, **options: Any) -> Any:
        decorate = tool("t.do", register=self.shop.tools, **options)
        return decorate(function) if function else decorate

    def step(self, **step: Any) -> tuple[StepSnapshot, Scope]:
        source = orjson.dumps({"name": "w", "steps": [{"id": "s", "tool": "t.do", **step}]})
        journal = Journal(RUN, parse(source), input={"n": 5}, trigger=None, run={"id": str(RUN)})
        fold = journal.steps["s"]
        journal.begin(fold)
        return fold, journal.scope

    async def execute(self, **step: Any) -> CallOutcome:
        call = prepare(self.shop, *self.step(**step), RunOrigin(RUN, TENANT, "default", None))
        return call if isinstance(call, Failed) else await execute(self.shop, call)

    async def output(self, **step: Any) -> Any:
        outcome = await self.execute(**step)
        assert isinstance(outcome, Done), outcome
        return orjson.loads(outcome.output)

    async def failure(self, **step: Any) -> Failed:
        outcome = await self.execute(**step)
        assert isinstance(outcome, Failed), outcome
        return outcome


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    threads = ThreadPoolExecutor(2)
    yield Bench(threads, tmp_path)
    threads.shutdown()


# ---------------------------------------------------------------- calling


async def test_an_async_tool_runs_on_the_loop_and_a_plain_one_in_a_thread(bench: Bench) -> None:
    bench.tool(function := _async_where)
    assert await bench.output() == threading.current_thread().name
    assert function is _async_where
    bench.shop.tools._tools.clear()
    bench.tool(_plain_where)
    assert await bench.output() != threading.current_thread().name


async def _async_where() -> str:
    return threading.current_thread().name


def _plain_where() -> str:
    return threading.current_thread().name


async def test_a_tool_gets_its_rendered_input_and_its_context(bench: Bench) -> None:
    @bench.tool(key="pay:{amount}")
    def do(ctx: Context, amount: int, note: str = "thanks") -> dict[str, Any]:
        ctx.cost(0.5, provider="p")
        return {"amount": amount, "note": note, "step": ctx.step, "attempt": ctx.attempt, "key": ctx.idempotency_key}

    outcome = await bench.execute(input={"amount": "${input.n + 1}"})
    assert isinstance(outcome, Done)
    assert orjson.loads(outcome.output) == {"amount": 6, "note": "thanks", "step": "s", "attempt": 1, "key": "pay:6"}
    assert (outcome.context.cost_usd, outcome.context.run_id, outcome.context.tenant_id) == (0.5, RUN, TENANT)


async def test_the_cost_of_a_failed_attempt_is_known_too(bench: Bench) -> None:
    @bench.tool
    async def do(ctx: Context) -> None:
        ctx.cost(0.5)
        raise ValueError("no")

    failed = await bench.failure()
    assert failed.context is not None and failed.context.cost_usd == 0.5


async def test_a_tool_that_this_worker_does_not_know_may_be_known_to_the_next(bench: Bench) -> None:
    failed = await bench.failure()
    assert failed.retryable
    assert failed.error["message"] == "no tool t.do in this worker; add its file to INTERLOCK_TOOLS"


async def test_wrong_input_is_terminal_and_readable_and_the_tool_is_not_called(bench: Bench) -> None:
    @bench.tool
    async def do(amount: int) -> None:
        raise AssertionError("called")

    failed = await bench.failure(input={"amount": "ten"})
    assert not failed.retryable
    assert failed.error["type"] == "Terminal"
    assert failed.error["message"].startswith("input of t.do is not valid: amount: expected a whole number")


async def test_input_that_has_no_value_is_terminal_and_names_the_expression(bench: Bench) -> None:
    @bench.tool
    async def do(amount: int) -> None: ...

    failed = await bench.failure(input={"amount": "${input.gone}"})
    assert not failed.retryable
    assert "input.gone" in failed.error["message"]


async def test_a_key_that_does_not_fit_is_terminal(bench: Bench) -> None:
    @bench.tool(key="{value.gone}")
    async def do(value: int = 1) -> None: ...

    assert not (await bench.failure()).retryable


# ---------------------------------------------------------------- time


async def test_an_async_tool_that_takes_too_long_is_canceled_and_may_be_tried_again(bench: Bench) -> None:
    ended = asyncio.Event()

    @bench.tool(timeout=0.01)
    async def do() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    failed = await bench.failure()
    assert ended.is_set()
    assert failed.retryable
    assert failed.error == {"type": "TimeoutError", "message": "t.do took longer than 0.01 s"}


async def test_the_steps_own_time_out_comes_before_the_tools(bench: Bench) -> None:
    @bench.tool(timeout=3600)
    async def do() -> None:
        await asyncio.Event().wait()

    assert (await bench.failure(timeout="20ms")).error["message"] == "t.do took longer than 0.02 s"


async def test_a_thread_that_takes_too_long_is_told_at_its_next_heartbeat(bench: Bench) -> None:
    ended = threading.Event()

    @bench.tool(timeout=0.01)
    def do(ctx: Context) -> None:
        try:
            while True:
                ctx.heartbeat()
                threading.Event().wait(0.001)
        finally:
            ended.set()

    failed = await bench.failure()
    assert (failed.error["type"], failed.retryable) == ("TimeoutError", True)
    assert ended.is_set()


async def test_a_thread_that_does_not_notice_is_left_behind(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_runner, "_THREAD_GRACE_SECONDS", 0.01)
    release = threading.Event()

    @bench.tool(timeout=0.01)
    def do() -> None:
        release.wait(30)

    try:
        assert (await bench.failure()).error["message"] == "t.do took longer than 0.01 s"
    finally:
        release.set()


async def test_a_thread_that_answers_as_its_time_is_over_has_answered(bench: Bench) -> None:
    @bench.tool(timeout=0.01, writes=True, risk="low")
    def do(ctx: Context) -> str:
        ctx.cancel_token().wait(30)
        return "paid"

    assert await bench.output() == "paid"


async def test_what_waits_for_a_thread_until_its_time_is_over_was_not_begun(bench: Bench) -> None:
    called: list[str] = []

    @bench.tool(timeout=0.01, writes=True, risk="low")
    def do() -> None:
        called.append("do")

    with _no_thread_free(bench):
        failed = await bench.failure()
    assert (failed.retryable, failed.in_doubt) == (True, False)
    assert failed.error["message"] == "t.do was not begun: no thread was free in its time"
    bench.shop.threads.shutdown()
    assert called == []


async def test_a_time_out_inside_a_tool_is_the_tools_own(bench: Bench) -> None:
    @bench.tool(timeout=3600)
    async def do() -> None:
        raise TimeoutError("the shop did not answer")

    failed = await bench.failure()
    assert (failed.retryable, failed.error["message"]) == (True, "the shop did not answer")


# ---------------------------------------------------------------- interruption


async def test_an_async_tool_is_interrupted_and_can_clean_up(bench: Bench) -> None:
    begun, cleaned = asyncio.Event(), asyncio.Event()

    @bench.tool
    async def do() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    task = asyncio.create_task(bench.execute())
    await begun.wait()
    task.cancel()
    assert await task == Interrupted()
    assert cleaned.is_set()


async def test_a_thread_is_interrupted_at_its_next_heartbeat(bench: Bench) -> None:
    begun, ended = threading.Event(), threading.Event()

    @bench.tool(timeout=3600)
    def do(ctx: Context) -> None:
        begun.set()
        try:
            while True:
                ctx.heartbeat()
                threading.Event().wait(0.001)
        finally:
            ended.set()

    task = asyncio.create_task(bench.execute())
    await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    assert await task == Interrupted()
    assert ended.is_set()


async def test_what_is_told_to_stop_while_it_waits_for_a_thread_never_begins(bench: Bench) -> None:
    called: list[str] = []

    @bench.tool(writes=True, risk="low")
    def do() -> None:
        called.append("do")

    with _no_thread_free(bench):
        task = asyncio.create_task(bench.execute())
        await asyncio.sleep(0)
        task.cancel()
        assert await task == Interrupted(begun=False)
    bench.shop.threads.shutdown()
    assert called == []


@contextmanager
def _no_thread_free(bench: Bench) -> Iterator[None]:
    """Occupy every thread until the block ends."""
    release = threading.Event()
    for _ in range(2):
        bench.shop.threads.submit(release.wait, 30)
    try:
        yield
    finally:
        release.set()


async def test_a_tool_that_answers_although_it_was_told_to_stop_has_answered(bench: Bench) -> None:
    begun = asyncio.Event()

    @bench.tool
    async def do() -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "paid"
        return ""

    task = asyncio.create_task(bench.execute())
    await begun.wait()
    task.cancel()
    outcome = await task
    assert isinstance(outcome, Done) and outcome.output == '"paid"'


async def test_a_cancellation_of_the_tools_own_making_is_a_failure(bench: Bench) -> None:
    @bench.tool
    async def do() -> None:
        other = asyncio.create_task(asyncio.Event().wait())
        other.cancel()
        await other

    failed = await bench.failure()
    assert (failed.retryable, failed.error["type"]) == (True, "CancelledError")


async def test_a_plain_tool_that_says_canceled_without_being_asked_has_failed(bench: Bench) -> None:
    @bench.tool
    def do() -> None:
        raise Canceled

    assert (await bench.failure()).error == {"type": "Canceled", "message": "Canceled"}


@pytest.mark.parametrize("needs", ["", "needs: []"])
async def test_a_run_whose_tool_cancels_itself_fails_and_is_not_left_lying(rig: Rig, needs: str) -> None:
    @rig.tool("t.do")
    async def do() -> None:
        raise asyncio.CancelledError

    retry = "retry: {max_attempts: 1}"
    await rig.apply(f"{{name: w, steps: [{{id: a, tool: t.do, {retry}}}, {{id: b, tool: t.do, {retry}, {needs}}}]}}")
    run = await rig.work_until(await rig.start("w"))
    assert (run["status"], run["reason"]) == ("failed", "attempts_exhausted")


# ---------------------------------------------------------------- isolation from tools


async def test_a_tool_that_exits_does_not_take_the_worker_with_it(bench: Bench) -> None:
    @bench.tool
    def do() -> None:
        sys.exit(3)

    assert (await bench.failure()).error == {"type": "SystemExit", "message": "3"}
    bench.shop.tools._tools.clear()

    @bench.tool
    async def do_async() -> None:
        sys.exit("no more")

    assert (await bench.failure()).error == {"type": "SystemExit", "message": "no more"}


@pytest.mark.parametrize("kind", [KeyboardInterrupt, type("Panic", (BaseException,), {})])
async def test_what_is_no_exception_is_a_failed_attempt_too(bench: Bench, kind: type[BaseException]) -> None:
    @bench.tool
    async def do() -> None:
        raise kind("out of the library")

    error = (await bench.failure()).error
    assert error == {"type": "RuntimeError", "message": f"{kind.__name__}: out of the library"}


async def test_a_plain_tool_that_runs_out_of_items_fails_and_does_not_hang(bench: Bench) -> None:
    @bench.tool
    def do() -> int:
        return next(n for n in (1, 2) if n > 2)

    failed = await asyncio.wait_for(bench.failure(), 10)
    assert failed.error == {"type": "RuntimeError", "message": "t.do raised StopIteration"}


async def test_whatever_an_error_says_can_be_stored(bench: Bench) -> None:
    @bench.tool
    async def do() -> None:
        raise ValueError("a\x00b \udcff " + "x" * 5000)

    message = (await bench.failure()).error["message"]
    assert message.startswith("a\ufffdb ? xxx") and len(message) == 2000
    orjson.dumps(message)


async def test_an_error_without_words_is_called_by_its_type(bench: Bench) -> None:
    @bench.tool
    async def do() -> None:
        raise KeyError

    assert (await bench.failure()).error == {"type": "KeyError", "message": "KeyError"}


# ---------------------------------------------------------------- classification


def http_error(status: int, **headers: str) -> httpx2.HTTPStatusError:
    request = httpx2.Request("GET", "http://shop")
    response = httpx2.Response(status, headers={k.replace("_", "-"): v for k, v in headers.items()}, request=request)
    return httpx2.HTTPStatusError("no", request=request, response=response)


class SdkError(Exception):
    """Like the error of most SDKs."""

    def __init__(self, status_code: int, response: Any = None) -> None:
        self.status_code, self.response = status_code, response


class AiohttpError(Exception):
    """Like aiohttp's error."""

    def __init__(self, status: int, headers: Any = None) -> None:
        self.status, self.headers = status, headers


def urllib_error(status: int, **headers: str) -> urllib.error.HTTPError:
    told = Message()
    for name, value in headers.items():
        told[name.replace("_", "-")] = value
    return urllib.error.HTTPError("http://shop", status, "no", told, None)


@dataclass
class PlainResponse:
    status_code: int
    headers: dict[str, str]


@pytest.mark.parametrize(
    ("error", "retryable", "after"),
    [
        (Terminal("no"), False, None),
        (Retryable("later"), True, None),
        (Retryable("later", after=7), True, 7.0),
        (Retryable("later", after=float("inf")), True, 86400.0),
        (Retryable("later", after=float("nan")), True, None),
        (Retryable("later", after=-1), True, None),
        (TimeoutError(), True, None),
        (ConnectionError("reset"), True, None),
        (ConnectionRefusedError(), True, None),
        (OSError("disk"), True, None),
        (ValueError("surprise"), True, None),
        (AssertionError("surprise"), True, None),
        (httpx2.ConnectError("no route"), True, None),
        (httpx2.ReadTimeout("slow"), True, None),
        (http_error(500), True, None),
        (http_error(502), True, None),
        (http_error(503, retry_after="12"), True, 12.0),
        (http_error(429), True, None),
        (http_error(429, Retry_After="30"), True, 30.0),
        (http_error(429, retry_after="1.5"), True, 1.5),
        (http_error(429, retry_after="Wed, 21 Oct 2015 07:28:00 GMT"), True, 0.0),
        (http_error(503, retry_after="Fri, 31 Dec 9999 23:59:59 GMT"), True, 86400.0),
        (http_error(429, retry_after="Someday, 21 Oct"), True, None),
        (http_error(429, retry_after="-5"), True, None),
        (http_error(429, retry_after="9" * 400), True, 86400.0),
        (SdkError(429, PlainResponse(429, {"retry-after": "\xb2"})), True, None),
        (http_error(408), True, None),
        (http_error(425), True, None),
        (http_error(400), False, None),
        (http_error(401), False, None),
        (http_error(403), False, None),
        (http_error(404), False, None),
        (http_error(409), False, None),
        (http_error(422, retry_after="5"), False, None),
        (SdkError(404), False, None),
        (SdkError(500), True, None),
        (SdkError(429, PlainResponse(429, {"retry-after": "3"})), True, 3.0),
        (AiohttpError(404), False, None),
        (AiohttpError(429, {"Retry-After": "4"}), True, 4.0),
        (AiohttpError(503), True, None),
        (urllib_error(403), False, None),
        (urllib_error(503, Retry_After="6"), True, 6.0),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_an_error_is_worth_another_try_or_not(error: Exception, retryable: bool, after: float | None) -> None:
    assert sort(error) == (retryable, after)


def test_an_answer_that_does_not_fit_the_tools_own_model_will_not_fit_next_time() -> None:
    class Order(BaseModel):
        n: int

    with pytest.raises(ValueError, match="validation error") as caught:
        Order.model_validate({})
    assert sort(caught.value) == (False, None)


# ---------------------------------------------------------------- output


class Order(BaseModel):
    id: UUID
    at: datetime
    lines: list[int] = []


@dataclass
class Point:
    x: int


def encoded(result: Any) -> str:
    """Return the stored output of a tool that does not declare its return type."""
    registry = Registry()
    tool("t.do", register=registry)(lambda: result)
    found = registry.find("t.do")
    assert found is not None and found.result is None
    return encode_output(result, 1000, found, Veil())


@pytest.mark.parametrize(
    ("result", "stored"),
    [
        (None, None),
        ({"a": [1, 2.5, "ü", True]}, {"a": [1, 2.5, "ü", True]}),
        (Order(id=RUN, at=NEW_YEAR), {"id": str(RUN), "at": "2026-01-01T00:00:00Z", "lines": []}),
        ([Order(id=RUN, at=NEW_YEAR)], [{"id": str(RUN), "at": "2026-01-01T00:00:00Z", "lines": []}]),
        (Point(3), {"x": 3}),
        ({1: "one"}, {"1": "one"}),
        ({"when": NEW_YEAR}, {"when": "2026-01-01T00:00:00+00:00"}),
        ((1, 2), [1, 2]),
        ({7}, [7]),
        (b"bytes", "bytes"),
        (float("nan"), None),
        ({1: float("inf")}, {"1": None}),
        ("the text \\u0000 is no NUL", "the text \\u0000 is no NUL"),
        ("a path C:\\\\u0000", "a path C:\\\\u0000"),
    ],
)  # fmt: skip
def test_what_a_tool_returns_is_stored_as_json(result: Any, stored: Any) -> None:
    assert orjson.loads(encoded(result)) == stored


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (object(), "the output is not JSON"),
        ({"f": lambda: 1}, "the output is not JSON"),
        ("\ud800", "the output is not JSON"),
        (b"\xff", "the output is not JSON"),
        (nested(5000), "the output is not JSON"),
        (nested(221), "nested deeper than 220 levels"),
        ("x" * 1001, r"the output has 1,003 bytes; at most 1,000 are kept \(INTERLOCK_MAX_OUTPUT_BYTES\)"),
        ("a\x00b", "contains a NUL character"),
        ({"\x00": 1}, "contains a NUL character"),
        ("\\\x00", "contains a NUL character"),
    ],
    ids=[
        "object",
        "function",
        "surrogate",
        "bytes",
        "deep",
        "too deep to show",
        "large",
        "NUL",
        "NUL in a key",
        "NUL after a backslash",
    ],
)
def test_what_cannot_be_stored_is_terminal_and_says_why(result: Any, said: str) -> None:
    with pytest.raises(Terminal, match=said):
        encoded(result)


async def test_an_output_that_cannot_be_stored_fails_the_step_for_good(bench: Bench) -> None:
    @bench.tool
    async def do() -> object:
        return object()

    failed = await bench.failure()
    assert not failed.retryable
    assert failed.error["message"].startswith("the output is not JSON")


async def test_the_database_takes_what_the_executor_lets_through(rig: Rig) -> None:
    @rig.tool("t.do")
    def do() -> list[Any]:
        return ["\\u0000", "ü\U0001f600", {"": "\x1f\x7f"}, float("nan"), 2**63, -0.0, 1e308, nested(219)]

    await rig.apply("{name: w, steps: [{id: a, tool: t.do}]}")
    run = await rig.work_until(await rig.start("w"))
    assert run["status"] == "succeeded"
    assert run["result"] == ["\\u0000", "ü\U0001f600", {"": "\x1f\x7f"}, None, 2**63, 0, 1e308, nested(219)]
