"""Evidence: a signed bundle for every run that ended, made once the run is in the chain, and stored once.

The sealer notes which runs ended (`evidence_due`). Bundles are made from that list in the background, or at once when
a caller requests one. Two makers, or a maker that died half-way, produce the same file: a maker that finds the file
keeps it after checking that one of our keys signed it.
"""

import asyncio
import hashlib
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

import orjson

from interlock import __version__
from interlock.audit.chain import Checkpoint
from interlock.audit.evidence import bundle, open_envelope, seal_envelope
from interlock.audit.keys import SigningKey
from interlock.engine.access.key_store import Salts, Signing
from interlock.engine.proof.audit import checkpoint_of
from interlock.errors import Conflict, InterlockError, NotFound
from interlock.ids import RunId
from interlock.store.pool import Database, Row
from interlock.store.records import RunRecord
from interlock.telemetry import log

BATCH = 50
_TRY_AGAIN_SECONDS = 60.0
# Runs have priority over bundles. These are the shares of one CPU for bundles while runs wait for a worker, and while
# no run waits.
_SHARE_WHEN_BUSY, _SHARE_WHEN_IDLE = 0.05, 0.5


class EvidenceOfAnotherEnd(Conflict):
    code = "EVIDENCE_OF_ANOTHER_END"


