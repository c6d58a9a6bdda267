"""The clients' contract; the sync and the async client both satisfy each part."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import httpx2
import pytest

from interlock.client import ApiError, AsyncClient, Client, Unreachable
from interlock.lifecycle import RunState
from interlock.wire import NewTrigger, Role

NOW = datetime(2026, 11, 16, 12, tzinfo=UTC).isoformat()
RUN = {
    "id": "0198-run",
    "tenant_id": "0198-tenant",
    "workflow": "refund",
    "workflow_version": 1,
    "status": "running",
    "trigger": {"source": "api"},
    "created_at": NOW,
    "updated_at": NOW,
}
Handler = Callable[[httpx2.Request], httpx2.Response]


class Kind:
    """One kind of client, with the same interface for both; the tests record pauses instead of sleeping."""

    def __init__(self, is_async: bool) -> None:
        self.is_async = is_async
        self.pauses: list[float] = []

    def client(self, handler: Handler, **options: Any) -> Client | AsyncClient:
        options = {"url": "http://interlock.test", "key": "k", **options}
        transport = httpx2.MockTransport(handler)
        client = (AsyncClient if self.is_async else Client)(**options, transport=transport)
        client._sleep = self._pause_async if self.is_async else self.pauses.append
        return client

    def call(self, handler: Handler, method: str, *args: Any, **kwargs: Any) -> Any:
        client = self.client(handler)
        if not self.is_async:
            return getattr(client, method)(*args, **kwargs)
        return asyncio.run(getattr(client, method)(*args, **kwargs))

    def each(self, handler: Handler, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        client = self.client(handler)
        if not self.is_async:
            return list(getattr(client, method)(*args, **kwargs))

        async def gather() -> list[Any]:
            return [item async for item in getattr(client, method)(*args, **kwargs)]

        return asyncio.run(gather())

    async def _pause_async(self, seconds: float) -> None:
        self.pauses.append(seconds)


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return Kind(request.param == "async")


class Server:
    """Gives its scripted answers in order, and records the requests."""

    def __init__(self, *answers: httpx2.Response | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[httpx2.Request] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def ok(body: Any, status: int = 200) -> httpx2.Response:
    return httpx2.Response(status, json=body)


def problem(status: int, code: str, **more: Any) -> httpx2.Response:
    body = {"type": "about:blank", "title": "Not found", "status": status, "detail": "no such run", "code": code}
    return httpx2.Response(status, json={**body, **more}, headers={"content-type": "application/problem+json"})


# ---------------------------------------------------------------- requests and answers


def test_start_sends_only_what_was_given(kind: Kind) -> None:
    server = Server(ok(RUN, 201))
    run = kind.call(server, "start", "refund", {"amount": 5}, trigger=NewTrigger(source="cli"), wait=2.5)
    (request,) = server.asked
    assert run.status is RunState.RUNNING
    assert (request.method, request.url.path, request.url.params["wait"]) == ("POST", "/api/runs", "2.5")
    assert json.loads(request.content) == {"workflow": "refund", "input": {"amount": 5}, "trigger": {"source": "cli"}}
    assert request.headers["authorization"] == "Bearer k"
    assert request.headers["content-type"] == "application/json"


def test_waiting_on_the_server_lengthens_the_read_timeout_only(kind: Kind) -> None:
    server = Server(ok(RUN))
    kind.call(server, "run", "r", wait=60)
    assert server.asked[0].extensions["timeout"] == {"connect": 30, "read": 90, "write": 30, "pool": 30}


def test_filters_that_were_not_given_are_not_sent(kind: Kind) -> None:
    server = Server(ok({"items": [RUN], "next_cursor": None}))
    page = kind.call(server, "runs", status=RunState.WAITING_APPROVAL, limit=3)
    assert dict(server.asked[0].url.params) == {"status": "waiting_approval", "limit": "3"}
    assert [run.id for run in page.items] == ["0198-run"]


@pytest.mark.parametrize(
    ("method", "args", "kwargs", "said"),
    [
        ("start", ("refund",), {"idempotency_key": "größe"}, "an idempotency key has printable ASCII characters"),
        ("start", ("refund",), {"idempotency_key": "a\nb"}, "an idempotency key has printable ASCII characters"),
        ("start", ("refund",), {"idempotency_key": ""}, "an idempotency key is not empty"),
        ("say", ("hello",), {"session_id": "last"}, "session_id: "),
        ("submit_job", ("count", "refund"), {"parent_job_id": "last"}, "parent_job_id: "),
    ],
)
def test_what_cannot_be_sent_is_refused_as_the_server_would(
    kind: Kind, method: str, args: Any, kwargs: Any, said: str
) -> None:
    """Most important is an invalid idempotency key: without a valid key, a repeated request could act twice."""
    server = Server(ok(RUN))
    with pytest.raises(ApiError, match=said) as refused:
        kind.call(server, method, *args, **kwargs)
    assert (refused.value.status, refused.value.code, server.asked) == (422, "INVALID_REQUEST", [])


def test_a_name_cannot_become_another_path(kind: Kind) -> None:
    server = Server(ok(RUN))
    kind.call(server, "run", "a/../../keys?x=1")
    assert server.asked[0].url.raw_path == b"/api/runs/a%2F..%2F..%2Fkeys%3Fx%3D1"


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_name_that_is_none_is_not_asked_for(kind: Kind, name: str) -> None:
    """Percent-encoding leaves these names as they are: `/api/workers/../events` would be another resource."""
    server = Server(ok({"items": [], "next_cursor": None}))
    for method in ("run", "events", "worker_events", "delete_trigger"):
        with pytest.raises(ApiError, match="is no id and no name"):
            kind.call(server, method, name)
    assert server.asked == []


@pytest.mark.parametrize(
    ("method", "args", "kwargs", "sent"),
    [
        ("approve", ("r",), {"reason": "fine"}, ("POST", "/api/runs/r/approve", {"reason": "fine"})),
        ("approve", ("r",), {"digest": "d"}, ("POST", "/api/runs/r/approve", {"digest": "d"})),
        ("cancel", ("r",), {"reason": "stop"}, ("POST", "/api/runs/r/cancel", {"reason": "stop"})),
        ("interrupt", ("r",), {}, ("POST", "/api/runs/r/interrupt", {})),
        ("retry", ("r",), {}, ("POST", "/api/runs/r/retry", {})),
    ],
)
def test_what_is_done_to_a_run(kind: Kind, method: str, args: Any, kwargs: Any, sent: Any) -> None:
    server = Server(ok(RUN))
    kind.call(server, method, *args, **kwargs)
    (request,) = server.asked
    assert (request.method, request.url.path, json.loads(request.content)) == sent


def test_a_decision_is_bound_to_the_digest_it_was_given_for(kind: Kind) -> None:
    approval = {
        "id": "a",
        "run_id": "r",
        "step_key": "review",
        "status": "approved",
        "tier": "high",
        "action": {"tool": "shop.refund", "digest": "sha256:1"},
        "votes": [{"by": "key:ann", "decision": "approved", "at": NOW}],
        "requested_at": NOW,
    }
    server = Server(ok(approval))
    found = kind.call(server, "approve_approval", "a", digest="sha256:1")
    assert json.loads(server.asked[0].content) == {"digest": "sha256:1"}
    assert found.votes[0].decision == "approved"
    kind.call(server, "reject_approval", "a", reason="no")
    assert server.asked[1].url.path == "/api/approvals/a/reject"


def test_a_workflow_is_sent_as_it_was_written(kind: Kind) -> None:
    server = Server(ok({"name": "refund", "version": 2, "digest": "d", "created_at": NOW}, 201))
    assert kind.call(server, "apply_workflow", "name: refund # ü\n").version == 2
    assert server.asked[0].content == "name: refund # ü\n".encode()
    assert server.asked[0].headers["content-type"] == "application/yaml"


def test_revoking_a_key_needs_no_answer(kind: Kind) -> None:
    server = Server(httpx2.Response(204))
    assert kind.call(server, "revoke_key", "id") is None
    assert (server.asked[0].method, server.asked[0].url.path) == ("DELETE", "/api/keys/id")


def test_a_new_key_comes_with_its_secret(kind: Kind) -> None:
    server = Server(ok({"id": "1", "name": "ci", "role": "operator", "created_at": NOW, "key": "il_secret"}, 201))
    key = kind.call(server, "create_key", "ci", "operator")
    assert (key.role, key.key) == (Role.OPERATOR, "il_secret")


POLICY = {"version": 1, "digest": "d", "created_at": NOW}
RECEIPT = {
    "id": "rc",
    "run_id": "r",
    "step_key": "refund",
    "tool": "shop.refund",
    "idempotency_key": "k",
    "status": "in_doubt",
    "attempt": 1,
    "created_at": NOW,
}
GRANT = {"id": "g", "tool": "shop.tag", "tier": "low", "created_by": "ann", "created_at": NOW, "expires_at": NOW}
EVALUATED = {"answer": "deny", "reason": "forbidden by freeze", "rule_ids": ["freeze"]}


@pytest.mark.parametrize(
    ("method", "args", "kwargs", "answer", "sent"),
    [
        (
            *(
                "evaluate_policy",
                ("shop.refund", {"amount": 5}),
                {"role": "agent", "groups": ["ops"], "hour": 23},
                EVALUATED,
            ),
            (
                "POST /api/policy/evaluate",
                {
                    "tool": "shop.refund",
                    "input": {"amount": 5},
                    "role": "agent",
                    "groups": ["ops"],
                    "workflow": "",
                    "hour": 23,
                },
            ),
        ),
        (
            *("backtest_policy", ("permit…",), {"limit": 9}, {"decisions": 0, "changed": 0}),
            ("POST /api/policy/backtest", {"policy": "permit…", "limit": 9}),
        ),
        (
            *("resolve_receipt", ("rc", "happened"), {"output": {"id": 1}}, RECEIPT),
            ("POST /api/receipts/rc/resolve", {"outcome": "happened", "output": {"id": 1}}),
        ),
        (
            *("reverse_receipt", ("rc",), {"reason": "oops"}, RUN),
            ("POST /api/receipts/rc/reverse", {"reason": "oops"}),
        ),
        (
            *("decide_many", (["a", "b"], "reject"), {"reason": "no"}, {"items": []}),
            ("POST /api/approvals/decide", {"ids": ["a", "b"], "decision": "reject", "reason": "no"}),
        ),
        (
            *("give_grant", ("shop.tag", {"id": 1}), {"tier": "med", "expires_in": 60}, GRANT),
            ("POST /api/grants", {"tool": "shop.tag", "arguments": {"id": 1}, "tier": "med", "expires_in": 60}),
        ),
        (
            *("give_grant", ("shop.tag",), {"any_arguments": True, "expires_in": 60}, GRANT),
            (
                "POST /api/grants",
                {"tool": "shop.tag", "arguments": {}, "any_arguments": True, "tier": "low", "expires_in": 60},
            ),
        ),
        (
            *("decide_many", (["a", "b"], "approve"), {"digests": {"a": "d"}}, {"items": []}),
            ("POST /api/approvals/decide", {"ids": ["a", "b"], "decision": "approve", "digests": {"a": "d"}}),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_governed_is_sent_as_the_wire_says(
    kind: Kind, method: str, args: Any, kwargs: Any, answer: Any, sent: Any
) -> None:
    server = Server(ok(answer))
    kind.call(server, method, *args, **kwargs)
    (request,) = server.asked
    assert (f"{request.method} {request.url.path}", json.loads(request.content)) == sent
    assert request.headers["idempotency-key"]


def test_a_policy_is_put_as_it_was_written(kind: Kind) -> None:
    server = Server(httpx2.ReadError("reset"), ok(POLICY))
    assert kind.call(server, "publish_policy", "// ü\n").version == 1
    first, second = server.asked
    assert (second.method, second.url.path, second.content) == ("PUT", "/api/policy", "// ü\n".encode())
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]


def test_a_policy_that_is_refused_comes_back_with_its_faults(kind: Kind) -> None:
    faults = [{"file": "policy", "line": 2, "path": "large", "message": "no such tier"}]
    with pytest.raises(ApiError) as caught:
        kind.call(Server(problem(422, "POLICY_INVALID", errors=faults)), "publish_policy", "…")
    assert caught.value.fields["errors"] == faults


def test_an_edited_action_keeps_fields_that_become_nothing(kind: Kind) -> None:
    approval = {"id": "a", "run_id": "r", "step_key": "s", "status": "requested", "tier": "low", "requested_at": NOW}
    server = Server(ok({**approval, "action": {"digest": "d"}, "kind": "action", "approvers": ["finance"]}))
    found = kind.call(server, "approve_approval", "a", patch={"note": None})
    assert json.loads(server.asked[0].content) == {"patch": {"note": None}}
    assert (found.kind, found.approvers) == ("action", ["finance"])


def test_each_of_many_decisions_has_its_own_answer(kind: Kind) -> None:
    late = {"title": "Too late", "status": 409, "detail": "it is rejected", "code": "APPROVAL_DECIDED"}
    items = [{"id": "a", "ok": True, "status": "approved"}, {"id": "b", "ok": False, "problem": late}]
    first, second = kind.call(Server(ok({"items": items})), "decide_many", ["a", "b"], "approve").items
    assert (first.status, second.problem.code) == ("approved", "APPROVAL_DECIDED")


def test_receipts_grants_and_the_policy_are_read(kind: Kind) -> None:
    server = Server(ok({"items": [RECEIPT]}), ok(RECEIPT), ok({"items": [GRANT]}), ok({"items": []}), ok(POLICY))
    assert kind.call(server, "receipts", "r").items[0].status == "in_doubt"
    assert kind.call(server, "receipt", "rc").tool == "shop.refund"
    assert kind.call(server, "grants").items[0].uses == 0
    kind.call(server, "grants", all=True)
    assert kind.call(server, "policy").digest == "d"
    assert [request.url.raw_path.decode() for request in server.asked] == [
        "/api/runs/r/receipts",
        "/api/receipts/rc",
        "/api/grants",
        "/api/grants?all=true",
        "/api/policy",
    ]


def test_a_revoked_grant_is_answered(kind: Kind) -> None:
    server = Server(ok({**GRANT, "revoked_at": NOW}))
    assert kind.call(server, "revoke_grant", "g").revoked_at is not None
    assert (server.asked[0].method, server.asked[0].url.path) == ("DELETE", "/api/grants/g")


def test_a_grant_never_answers_for_high(kind: Kind) -> None:
    server = Server(ok(GRANT))
    with pytest.raises(ApiError, match="tier: "):
        kind.call(server, "give_grant", "shop.tag", tier="high")
    assert not server.asked


def test_runs_are_read_over_all_pages(kind: Kind) -> None:
    server = Server(
        ok({"items": [{**RUN, "id": "1"}, {**RUN, "id": "2"}], "next_cursor": "c"}),
        ok({"items": [{**RUN, "id": "3"}], "next_cursor": None}),
    )
    assert [run.id for run in kind.each(server, "iter_runs", workflow="refund")] == ["1", "2", "3"]
    assert dict(server.asked[1].url.params) == {"workflow": "refund", "cursor": "c"}


def test_a_newer_server_may_say_more(kind: Kind) -> None:
    assert kind.call(Server(ok({**RUN, "colour": "blue"})), "run", "r").id == "0198-run"


# ---------------------------------------------------------------- server address


def test_address_and_key_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLOCK_URL", "http://there:1/")
    monkeypatch.setenv("INTERLOCK_API_KEY", "il_env\n")
    server = Server(ok({"status": "ok"}))
    with Client(transport=httpx2.MockTransport(server)) as client:
        client.health()
    assert str(server.asked[0].url) == "http://there:1/healthz"
    assert server.asked[0].headers["authorization"] == "Bearer il_env"


@pytest.mark.parametrize("url", ["localhost:8420", "ftp://x", "http://", "nonsense"])
def test_an_address_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(Unreachable, match=r"is not an address; expected one like http://127\.0\.0\.1:8420"):
        Client(url)


def test_a_key_that_cannot_be_one_is_refused_at_once() -> None:
    with pytest.raises(ApiError, match="not an API key"):
        Client(key="il_é")


# ---------------------------------------------------------------- errors


def test_a_problem_becomes_an_error_with_its_fields(kind: Kind) -> None:
    with pytest.raises(ApiError, match="Not found: no such run") as caught:
        kind.call(Server(problem(404, "NOT_FOUND", hint="look again")), "run", "r")
    assert (caught.value.status, caught.value.code) == (404, "NOT_FOUND")
    assert caught.value.fields == {"hint": "look again"}


def test_a_foreign_error_page_is_named_and_not_shown(kind: Kind) -> None:
    with pytest.raises(ApiError, match=r"^http://interlock.test/api/runs/r answered 502 Bad Gateway$") as caught:
        kind.call(Server(httpx2.Response(502, text="<html>…")), "run", "r")
    assert caught.value.code == "HTTP_502"


def test_an_answer_that_is_not_interlocks_is_an_error(kind: Kind) -> None:
    with pytest.raises(ApiError, match="is not Interlock's"):
        kind.call(Server(ok({"hello": "world"})), "run", "r")


def test_a_body_that_would_be_refused_is_not_sent(kind: Kind) -> None:
    server = Server(ok(RUN))
    with pytest.raises(ApiError, match="deadline_seconds: expected more than 0"):
        kind.call(server, "start", "refund", deadline_seconds=-1)
    assert not server.asked


# ---------------------------------------------------------------- retries


def test_a_broken_connection_is_tried_again_with_the_same_key(kind: Kind) -> None:
    server = Server(httpx2.ReadError("reset"), httpx2.ConnectError("refused"), ok(RUN, 201))
    kind.call(server, "start", "refund")
    keys = {request.headers["idempotency-key"] for request in server.asked}
    assert (len(server.asked), len(keys)) == (3, 1)
    assert kind.pauses == [0.1, 0.3]


def test_two_calls_have_two_keys_and_a_given_key_is_kept(kind: Kind) -> None:
    server = Server(ok(RUN, 201))
    for given in (None, None, "mine"):
        kind.call(server, "start", "refund", idempotency_key=given)
    first, second, third = (request.headers["idempotency-key"] for request in server.asked)
    assert first != second and third == "mine"


def test_a_repeated_request_that_meets_itself_waits_for_the_answer(kind: Kind) -> None:
    server = Server(httpx2.ReadError("reset"), problem(409, "IDEMPOTENCY_CONFLICT"), ok(RUN, 201))
    assert kind.call(server, "start", "refund").id == "0198-run"


def test_other_conflicts_are_not_tried_again(kind: Kind) -> None:
    server = Server(problem(409, "RUN_TERMINAL_STATE"))
    with pytest.raises(ApiError):
        kind.call(server, "cancel", "r")
    assert len(server.asked) == 1


def test_nobody_there_says_how_to_start_one(kind: Kind) -> None:
    server = Server(httpx2.ConnectError("refused"))
    with pytest.raises(Unreachable, match=r"^no Interlock at http://interlock.test; start one with `interlock up`$"):
        kind.call(server, "runs")
    assert len(server.asked) == 4


def test_a_slow_answer_is_not_waited_for_twice(kind: Kind) -> None:
    server = Server(httpx2.ReadTimeout("slow"))
    with pytest.raises(Unreachable, match="did not answer in time"):
        kind.call(server, "runs")
    assert len(server.asked) == 1


# ---------------------------------------------------------------- following


class Chunks(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """A stream that sends its data and then, if configured, breaks."""

    def __init__(self, *chunks: str, then: Exception | None = None) -> None:
        self.chunks, self.then = chunks, then

    def __iter__(self) -> Iterator[bytes]:
        yield from (chunk.encode() for chunk in self.chunks)
        if self.then:
            raise self.then

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self:
            yield chunk


def stream(*chunks: str, then: Exception | None = None) -> httpx2.Response:
    return httpx2.Response(
        200, headers={"content-type": "text/event-stream; charset=utf-8"}, stream=Chunks(*chunks, then=then)
    )


def sse(seq: int, type: str = "step_transition") -> str:
    data = json.dumps({"seq": seq, "type": type, "at": NOW, "run_id": "r", "session_id": None, "data": {}})
    return f"id: {seq}\nevent: {type}\ndata: {data}\n\n"


END = "event: end\ndata: {}\n\n"


def seqs(kind: Kind, server: Server, **options: Any) -> list[int]:
    return [event.seq for event in kind.each(server, "follow", "r", **options)]


def test_following_ends_with_the_end_event(kind: Kind) -> None:
    server = Server(stream(sse(1), ": ping\n\n", sse(2), END, sse(3)))
    assert seqs(kind, server) == [1, 2]
    assert server.asked[0].headers["accept"] == "text/event-stream"


def test_a_job_is_followed_as_a_run_is(kind: Kind) -> None:
    told = json.dumps({"seq": 1, "type": "job_progress", "at": NOW, "data": {"done": 2}})
    server = Server(stream(f"id: 1\ndata: {told}\n\n", then=httpx2.ReadError("reset")), stream(END))
    assert [(event.seq, event.data) for event in kind.each(server, "follow_job", "j")] == [(1, {"done": 2})]
    assert [asked.url.path for asked in server.asked] == ["/api/jobs/j/events"] * 2
    assert server.asked[1].headers["last-event-id"] == "1"


def test_an_end_with_a_number_of_its_own_is_an_event(kind: Kind) -> None:
    assert seqs(kind, Server(stream(sse(1), sse(2, "end")))) == [1, 2]


def test_following_goes_on_after_a_break_where_it_was(kind: Kind) -> None:
    server = Server(
        stream(sse(4), sse(5), sse(6)[:20], then=httpx2.ReadError("reset")),
        httpx2.ConnectError("refused"),
        httpx2.Response(503),
        stream(sse(6)),  # a clean close, but too early
        stream(sse(6), sse(7), END),  # repeats an event
    )
    assert seqs(kind, server, after=3) == [4, 5, 6, 7]
    assert [request.headers["last-event-id"] for request in server.asked] == ["3", "5", "5", "5", "6"]
    assert [request.url.params["after"] for request in server.asked] == ["3", "5", "5", "5", "6"]


def test_pauses_grow_while_nothing_comes_and_shrink_when_something_does(kind: Kind) -> None:
    silent = [stream() for _ in range(8)]
    assert seqs(kind, Server(*silent, stream(sse(1)), stream(sse(2), END))) == [1, 2]
    assert kind.pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 0.1]


def test_a_missing_number_is_asked_for_again(kind: Kind) -> None:
    server = Server(stream(sse(1), sse(3)), stream(sse(2), sse(3), END))
    assert seqs(kind, server) == [1, 2, 3]


def test_a_number_the_server_does_not_have_is_asked_for_once(kind: Kind) -> None:
    server = Server(stream(sse(1), sse(3)), stream(sse(3), END))
    assert seqs(kind, server) == [1, 3]


def test_following_something_that_does_not_exist_is_an_error(kind: Kind) -> None:
    server = Server(problem(404, "NOT_FOUND"))
    with pytest.raises(ApiError, match="no such run"):
        seqs(kind, server)
    assert len(server.asked) == 1


@pytest.mark.parametrize("answer", [lambda: ok({}), lambda: stream("data: {}\n\n")])
def test_a_stream_that_is_not_interlocks_is_an_error(kind: Kind, answer: Callable[[], httpx2.Response]) -> None:
    with pytest.raises(ApiError, match="is not Interlock's"):
        seqs(kind, Server(answer()))


def test_a_follower_gives_up_when_the_server_stays_away(kind: Kind) -> None:
    server = Server(stream(sse(1)), httpx2.ConnectError("refused"))
    with pytest.raises(Unreachable, match="no Interlock at"):
        seqs(kind, server)
    assert 20 < sum(kind.pauses) < 60


def test_a_follower_that_never_got_through_gives_up_soon(kind: Kind) -> None:
    with pytest.raises(Unreachable):
        seqs(kind, Server(httpx2.ConnectError("refused")))
    assert len(kind.pauses) == 3


def test_a_follower_of_a_quiet_run_outlasts_any_number_of_cuts(kind: Kind) -> None:
    cuts: list[httpx2.Response | Exception] = []
    for _ in range(40):
        cuts += [stream(": ping\n\n", then=httpx2.ReadError("cut")), httpx2.ConnectError("refused")]
    assert seqs(kind, Server(*cuts, stream(sse(1), END))) == [1]
