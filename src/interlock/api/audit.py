"""/api/audit, and a run's evidence"""

from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import Response

from interlock.api.dependencies import AppContext, Caller, Ctx, Json, encode_cursor, position_cursor
from interlock.api.views import audit_view
from interlock.audit.chain import Checkpoint
from interlock.engine.access.principal import Principal
from interlock.engine.proof import audit, evidence
from interlock.engine.runs import runs
from interlock.errors import Forbidden, Invalid
from interlock.ids import RunId
from interlock.policy.roles import Permission
from interlock.wire import AuditEntry, AuditVerdict, Page, PublicKey, VerifyAudit

router = APIRouter(prefix="/api", tags=["audit"])


@router.get("/runs/{run_id}/evidence", response_model=dict[str, Any])
async def evidence_of(run_id: RunId, found: Ctx, who: Caller) -> Response:
    """Return what happened in a run and who allowed it, as a signed DSSE envelope that can be checked offline."""
    who.require(Permission.READ)
    run = await runs.get(found.database, who, run_id)
    envelope, sha256 = await evidence.of_run(found.database, found.notary, run)
    headers = {"Content-Disposition": f'attachment; filename="evidence-{run_id}.json"', "ETag": f'"{sha256}"'}
    return Response(envelope, headers=headers, media_type="application/json")


@router.get("/audit", response_model=Page[AuditEntry])
async def listed(
    found: Ctx, who: Caller, after: Annotated[int, Query(ge=0, description="The last position seen.")] = 0,
    run_id: RunId | None = None, cursor: str | None = None, limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:  # fmt: skip
    """List the sealed entries of the tenant's chain with their positions and links, oldest first."""
    who.require(Permission.READ)
    if run_id is not None:
        await runs.get(found.database, who, run_id)
    elif who.workspace_id is not None:
        raise Forbidden("the chain is of all workspaces, and this key is of one; ask for a run of it with run_id")
    after = position_cursor(cursor) or after
    rows = await audit.listed(found.database, who.tenant_id, after=after, run_id=run_id, limit=limit + 1)
    shown, more = rows[:limit], len(rows) > limit
    following = encode_cursor(shown[-1]["position"]) if more else None
    return Json({"items": [audit_view(row) for row in shown], "next_cursor": following})


@router.get("/audit/verify", response_model=AuditVerdict)
async def verify(found: Ctx, who: Caller) -> Response:
    """Check the whole chain against the journal. `broken_at` is the first place where they differ."""
    return await _verify(found, who, [])


@router.post("/audit/verify", response_model=AuditVerdict)
async def verify_with(body: VerifyAudit, found: Ctx, who: Caller) -> Response:
    """Check the chain against the journal and against checkpoints that were kept elsewhere.

    The checkpoints also reveal a chain that was truncated consistently.
    """
    try:
        anchors = [Checkpoint.from_dict(fields) for fields in body.checkpoints]
        trusted = found.notary.signing.trusted()
        fault = next(filter(None, (anchor.fault(trusted) for anchor in anchors)), None)
    except (TypeError, KeyError, ValueError) as error:
        raise Invalid(f"invalid checkpoint: {error}", code="BAD_CHECKPOINT") from None
    if fault is not None:
        raise Invalid(fault, code="BAD_CHECKPOINT")
    return await _verify(found, who, [anchor for anchor in anchors if anchor.tenant_id == str(who.tenant_id)])


async def _verify(found: AppContext, who: Principal, anchors: list[Checkpoint]) -> Response:
    who.require(Permission.READ)
    async with found.checking:
        verdict = await audit.verify(found.database, who.tenant_id, found.notary.signing.trusted(), anchors)
    return Json(verdict.as_dict())


@router.get("/audit/keys", response_model=Page[PublicKey])
async def keys(found: Ctx, who: Caller) -> Response:
    """List the public keys that sign checkpoints and evidence, the current one first."""
    who.require(Permission.READ)
    current = found.notary.signing.key()
    known = [
        {"key_id": key.key_id, "current": current is not None and key.key_id == current.key_id, "pem": key.to_pem()}
        for key in found.notary.signing.trusted()
    ]
    return Json({"items": sorted(known, key=lambda key: not key["current"]), "next_cursor": None})
