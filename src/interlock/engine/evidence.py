"""Evidence: a signed bundle for every run that ended, made once the run is in the chain, and stored once for all.

The sealer notes which runs ended (`evidence_due`). Bundles are made from there, some at a time and behind everything
else, or at once for somebody who asks for one. Two makers, or one that died half-way, come to the same file: whoever
finds it there takes it as it is, after checking that one of our keys signed it.
"""

import asyncio
import hashlib
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol
from uuid import UUID

import orjson

from interlock import __version__
from interlock.engine.audit import checkpoint_of
from interlock.engine.keyfiles import Salts, Signing
from interlock.errors import Conflict, NotFound, Problem
from interlock.governance.chain import Checkpoint
from interlock.governance.evidence import bundle, open_envelope, seal_envelope
from interlock.governance.keys import SigningKey
from interlock.store.pool import Database, Row
from interlock.telemetry import log

BATCH = 50
_TRY_AGAIN_SECONDS = 60.0
# Bundles come behind the runs themselves: the part of one processor's time they get, while runs wait for a worker and
# while none does.
_SHARE_WHEN_BUSY, _SHARE_WHEN_IDLE = 0.05, 0.5


class Shelf(Protocol):
    """Where bundles are kept: every name is written once."""

    async def put(self, name: str, data: bytes) -> str: ...
    async def get(self, name: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Notary:
    """What it takes to prove something: a key, the salts of the hashes, and a place to keep it."""

    signing: Signing
    salts: Salts
    shelf: Shelf


# ---------------------------------------------------------------- making


async def make_all_due(database: Database, notary: Notary) -> int:
    """Until none is due. Only where the signing key is."""
    total = 0
    while True:
        began = time.monotonic()
        made = await make_due(database, notary)
        total += made
        if made < BATCH:
            return total
        share = _SHARE_WHEN_BUSY if await database.value("work_is_waiting") else _SHARE_WHEN_IDLE
        await asyncio.sleep((time.monotonic() - began) * (1 / share - 1))


async def make_due(database: Database, notary: Notary, batch: int = BATCH) -> int:
    """Some of the oldest; returns how many were tried. One that fails is tried again, later each time."""
    key = notary.signing.key()
    if key is None:
        return 0
    due = await database.fetch("claim_evidence", database.clock(), batch, _TRY_AGAIN_SECONDS)
    if due:
        await _make(database, notary, key, [row["run_id"] for row in due])
    return len(due)


async def of_run(database: Database, notary: Notary, run: Row) -> tuple[bytes, str]:
    """A run's envelope as it was stored, and its sha256. Made now if the run is sealed and nobody came to it yet."""
    if run["completed_at"] is None:
        raise Conflict(f"the run is {run['status']}; evidence is made when it ended", code="RUN_NOT_ENDED")
    found = await database.row("get_evidence", run["tenant_id"], run["id"])
    if found is None and (key := notary.signing.key()) is not None:
        if await database.value("is_evidence_due", run["tenant_id"], run["id"]):
            await _make(database, notary, key, [run["id"]])
        found = await database.row("get_evidence", run["tenant_id"], run["id"])
    if found is None:
        why = "the run ended, and its evidence is not made yet; it will be within seconds"
        raise NotFound(why, code="EVIDENCE_NOT_READY", retry_after=1)
    data = await notary.shelf.get(found["name"])
    if hashlib.sha256(data).hexdigest() != found["sha256"]:
        log.error("evidence_changed", run_id=str(run["id"]), name=found["name"])
        raise Conflict(f"{found['name']} is not the file that was stored there", code="EVIDENCE_CHANGED")
    return data, found["sha256"]


@dataclass(frozen=True, slots=True)
class _Facts:
    """A run and everything that is known of it."""

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

    @property
    def is_sealed(self) -> bool:
        return bool(self.leaves) and all(leaf["position"] is not None for leaf in self.leaves)


async def _make(database: Database, notary: Notary, key: SigningKey, run_ids: list[UUID]) -> None:
    now = database.clock() or datetime.now(UTC)
    facts = [one for one in await _gather(database, run_ids) if one.is_sealed or _put_off(one)]
    # A few hundred microseconds each, which whoever shares this loop would feel.
    signed = await asyncio.to_thread(lambda: [_sign(one, notary, key, now) for one in facts])
    stored = await asyncio.gather(*(_store(notary, key, one, made) for one, made in zip(facts, signed, strict=True)))
    kept = [row for row in stored if row is not None]
    if kept:
        await database.fetch("save_evidence", database.clock(), *(list(column) for column in zip(*kept, strict=True)))


def _put_off(facts: _Facts) -> bool:
    """The sealer saw the run's end and not all of its entries: `audit verify` will say which."""
    log.error("evidence_waits", run_id=str(facts.run["id"]), detail="not all of its entries are in the chain")
    return False


def _sign(facts: _Facts, notary: Notary, key: SigningKey, now: datetime) -> tuple[dict[str, Any], bytes] | None:
    try:
        statement = statement_of(facts, now, notary.salts(facts.run["tenant_id"]))
        return statement, seal_envelope(statement, key)
    except Exception:  # a run that cannot be described must not hold up the others
        log.exception("evidence_failed", run_id=str(facts.run["id"]))
        return None


async def _store(
    notary: Notary, key: SigningKey, facts: _Facts, made: tuple[dict[str, Any], bytes] | None
) -> tuple[Any, ...] | None:
    if made is None:
        return None
    statement, envelope = made
    try:
        sha256, key_id = await _put(notary, key, facts.name, statement, envelope)
    except Problem as problem:
        log.error("evidence_not_stored", run_id=str(facts.run["id"]), error=problem.detail, code=problem.code)
        return None
    return facts.run["id"], facts.run["tenant_id"], facts.name, sha256, key_id


async def _put(
    notary: Notary, key: SigningKey, name: str, statement: dict[str, Any], envelope: bytes
) -> tuple[str, str]:
    try:
        return await notary.shelf.put(name, envelope), key.key_id
    except Conflict:
        there = open_envelope(await notary.shelf.get(name), notary.signing.trusted())
    if there.statement["subject"] != statement["subject"]:
        raise Conflict(f"{name} is evidence of something else", code="EVIDENCE_CHANGED")
    return there.sha256, there.key.key_id


# ---------------------------------------------------------------- what is in it


async def _gather(database: Database, run_ids: list[UUID]) -> list[_Facts]:
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
    """With every vote, those on an action that was edited afterwards too: each says which action it was for."""
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
