"""The policy: reading it, trying another one out, and putting that in force once its effect was looked at."""

import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError

from interlock.api.policy import backtested, judged
from interlock.console.page import COOKIE, Said, Visit, Visitor, done, number_of, render
from interlock.console.texts import Comparison, Cut, compare, cut
from interlock.engine import policies
from interlock.errors import Conflict, Invalid, NotFound, Problem
from interlock.governance.policy import DEFAULT_POLICY, CasesInvalid, PolicyInvalid, compile_policy, run_cases
from interlock.governance.policy_text import statements
from interlock.governance.roles import Permission
from interlock.store.pool import Row, Tx
from interlock.tools.registry import explain
from interlock.wire import Backtest, Evaluate, Role

router = APIRouter()

Body = TypeVar("Body", bound=BaseModel)

_VERSIONS = 50
# A longer text is edited with an editor; here it would make the page too heavy for a phone.
_MOST_TO_EDIT = 48_000
_CHANGES = 60


@dataclass(frozen=True, slots=True)
class Current:
    """The policy in force. Version 0 is the one that every tenant starts with."""

    version: int
    text: str
    digest: str | None
    row: Row


@dataclass(slots=True)
class Desk:
    """What lies before whoever works on a policy: what they typed, and what came of it."""

    text: str
    typed: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    # In which of the forms the error is to be shown.
    did: str = ""
    faults: list[dict[str, Any]] | None = None
    decision: dict[str, Any] | None = None
    backtest: dict[str, Any] | None = None
    changes: Comparison | None = None
    cases: list[Any] | None = None
    case_faults: list[dict[str, Any]] | None = None
    # Proof that exactly this text was tried, over exactly this version.
    tried: str | None = None


