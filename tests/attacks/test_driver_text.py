"""No answer contains text from the database driver, a statement or a traceback: security L4."""

import re
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import httpx2
import pytest

from tests.matrix.expected import EXPECTED
from tests.rig import Rig

_TEXTS = re.compile(
    r"asyncpg|psycopg|postgres|sqlstate|\brelation\b|\bconstraint\b|\bcolumn\b(?! \d)|syntax error|traceback|\.py\b"
    r"|\$\d|query argument|expected str|int32|int64|int8|invalid byte sequence|\bSELECT\b|\bINSERT\b|\bUPDATE\b"
    r"|\bWHERE\b|secret_table|10\.1\.2\.3",
    re.IGNORECASE,
)
_HUGE = "9" * 400
_VALUES = [
    "\x00",
    "a\x00b",
    "\ud800",
    _HUGE,
    "-1",
    str(2**31),
    str(2**63),
    "'; DROP TABLE interlock.run; --",
    "019e" * 300,
    "nope",
]
_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b"\xff\xfe",
    b"[" * 5000,
    b'{"\\u0000": "\\u0000"}',
    b'{"name": "\\ud800"}',
]


def _said(answer: httpx2.Response) -> str | None:
    """Return forbidden text in an answer. Only problems are checked: other answers show users' own data."""
    found = _TEXTS.search(answer.text) if answer.status_code >= 400 else None
    return (
        f"{answer.request.method} {answer.request.url!s:.80} {answer.status_code}: {found[0]} in {answer.text[:300]}"
        if found
        else None
    )


@pytest.fixture
async def client(rig: Rig) -> httpx2.AsyncClient:
    await rig.apply("name: gate\nsteps: [{id: a, approval: {summary: go}}]")
    return rig.http()


def _filled(body: Any, value: Any) -> Any:
    """Return the same shape, with `value` in place of every text and number."""
    match body:
        case dict():
            return {name: _filled(each, value) for name, each in body.items()}
        case list():
            return [_filled(each, value) for each in body]
        case bool():
            return body
        case _:
            return value


async def test_wrong_requests_are_not_answered_with_the_drivers_words(rig: Rig, client: httpx2.AsyncClient) -> None:
    """Every endpoint, with values that no column and no JSON parser accepts."""
    said, asked = [], 0
    parameters = rig.app.openapi()["paths"]
    for operation, rule in EXPECTED.items():
        verb, path = operation.split(" ")
        queries = [
            each["name"] for each in parameters[path][verb.lower()].get("parameters", ())
            if each["in"] == "query" and each["name"] != "wait"
        ]  # fmt: skip
        requests: list[tuple[str, dict[str, Any]]] = []
        for value in _VALUES:
            safe = value.encode("utf-8", "surrogatepass").hex()
            escaped = "".join(f"%{safe[at : at + 2]}" for at in range(0, len(safe), 2))
            there = re.sub(r"\{\w+\}", lambda _, text=escaped: text, path)
            query = "&".join(f"{name}={escaped}" for name in queries)
            body = {} if rule.body is None else {"json": _filled(rule.body, value if "\ud800" not in value else "\x00")}
            requests.append((f"{there}?{query}" if query else there, body))
            if rule.body is not None and value.isdigit():
                requests.append((there, {"content": f'{{"name": {value}, "limit": {value}}}'.encode()}))
        plain = re.sub(r"\{\w+\}", "01990000-0000-7000-8000-000000000000", path)
        requests += [(plain, {"content": body}) for body in _BODIES if verb != "GET"]
        for there, content in requests:
            headers = {"Content-Type": "application/json"} if "content" in content else {}
            answer = await client.request(verb, there, headers=headers, **content)
            asked += 1
            assert answer.status_code != 500, (operation, answer.text)
            if text := _said(answer):
                said.append(text)
    assert said == []
    assert asked > 1000


FAULTS: dict[str, Callable[[], Exception]] = {
    "a constraint": lambda: asyncpg.UniqueViolationError(
        'duplicate key violates unique constraint "secret_table_pkey"'
    ),
    "a missing table": lambda: asyncpg.UndefinedTableError('relation "secret_table" does not exist'),
    "a syntax error": lambda: asyncpg.PostgresSyntaxError('syntax error at or near "SELECT secret_table"'),
    "a value": lambda: asyncpg.DataError("invalid input for query argument $3: expected str, got int (int32)"),
    "a number": lambda: asyncpg.NumericValueOutOfRangeError("integer out of range in column secret_table.x"),
    "a deadlock": lambda: asyncpg.DeadlockDetectedError("Process 1 waits for relation secret_table"),
    "a time-out": lambda: asyncpg.QueryCanceledError("canceling SELECT FROM secret_table"),
    "a lost server": lambda: ConnectionRefusedError(111, "connect to postgres at 10.1.2.3 failed"),
    "a bug": lambda: RuntimeError('File "secret.py": SELECT * FROM secret_table'),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_errors_of_the_database_are_not_answered_with_its_words(
    rig: Rig, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Every statement fails, as reads and in transactions, in the API and in the console."""
    rig.mount_console()
    console, api = rig.http(""), rig.http()
    assert (await console.post("/signin", data={"key": rig.admin_key})).status_code == 303
    assert (await api.get("/api/runs")).status_code == 200
    rig.settings.database_patience_seconds = 0.05

    def failing(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(connection: Any, statement: str, *args: Any, **options: Any) -> Any:
            if statement.startswith("LISTEN"):  # the listener, which answers nobody
                return await method(connection, statement, *args, **options)
            raise FAULTS[fault]()

        return call

    for owner in (asyncpg.Connection, asyncpg.pool.PoolConnectionProxy):
        for name in ("fetch", "fetchrow", "fetchval"):
            monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    asks: list[Callable[[], Awaitable[httpx2.Response]]] = [
        lambda: api.get("/api/runs"),
        lambda: api.get("/api/runs/01990000-0000-7000-8000-000000000000"),
        lambda: api.post("/api/runs", json={"workflow": "gate"}),
        lambda: api.post("/api/events", json={"type": "a.b", "correlation": "c"}),
        lambda: api.post("/api/workflows", json={"name": "x", "steps": [{"id": "a", "approval": {}}]}),
        lambda: api.put("/api/policy", content='@id("a") permit (principal, action, resource);'),
        lambda: api.post("/api/hooks/none", json={}),
        lambda: rig.http("il_wrong").get("/api/runs"),
        lambda: api.get("/readyz"),
        lambda: console.get("/runs"),
        lambda: console.post("/signin", data={"key": "il_other"}),
    ]
    answers = [await ask() for ask in asks]
    assert [text for answer in answers if (text := _said(_without_page(answer)))] == []
    assert all(answer.status_code >= 400 for answer in answers), [answer.status_code for answer in answers]


def _without_page(answer: httpx2.Response) -> httpx2.Response:
    """Remove the page's own scripts and labels around the message."""
    if "html" not in answer.headers.get("content-type", ""):
        return answer
    inside = re.sub(r"<[^>]*>", " ", answer.text)
    return httpx2.Response(answer.status_code, text=inside, request=answer.request)
