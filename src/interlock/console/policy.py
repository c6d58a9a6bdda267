"""The policy: reading it, trying another one, and publishing it after a look at its effect."""

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

from interlock.api.limits import COOKIE
from interlock.api.policy import backtested, judged
from interlock.compute import pool
from interlock.console.diff import Comparison, Cut, compare, cut
from interlock.console.rendering import FormFields, Visit, Visitor, done, number_of, render
from interlock.engine import policies
from interlock.errors import Conflict, InterlockError, Invalid, NotFound
from interlock.policy.policy import DEFAULT_POLICY, CasesInvalid, PolicyInvalid, check_policy, results_of_cases
from interlock.policy.roles import Permission
from interlock.policy.source_scan import statements
from interlock.store.pool import Row, Tx
from interlock.wire import Backtest, Evaluate, Role
from interlock.wire.validation_errors import explain

router = APIRouter()

Body = TypeVar("Body", bound=BaseModel)

_VERSIONS = 50
# A longer text needs an editor; here it would make the page too large for a phone.
_MOST_TO_EDIT = 48_000
_CHANGES = 60
# The button's value to publish a policy that allows more than the previous one.
_ALTHOUGH_LOOSER = "publish-looser"


@dataclass(frozen=True, slots=True)
class Current:
    """The policy in force. Version 0 is the built-in policy."""

    version: int
    text: str
    digest: str | None
    row: Row


@dataclass(slots=True)
class Desk:
    """The state of the policy form: the typed text and the results."""

    text: str
    typed: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    # The form that shows the error.
    did: str = ""
    faults: list[dict[str, Any]] | None = None
    decision: dict[str, Any] | None = None
    backtest: dict[str, Any] | None = None
    changes: Comparison | None = None
    cases: list[Any] | None = None
    case_faults: list[dict[str, Any]] | None = None
    # Proof that exactly this text was backtested against exactly this version.
    tried: str | None = None
    # Examples that need less under this text than under the policy in force.
    looser: list[dict[str, Any]] = field(default_factory=list)