class ArtifactStore(Protocol):
    """The place where bundles are kept. Every name is written once."""

    async def put(self, name: str, data: bytes) -> str: ...
    async def get(self, name: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class EvidenceSigner:
    """Makes and signs evidence: holds a key, the salts of the hashes, and the artifact store."""

    signing: Signing
    salts: Salts
    shelf: ArtifactStore


# ---------------------------------------------------------------- making


async def make_all_due(database: Database, notary: EvidenceSigner) -> int:
    """Make evidence until none is due. Only processes with the signing key do so."""
    total = 0
    while True:
        began = time.monotonic()
        made = await make_due(database, notary)
        total += made
        if made < BATCH:
            return total
        share = _SHARE_WHEN_BUSY if await database.value("work_is_waiting") else _SHARE_WHEN_IDLE
        await asyncio.sleep((time.monotonic() - began) * (1 / share - 1))


async def make_due(database: Database, notary: EvidenceSigner, batch: int = BATCH) -> int:
    """Make some of the oldest due bundles and return how many were tried. Failures are retried with growing delays."""
    key = notary.signing.key()
    if key is None:
        return 0
    due = await database.fetch("claim_evidence", batch, _TRY_AGAIN_SECONDS)
    if due:
        await _make(database, notary, key, [row["run_id"] for row in due])
    return len(due)


async def of_run(database: Database, notary: EvidenceSigner, run: RunRecord) -> tuple[bytes, str]:
    """Return a run's stored envelope and its sha256. Make it now if the run is sealed and has no bundle yet."""
    if run.completed_at is None:
        raise Conflict(f"the run is {run.status}; evidence is made when it ended", code="RUN_NOT_ENDED")
    found = await database.row("get_evidence", run.tenant_id, run.id)
    if found is None and (key := notary.signing.key()) is not None:
        if await database.value("is_evidence_due", run.tenant_id, run.id):
            await _make(database, notary, key, [run.id])
        found = await database.row("get_evidence", run.tenant_id, run.id)
    if found is None:
        why = "the run ended, and its evidence is not made yet; it will be within seconds"
        raise NotFound(why, code="EVIDENCE_NOT_READY", retry_after=1)
    data = await notary.shelf.get(found["name"])
    if hashlib.sha256(data).hexdigest() != found["sha256"]:
        log.error("evidence_changed", run_id=str(run.id), name=found["name"])
        raise Conflict(f"{found['name']} is not the file that was stored there", code="EVIDENCE_CHANGED")
    return data, found["sha256"]


@dataclass(frozen=True, slots=True)
class _Facts:
    """A run and all the data that its bundle describes."""

    run: Row
    leaves: Sequence[Row]
    checkpoints: Sequence[Checkpoint]
    approvals: Sequence[Row]
    votes: Sequence[Row]
    receipts: Sequence[Row]

    @property
    def name(self) -> str:
        run = self.run
        return f"evidence/{run['tenant_id']}/{run['created_at']:%Y-%m-%d}/{run['id']}.json"

    def name_by_content(self, statement: dict[str, Any]) -> str:
        digest = statement["subject"][0]["digest"]["sha256"]
        return f"{self.name.removesuffix('.json')}-{digest[:16]}.json"

    @property
    def is_sealed(self) -> bool:
        return bool(self.leaves) and all(leaf["position"] is not None for leaf in self.leaves)


async def _make(database: Database, notary: EvidenceSigner, key: SigningKey, run_ids: list[RunId]) -> None:
    now = database.now()
    facts = [one for one in await _gather(database, run_ids) if one.is_sealed or _put_off(one)]
    # Signing takes a few hundred microseconds each, which would delay other tasks of this event loop.
    signed = await asyncio.to_thread(lambda: [_sign(one, notary, key, now) for one in facts])
    stored = await asyncio.gather(*(_store(notary, key, one, made) for one, made in zip(facts, signed, strict=True)))
    kept = [row for row in stored if row is not None]
    if kept:
        await database.fetch("save_evidence", *(list(column) for column in zip(*kept, strict=True)))


def _put_off(facts: _Facts) -> bool:
    """Log that the bundle has to wait, because not all entries of the run are sealed, and return False.

    `audit verify` names the missing entries.
    """
    log.error("evidence_waits", run_id=str(facts.run["id"]), detail="not all of its entries are in the chain")
    return False


def _sign(facts: _Facts, notary: EvidenceSigner, key: SigningKey, now: datetime) -> tuple[dict[str, Any], bytes] | None:
    try:
        statement = statement_of(facts, now, notary.salts(facts.run["tenant_id"]))
        return statement, seal_envelope(statement, key)
    except Exception:  # a run that cannot be described must not hold up the others
        log.exception("evidence_failed", run_id=str(facts.run["id"]))
        return None


async def _store(
    notary: EvidenceSigner, key: SigningKey, facts: _Facts, made: tuple[dict[str, Any], bytes] | None
) -> tuple[Any, ...] | None:
    if made is None:
        return None
    statement, envelope = made
    try:
        name, sha256, key_id = await _put(notary, key, facts, statement, envelope)
    except InterlockError as problem:
        log.error("evidence_not_stored", run_id=str(facts.run["id"]), error=problem.detail, code=problem.code)
        return None
    return facts.run["id"], facts.run["tenant_id"], name, sha256, key_id


async def _put(
    notary: EvidenceSigner, key: SigningKey, facts: _Facts, statement: dict[str, Any], envelope: bytes
) -> tuple[str, str, str]:
    """Store the bundle under the run's name, or under a content hash if another end of the run has that name.

    After a restore of the database a run can end a second time. The bundle of its first end is true, and stays.
    """
    try:
        return facts.name, await notary.shelf.put(facts.name, envelope), key.key_id
    except Conflict:
        pass
    try:
        return await _found(notary, facts.name, statement)
    except EvidenceOfAnotherEnd as problem:
        beside = facts.name_by_content(statement)
        log.warning("evidence_stored_beside", run_id=str(facts.run["id"]), detail=problem.detail, name=beside)
    try:
        return beside, await notary.shelf.put(beside, envelope), key.key_id
    except Conflict:
        return await _found(notary, beside, statement)


async def _found(notary: EvidenceSigner, name: str, statement: dict[str, Any]) -> tuple[str, str, str]:
    """Return the bundle stored under this name, if one of our keys signed it and it states the same."""
    there = open_envelope(await notary.shelf.get(name), notary.signing.trusted())
    if there.statement["subject"] != statement["subject"]:
        raise EvidenceOfAnotherEnd(f"{name} is the evidence of another end of this run.")
    return name, there.sha256, there.key.key_id


# ---------------------------------------------------------------- content


async def _gather(database: Database, run_ids: list[RunId]) -> list[_Facts]:
    runs = await database.fetch("runs_by_id", run_ids)
    leaves = _by_run(await database.fetch("leaves_of_runs", run_ids))
    approvals = await database.fetch("approvals_of_runs", run_ids)
    votes = await database.fetch("votes_on", [row["id"] for row in approvals]) if approvals else []
    receipts = _by_run(await database.fetch("receipts_of_runs", run_ids))
    checkpoints = await _checkpoints_around(database, leaves)
    asked = _by_run(approvals)
    return [
        _Facts(run, leaves[run["id"]], checkpoints[run["id"]], asked[run["id"]], votes, receipts[run["id"]])
        for run in runs
    ]


async def _checkpoints_around(database: Database, leaves: dict[UUID, list[Row]]) -> dict[UUID, list[Checkpoint]]:
    places = {
        run_id: [leaf["position"] for leaf in its if leaf["position"] is not None] for run_id, its in leaves.items()
    }
    rows = [(run_id, leaves[run_id][0]["tenant_id"], min(at), max(at)) for run_id, at in places.items() if at]
    found: dict[UUID, list[Checkpoint]] = defaultdict(list)
    if rows:
        columns = (list(column) for column in zip(*rows, strict=True))
        for row in await database.fetch("checkpoints_around_runs", *columns):
            found[row["run_id"]].append(checkpoint_of(row))
    return found


def _by_run(rows: Iterable[Row]) -> dict[UUID, list[Row]]:
    found: dict[UUID, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["run_id"]].append(row)
    return found


def statement_of(facts: _Facts, now: datetime, salt: bytes | None) -> dict[str, Any]:
    run = dict(facts.run)
    return bundle(
        run=run | {column: _json(run[column]) for column in ("input", "result", "error", "trigger")},
        entries=facts.leaves,
        made_at=now,
        version=__version__,
        decisions=[_decision(leaf) for leaf in facts.leaves if leaf["decision"] is not None],
        approvals=[_approval(row, facts.votes) for row in facts.approvals],
        receipts=[_receipt(row) for row in facts.receipts],
        costs=[{**cost, "cost_usd": cost.get("usd")} for leaf in facts.leaves for cost in _json(leaf["costs"]) or ()],
        checkpoints=facts.checkpoints,
        salt=salt,
    )


def _decision(leaf: Row) -> dict[str, Any]:
    decision = _json(leaf["decision"])
    action = (decision.get("request") or {}).get("action") or {}
    about = {"step": leaf["step"], "at": leaf["at"], "tool": action.get("tool"), "action_digest": action.get("digest")}
    return {**decision, **about}


def _approval(row: Row, votes: Iterable[Row]) -> dict[str, Any]:
    """Return the approval with every vote, including votes on earlier versions: each vote names its action."""
    fields = dict(row)
    fields["step_key"] = fields.pop("step")
    return fields | {
        "rationale": {
            "rule_ids": list(row["rule_ids"]), "reason": row["reason"], "policy_digest": row["policy_digest"],
        },
        "action": {**_json(row["action"]), "digest": row["digest"]},
        "votes": [{**vote, "by": vote["voter"]} for vote in votes if vote["approval_id"] == row["id"]],
    }  # fmt: skip


def _receipt(row: Row) -> dict[str, Any]:
    fields = dict(row)
    fields["step_key"] = fields.pop("step")
    reversal = {"run_id": row["reversal_run_id"], "by": row["reversed_by"], "at": row["reversed_at"]}
    return fields | {
        "request_metadata": _json(row["request_metadata"]),
        "response_metadata": _json(row["response_metadata"]),
        "reversible": row["undo"] is not None,
        "reversal": reversal if row["reversal_run_id"] else None,
    }


def _json(text: str | None) -> Any:
    return orjson.loads(text) if text is not None else None
