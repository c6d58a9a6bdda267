"""A shop to govern: its tools count their calls, and its people use HTTP."""

import asyncio
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import httpx2
import pytest
from tests.rig import Rig


@dataclass
class Person:
    """A person with a key. `post` and `get` return (status, body)."""

    name: str
    http: httpx2.AsyncClient
    key_id: str = ""

    async def get(self, path: str, **params: Any) -> Any:
        return (await self.http.get(path, params=params)).json()

    async def post(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        answer = await self.http.post(path, json=body, **options)
        return answer.status_code, answer.json()

    async def approve(self, approval_id: str, **body: Any) -> tuple[int, Any]:
        return await self.post(f"/api/approvals/{approval_id}/approve", body)

    async def reject(self, approval_id: str, **body: Any) -> tuple[int, Any]:
        return await self.post(f"/api/approvals/{approval_id}/reject", body)

    async def publish(self, policy: str) -> tuple[int, Any]:
        answer = await self.http.put("/api/policy", content=policy.encode())
        return answer.status_code, answer.json()


@dataclass
class Shop:
    """The external systems that the tools change."""

    rig: Rig
    done: list[str] = field(default_factory=list)

    async def person(self, name: str, role: str = "approver", *groups: str, workspace_id: str | None = None) -> Person:
        about = {"name": name, "role": role, "groups": groups, "workspace_id": workspace_id}
        made = await self.rig.http().post("/api/keys", json=about)
        assert made.status_code == 201, made.text
        return Person(name, self.rig.http(made.json()["key"]), made.json()["id"])

    @property
    def admin(self) -> Person:
        return Person("admin", self.rig.http())

    async def revoke(self, who: Person) -> None:
        assert (await self.rig.http().delete(f"/api/keys/{who.key_id}")).status_code == 200

    async def start(self, who: Person, workflow: str, **input: Any) -> UUID:
        status, body = await who.post("/api/runs", {"workflow": workflow, "input": input})
        assert status in (200, 201, 202), body
        return UUID(body["id"])

    async def question(self, run_id: UUID, status: str = "requested") -> Any:
        """Return the run's single approval in that state."""
        page = await self.admin.get("/api/approvals", run_id=str(run_id), status=status)
        assert len(page["items"]) == 1, page
        return page["items"][0]

    async def receipts(self, run_id: UUID) -> list[Any]:
        items: list[Any] = (await self.admin.get(f"/api/runs/{run_id}/receipts"))["items"]
        return items

    async def held(self, run_id: UUID) -> Any:
        """Work until the run waits for approval, and return the approval."""
        run = await self.rig.work_until(run_id, "waiting_approval")
        assert run["status"] == "waiting_approval", (run["reason"], run["error"])
        return await self.question(run_id)

    async def ended(self, run_id: UUID) -> dict[str, Any]:
        run = await self.rig.work_until(run_id)
        assert run["completed_at"], run
        return run


@pytest.fixture
def shop(rig: Rig) -> Shop:
    return Shop(rig)


class Crash(GeneratorExit):
    """The process is gone, as far as the interrupted code can tell: no code handles the end of its own coroutine."""


async def lose(rig: Rig, task: "asyncio.Task[None]") -> None:
    """Kill a worker without a chance to write, and let the others notice."""
    await kill(rig, task)
    await notice(rig)


async def kill(rig: Rig, task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() or task.exception() is None or isinstance(task.exception(), (Crash, asyncio.CancelledError))
    # A claim that the worker sent continues at the server, and would take the next run for a dead worker.
    busy = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND state = 'active'"
    while len(await rig.sql(busy)) > 1:
        pass
    await rig.sql("DELETE FROM interlock.dispatch_slot")  # and so would the dead worker's open seat


async def notice(rig: Rig) -> None:
    rig.clock.advance(3600)
    await rig.sweep()
