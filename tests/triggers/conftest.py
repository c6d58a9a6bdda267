"""A workflow to start, secrets to sign with, and short tracebacks."""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import orjson
import pytest
import structlog

from interlock.engine.access import secrets
from tests.rig import Rig
from tests.triggers.senders import SECRET, STANDARD_SECRET

Apply = Callable[..., Awaitable[Any]]


@pytest.fixture(scope="session", autouse=True)
def _plain_tracebacks() -> Iterator[None]:
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[structlog.processors.add_log_level, renderer])
    yield
    structlog.reset_defaults()


@pytest.fixture
async def apply(rig: Rig) -> Apply:
    """Apply a trigger named `hook` of workflow `work`, over HTTP."""
    await rig.apply("{name: work, steps: [{id: a, tool: t.echo}]}")
    await rig.apply("{name: gate, steps: [{id: ask, approval: {}}]}")
    for name, value in {"gh": SECRET, "std": STANDARD_SECRET}.items():
        await rig.database.run_in_transaction(
            lambda tx, n=name, v=value: secrets.put(tx, rig.database, rig.admin, n, v, tools=[])
        )  # type: ignore[misc]

    async def post(status: int = 201, **definition: Any) -> Any:
        body = {"name": "hook", "workflow": "work"} | definition
        answer = await rig.http().post("/api/triggers", content=orjson.dumps(body))
        assert answer.status_code == status, answer.text
        return answer.json()

    return post