@router.get("/policy")
async def show(request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    version = number_of(request.query_params.get("version"), "version", least=0, most=2**31 - 1)
    against = number_of(request.query_params.get("against"), "against", least=0, most=2**31 - 1)
    current = await _current(visit)
    if version is None:
        # A tool's page asks to have it tried.
        wanted = {"tool": tool} if (tool := request.query_params.get("tool")) else {}
        return await _page(request, visit, current, Desk(current.text, wanted))
    text = await _text_of(visit, version)
    against = max(version - 1, 0) if against is None else against
    return await render(
        request, visit, "policy_version.html", version=version, against=against, text=cut(text),
        changes=compare(await _text_of(visit, against), text), versions=await _versions(visit), current=current,
    )  # fmt: skip


async def _current(visit: Visitor) -> Current:
    row = await visit.services.database.row("policy_in_force", visit.who.tenant_id)
    if row is None or (row["version"] and row["text"] is None):
        raise NotFound("this tenant has no policy", code="POLICY_NOT_FOUND")
    return Current(row["version"], row["text"] if row["version"] else DEFAULT_POLICY, row["digest"], row)


async def _text_of(visit: Visitor, version: int) -> str:
    if version == 0:
        return DEFAULT_POLICY
    row = await visit.services.database.row("policy_version", visit.who.tenant_id, version)
    if row is None:
        raise NotFound(f"there is no version {version} of the policy")
    text: str = row["text"]
    return text


async def _versions(visit: Visitor) -> list[Row]:
    return await visit.services.database.fetch("policy_versions", visit.who.tenant_id, _VERSIONS)


async def _page(request: Request, visit: Visitor, current: Current, desk: Desk, status: int = 200) -> Response:
    tools = visit.services.policies.tools.all()
    # What somebody just typed comes back whole, however long it is.
    whole = Cut(desk.text) if "edits" in desk.typed else cut(desk.text, _MOST_TO_EDIT)
    return await render(
        request, visit, "policy.html", status=status, current=current, desk=desk, shown=whole,
        editable=visit.may(Permission.ADMINISTER) and not whole.left, lines=desk.text.count("\n") + 1,
        line_of=dict(enumerate(desk.text.split("\n"), 1)) if desk.faults else {}, rules=len(statements(current.text)),
        tools=[tool.name for tool in tools], roles=list(Role), versions=await _versions(visit),
        shown_changes=_CHANGES,
    )  # fmt: skip


# ---------------------------------------------------------------- trying it


@router.post("/policy")
async def work_on(request: Request, visit: Visit, said: Said) -> Response:
    """One form, whose buttons say what is to be done with the text."""
    visit.who.require(Permission.READ)
    do = said.get("do", "check")
    if do not in _DOES:
        raise Invalid(f"what can be done with a policy is {', '.join(_DOES)}; not {do!r}")
    current = await _current(visit)
    # Who may not edit sends no text: then it is about the one in force. A browser sends its own ends of lines.
    text = said.get("text", "").replace("\r\n", "\n") if "edits" in said else current.text
    desk = Desk(text, said, did=do)
    try:
        answer = await _DOES[do](request, visit, current, desk)
    except PolicyInvalid as wrong:
        desk.faults, desk.error = wrong.fields["errors"], wrong.title
    except CasesInvalid as wrong:
        desk.case_faults, desk.error = wrong.fields["errors"], wrong.title
    except Problem as problem:
        if problem.status == 403:
            raise
        desk.error = problem.detail
    else:
        if answer is not None:
            return answer
    return await _page(request, visit, current, desk, 422 if desk.error else 200)


async def _check(request: Request, visit: Visitor, current: Current, desk: Desk) -> None:
    compile_policy(desk.text, visit.services.policies.facts())
    desk.faults = []


async def _evaluate(request: Request, visit: Visitor, current: Current, desk: Desk) -> None:
    body = _body(
        Evaluate, tool=desk.typed.get("tool", ""), input=_json(desk.typed.get("input", "{}")),
        role=desk.typed.get("role", Role.OPERATOR),
        hour=number_of(desk.typed.get("hour"), "the hour", least=0, most=23),
        policy=desk.text if desk.text != current.text else None,
    )  # fmt: skip
    desk.decision = await judged(visit.services, visit.who, body)


async def _test(request: Request, visit: Visitor, current: Current, desk: Desk) -> None:
    facts = visit.services.policies.facts()
    cases = desk.typed.get("cases", "").replace("\r\n", "\n")
    if not cases.strip():
        raise Invalid("write cases first: a list, each with a tool, an input and what is expected")
    compiled = compile_policy(desk.text, facts)
    desk.cases = run_cases(compiled, cases, facts)


async def _backtest(request: Request, visit: Visitor, current: Current, desk: Desk) -> None:
    found = await backtested(visit.services, visit.who, _body(Backtest, policy=desk.text))
    desk.backtest = found | {"changes": [change | {"brief": _brief(change["summary"])} for change in found["changes"]]}
    desk.changes = compare(current.text, desk.text)
    desk.tried = _proof(request, desk.text, current.version)


def _brief(summary: str) -> str:
    """Without the ids: where it was is told beside it."""
    return re.sub(r":[0-9a-f-]{36}$", "", summary.partition(" in run ")[0])


def _body(model: type[Body], **fields: Any) -> Body:
    """What the API would be sent, by the same rules."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise Invalid(explain(error, show_input=False)) from None


def _json(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Invalid(f"the input is not JSON: {error}") from None


# ---------------------------------------------------------------- putting it in force


async def _publish(request: Request, visit: Visitor, current: Current, desk: Desk) -> Response:
    visit.who.require(Permission.ADMINISTER)
    found = visit.services
    given = desk.typed.get("tried", "")
    if not hmac.compare_digest(given.encode(), _proof(request, desk.text, current.version).encode()):
        raise Conflict(_untried(current, desk))
    compiled = compile_policy(desk.text, found.policies.facts())

    async def work(tx: Tx) -> Row:
        # Under the lock that gives out versions: what was tried was tried against the one that is still in force.
        await tx.row("lock_lane", visit.who.tenant_id)
        row = await tx.row("policy_in_force", visit.who.tenant_id)
        if row is None or row["version"] != current.version:
            raise Conflict(_MEANWHILE)
        return await policies.publish(tx, found.database, visit.who, desk.text, compiled)

    row = await found.database.command(work)
    found.policies.forget(str(visit.who.tenant_id))  # here at once; other processes are told
    return done("/policy", f"Version {row['version']} is in force.")


_MEANWHILE = "another version was published meanwhile; look at what it changed, and backtest this text against it"


def _untried(current: Current, desk: Desk) -> str:
    if desk.typed.get("over") not in (None, str(current.version)):
        return _MEANWHILE
    return "this text was not backtested as it stands now; backtest it, look at what would differ, then publish"


def _proof(request: Request, text: str, version: int) -> str:
    """That this session was shown a backtest of this text over this version. Its key is in no page."""
    said = f"interlock-backtest {version} {hashlib.sha256(text.encode()).hexdigest()}"
    return hmac.new(request.cookies[COOKIE].encode(), said.encode(), hashlib.sha256).hexdigest()


_Does = Callable[[Request, Visitor, Current, Desk], Awaitable[Response | None]]
_DOES: dict[str, _Does] = {
    "check": _check, "evaluate": _evaluate, "test": _test, "backtest": _backtest, "publish": _publish,
}  # fmt: skip