@router.get("/policy")
async def show(request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    version = number_of(request.query_params.get("version"), "version", least=0, most=2**31 - 1)
    against = number_of(request.query_params.get("against"), "against", least=0, most=2**31 - 1)
    current = await _current(visit)
    if version is None:
        # A tool's page links here to evaluate that tool.
        wanted = {"tool": tool} if (tool := request.query_params.get("tool")) else {}
        return await _page(request, visit, current, Desk(current.text, wanted))
    text = await _text_of(visit, version)
    against = max(version - 1, 0) if against is None else against
    return await render(
        request, visit, "policy_version.html", version=version, against=against, text=cut(text),
        changes=await compare(visit.who.tenant_id, await _text_of(visit, against), text),
        versions=await _versions(visit), current=current,
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
    return await visit.services.database.fetch("policy_versions", visit.who.tenant_id, _VERSIONS, None, None)


async def _page(request: Request, visit: Visitor, current: Current, desk: Desk, status: int = 200) -> Response:
    tools = visit.services.policies.tools.of_tenant(visit.who.tenant).all()
    # Text that was just typed is returned in full, however long.
    whole = Cut(desk.text) if "edits" in desk.typed else cut(desk.text, _MOST_TO_EDIT)
    return await render(
        request, visit, "policy.html", status=status, current=current, desk=desk, shown=whole,
        editable=visit.may(Permission.ADMINISTER) and not whole.left,
        lines=desk.text.removesuffix("\n").count("\n") + 1,
        line_of=dict(enumerate(desk.text.split("\n"), 1)) if desk.faults else {}, rules=len(statements(current.text)),
        tools=[tool.name for tool in tools], roles=list(Role), versions=await _versions(visit),
        shown_changes=_CHANGES, although_looser=_ALTHOUGH_LOOSER,
    )  # fmt: skip


# ---------------------------------------------------------------- trying a policy


@router.post("/policy")
async def work_on(request: Request, visit: Visit, said: FormFields) -> Response:
    """Handle the form. The button determines the operation on the text."""
    visit.who.require(Permission.READ)
    do = said.get("do", "check")
    if do not in _DOES:
        raise Invalid(f"what can be done with a policy is {', '.join(_DOES)}; not {do!r}")
    current = await _current(visit)
    # Without permission to edit, the form sends no text and uses the policy in force. Browsers send CRLF line ends.
    text = said.get("text", "").replace("\r\n", "\n") if "edits" in said else current.text
    desk = Desk(text, said, did=do)
    try:
        answer = await _DOES[do](request, visit, current, desk)
    except PolicyInvalid as wrong:
        desk.faults, desk.error = wrong.fields["errors"], wrong.title
    except CasesInvalid as wrong:
        desk.case_faults, desk.error = wrong.fields["errors"], wrong.title
    except InterlockError as problem:
        if problem.status == 403:
            raise
        desk.error = problem.detail
    else:
        if answer is not None:
            return answer
    return await _page(request, visit, current, desk, 422 if desk.error else 200)


async def _check(request: Request, visit: Visitor, current: Current, desk: Desk) -> None:
    await pool.run(visit.who.tenant_id, check_policy, desk.text, visit.services.policies.facts(visit.who.tenant))
    desk.faults = []


async def _evaluate(request: Request, visit: Visitor, current: Current, desk: Desk) -> None:
    body = _body(
        Evaluate, tool=desk.typed.get("tool", ""), input=_json(desk.typed.get("input", "{}")),
        role=desk.typed.get("role", Role.OPERATOR),
        groups=[group for name in desk.typed.get("groups", "").split(",") if (group := name.strip())],
        hour=number_of(desk.typed.get("hour"), "the hour", least=0, most=23),
        policy=desk.text if desk.text != current.text else None,
    )  # fmt: skip
    desk.decision = await judged(visit.services, visit.who, body)


async def _test(request: Request, visit: Visitor, current: Current, desk: Desk) -> None:
    facts = visit.services.policies.facts(visit.who.tenant)
    cases = desk.typed.get("cases", "").replace("\r\n", "\n")
    if not cases.strip():
        raise Invalid("write cases first: a list, each with a tool, an input and what is expected")
    desk.cases = await pool.run(visit.who.tenant_id, results_of_cases, desk.text, facts, cases)


async def _backtest(request: Request, visit: Visitor, current: Current, desk: Desk) -> None:
    found = await backtested(visit.services, visit.who, _body(Backtest, policy=desk.text))
    desk.backtest = found | {"changes": [change | {"brief": _brief(change["summary"])} for change in found["changes"]]}
    desk.looser = [*desk.backtest["loosened"], *(change for change in found["changes"] if change["passes_more"])]
    desk.changes = await compare(visit.who.tenant_id, current.text, desk.text)
    desk.tried = _proof(request, desk.text, current.version, is_looser=bool(desk.looser))


def _brief(summary: str) -> str:
    """Return the summary without ids; the run is shown beside it."""
    return re.sub(r":[0-9a-f-]{36}$", "", summary.partition(" in run ")[0])


def _body(model: type[Body], **fields: Any) -> Body:
    """Return the body of the corresponding API request, validated by the same rules."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise Invalid(explain(error, show_input=False)) from None


def _json(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Invalid(f"the input is not JSON: {error}") from None


# ---------------------------------------------------------------- publishing


async def _publish(request: Request, visit: Visitor, current: Current, desk: Desk) -> Response:
    visit.who.require(Permission.ADMINISTER)
    found = visit.services
    given, is_looser = desk.typed.get("tried", "").encode(), desk.did == _ALTHOUGH_LOOSER
    if not hmac.compare_digest(given, _proof(request, desk.text, current.version, is_looser=is_looser).encode()):
        raise Conflict(_untried(current, desk))
    digest = await pool.run(visit.who.tenant_id, check_policy, desk.text, found.policies.facts(visit.who.tenant))

    async def work(tx: Tx) -> Row:
        # Under the lock that assigns versions: the version that the text was backtested against is still in force.
        await tx.fetch("lock_policy", visit.who.tenant_id)
        row = await tx.row("policy_in_force", visit.who.tenant_id)
        if row is None or row["version"] != current.version:
            raise Conflict(_MEANWHILE)
        return await policies.publish(tx, visit.who, desk.text, digest)

    row = await found.database.run_in_transaction(work)
    found.policies.forget(str(visit.who.tenant_id))  # effective here at once; other processes are notified
    return done("/policy", f"Version {row['version']} is in force.")


_MEANWHILE = "another version was published meanwhile; look at what it changed, and backtest this text against it"


def _untried(current: Current, desk: Desk) -> str:
    if desk.typed.get("over") not in (None, str(current.version)):
        return _MEANWHILE
    return "this text was not backtested as it stands now; backtest it, look at what would differ, then publish"


def _proof(request: Request, text: str, version: int, *, is_looser: bool) -> str:
    """Return the proof that this session saw a backtest of this text against this version, and whether it allows more.

    The key of the proof appears on no page.
    """
    said = f"interlock-backtest {version} {is_looser} {hashlib.sha256(text.encode()).hexdigest()}"
    return hmac.new(request.cookies[COOKIE].encode(), said.encode(), hashlib.sha256).hexdigest()


_Does = Callable[[Request, Visitor, Current, Desk], Awaitable[Response | None]]
_DOES: dict[str, _Does] = {
    "check": _check, "evaluate": _evaluate, "test": _test, "backtest": _backtest, "publish": _publish,
    _ALTHOUGH_LOOSER: _publish,
}  # fmt: skip
