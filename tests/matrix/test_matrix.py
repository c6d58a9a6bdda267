"""Every endpoint × role × own workspace, other workspace, other tenant.

The endpoints come from the OpenAPI document, and `expected.py` lists each one's requirements: an endpoint that is
missing there fails. For foreign rows the answer is 404, as for ids that do not exist, and no answer contains a
foreign id, name or value.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import httpx2
import pytest

from interlock.engine.access.principal import Principal
from interlock.policy.roles import MAY
from interlock.wire import Role
from tests.matrix.expected import EXPECTED, Reach, Rule
from tests.matrix.world import ROLES, Place, World, furnish
from tests.rig import Rig

_VERBS = ("get", "post", "put", "patch", "delete")


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{verb.upper()} {path}": operation
        for path, verbs in document["paths"].items()
        for verb, operation in verbs.items()
        if verb in _VERBS
    }


class Matrix:
    def __init__(self, world: World, document: dict[str, Any]) -> None:
        self.world, self.operations = world, operations(document)
        self.faults: list[str] = []
        self.asked = 0

    async def ask(
        self, operation: str, role: Role | None, place: Place, query: dict[str, str] | None = None, *,
        whole: bool = False,
    ) -> str:  # fmt: skip
        """Send one request for things in a place, record every fault of the answer, and return the answer."""
        world, rule = self.world, EXPECTED[operation]
        verb, path = operation.split(" ")
        body = place.body(rule.body)
        content = {"content": body.encode()} if isinstance(body, str) else {"json": body} if body is not None else {}
        client = world.tenant_admin if whole else world.callers[role]
        answer = await client.request(verb, place.path(path), params=query, **content)  # type: ignore[arg-type]
        self.asked += 1
        theirs = [world.rival] if whole else [world.neighbour, world.rival]
        may = whole and rule.reach is Reach.WHOLE and answer.status_code < 500
        wrong = None if may else self._wrong(rule, role, place, answer, query is not None)
        if wrong := wrong or self._leak(theirs, answer, [body, query]):
            whose = next(name for name in ("own", "neighbour", "rival") if getattr(world, name) is place)
            self.faults.append(f"{operation} as {role or 'nobody'} for {whose}: {wrong}: {answer.text[:200]}")
        return answer.text

    def _wrong(self, rule: Rule, role: Role | None, place: Place, answer: httpx2.Response, listing: bool) -> str | None:
        status, is_foreign = answer.status_code, place is not self.world.own
        if rule.reach is Reach.SENDER or role is None:
            return _unless(status, 401)
        if rule.permission not in MAY[role] or rule.reach in (Reach.WHOLE, Reach.OPERATORS):
            return _unless(status, 404 if listing else 403)
        known = place is self.world.neighbour and rule.reach is Reach.TENANT
        if is_foreign and rule.reach in (Reach.WORKSPACE, Reach.TENANT) and not known:
            return _unless(status, 404, rule.foreign)
        if listing and answer.is_success and answer.json()["items"]:
            return "it lists something"
        if answer.request.method == "GET" and not listing:
            return _unless(status, rule.own or 200)
        return f"{status}" if status != rule.own and (status >= 500 or status in (401, 403)) else None

    def _leak(self, theirs: list[Place], answer: httpx2.Response, asked: Any) -> str | None:
        """An answer may repeat the request. Names that the whole tenant knows are not secret within a workspace."""
        text = answer.text
        for said in sorted(_texts([str(answer.request.url.path), asked]), key=len, reverse=True):
            text = text.replace(said, "")
        world = self.world
        for name in [world.neighbour.name(kind) for kind in ("agents", "workflows")]:
            text = text.replace(name, "")
        if answer.request.url.path.startswith(("/api/agents", "/api/workflows")):
            text = text.replace(world.neighbour.mark, "")
        found = [secret for other in theirs for secret in other.secrets if secret in text]
        return f"it contains {found}" if found else None


def _unless(status: int, *expected: int) -> str | None:
    return None if status in expected else f"{status} and not {' or '.join(map(str, expected))}"


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
            yield from (part for part in value.split("/") if len(part) > 5 and part != "api")
        case dict():
            for each in value.values():
                yield from _texts(each)
        case list():
            for each in value:
                yield from _texts(each)


def looking_first(names: Iterable[str]) -> list[str]:
    """Sort reads before changes, so that every request still finds its rows; ends and deletions come last."""
    late = ("cancel", "interrupt", "DELETE", "reject", "approve", "decide")
    return sorted(names, key=lambda name: (not name.startswith("GET"), any(word in name for word in late), name))


def filters(operation: dict[str, Any], place: Place) -> dict[str, str]:
    """Return the query parameters of a list that name a row."""
    known = place.ids | {"parent_job_id": place.ids["job_id"], "parent_run_id": place.ids["run_id"]}
    wanted = [each["name"] for each in operation.get("parameters", []) if each["in"] == "query"]
    return {name: known[name] for name in wanted if name in known}


def test_every_endpoint_has_an_expectation(rig: Rig) -> None:
    there = operations(rig.app.openapi())
    for name in sorted(there.keys() - EXPECTED.keys()):
        pytest.fail(
            f"{name} has no entry in tests/matrix/expected.py. Add "
            f'`"{name}": Rule(P.<permission>, <reach>, <body>)`: the permission that its endpoint requires, and whose '
            "rows it reaches (see Reach). Then the matrix tries it with every role on rows of others."
        )
    assert EXPECTED.keys() == there.keys(), "an entry of tests/matrix/expected.py names no endpoint any more"


def test_every_endpoint_says_whether_it_needs_a_key(rig: Rig) -> None:
    document = rig.app.openapi()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for name, operation in operations(document).items():
        assert operation.get("security") == ([] if EXPECTED[name].permission is None else [{"key": []}]), name


async def test_no_role_reaches_rows_of_another_workspace_or_tenant(rig: Rig) -> None:
    world = await furnish(rig)
    matrix = Matrix(world, rig.app.openapi())
    for place in (world.neighbour, world.rival):
        for name in looking_first(matrix.operations):
            for role in ROLES:
                await matrix.ask(name, role, place)
            if query := filters(matrix.operations[name], place):
                await matrix.ask(name, Role.ADMIN, place, query)
            if place is world.rival:
                await matrix.ask(name, Role.ADMIN, place, query or None, whole=True)
    for name in looking_first(matrix.operations):
        for role in ROLES:
            await matrix.ask(name, role, world.own)
    assert not matrix.faults, "\n".join(matrix.faults)
    assert matrix.asked > 3 * len(ROLES) * 100


async def test_the_matrix_finds_a_check_of_the_workspace_that_is_missing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, for rows whose workspace Python compares."""
    world = await furnish(rig)
    monkeypatch.setattr(Principal, "reaches", lambda *_: True)
    found = set()
    for name in looking_first(EXPECTED):
        matrix = Matrix(world, rig.app.openapi())
        await matrix.ask(name, Role.ADMIN, world.neighbour)
        found |= {name for _ in matrix.faults}
    assert {"GET /api/runs/{run_id}", "GET /api/approvals/{approval_id}", "GET /api/sessions/{session_id}"} <= found
