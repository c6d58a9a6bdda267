"""Evidence: what happened in one run and who allowed it, in one signed file that can be checked offline.

The document is an in-toto statement in canonical JSON (RFC 8785); the file is a DSSE envelope around it, signed with
Ed25519. It proves that values existed, not what they were: inputs and outputs are metadata. The envelope contains the
public key as a hint, so that the file alone is enough to check the signature. How far to trust that key is a separate
question, which the result answers (`Trust`).
"""

import base64
import binascii
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple

import orjson

from interlock.audit.canonical import canonical, normal
from interlock.audit.chain import Checkpoint, journal_digest, utc
from interlock.audit.keys import KeyInvalid, Keyring, SigningKey, VerifyKey
from interlock.audit.redact import Scrubber, metadata, scrub
from interlock.errors import Invalid
from interlock.lifecycle import Term

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://interlock.dev/evidence/v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"


class EvidenceInvalid(Invalid):
    """The code classifies the fault for programs; the detail describes it for people."""

    title, code = "The evidence cannot be relied on", "EVIDENCE_INVALID"


# ---------------------------------------------------------------- the statement

_RUN = (
    "id", "tenant_id", "workspace_id", "workflow", "workflow_version", "status", "reason", "requested_by", "session_id",
    "job_id", "parent_run_id", "resumed_from", "resume_count", "created_at", "started_at", "completed_at",
    "duration_ms",
)  # fmt: skip
_DECISION = (
    "step", "tool", "answer", "reason", "rule_ids", "tier", "two_person", "approvers", "policy_version",
    "policy_digest", "action_digest", "at",
)  # fmt: skip
# The requester, the tool and the time; of the action's target and fields only the shape.
_REQUEST = ("asker", "when", "action.tool", "action.connector", "action.operation", "action.digest", "action.risk")
_APPROVAL = (
    "id", "kind", "step_key", "step", "status", "tier", "two_person", "rationale", "requested_by", "requested_at",
    "expires_at", "resolved_at", "receipt_id",
)  # fmt: skip
_ACTION = ("tool", "connector", "operation", "digest")
_VOTE = ("by", "decision", "reason", "digest", "at")
_RECEIPT = (
    "id", "step_key", "step", "tool", "idempotency_key", "action_digest", "status", "attempt", "request_metadata",
    "response_metadata", "reversible", "reversal", "created_at", "completed_at",
)  # fmt: skip


def bundle(
    *,
    run: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
    made_at: datetime,
    version: str,
    decisions: Iterable[Mapping[str, Any]] = (),
    approvals: Iterable[Mapping[str, Any]] = (),
    receipts: Iterable[Mapping[str, Any]] = (),
    costs: Iterable[Mapping[str, Any]] = (),
    checkpoints: Iterable[Checkpoint] = (),
    allow: Collection[str] = (),
    secrets: Collection[str] | Scrubber = (),
    salt: bytes | None = None,
) -> dict[str, Any]:
    """Return the statement about a run.

    `entries` is its journal as `chain.leaf` takes it, with `position` where sealed. Only fields named here are
    included, so that a new column is never published by accident.
    """

    secrets = Scrubber.of(secrets)

    def shape(value: Any, allow: Collection[str] = ()) -> Any:
        return metadata(value, allow=allow, secrets=secrets, salt=salt)

    digest = journal_digest(entries)
    positions = [entry["position"] for entry in entries if entry.get("position") is not None]
    predicate = {
        "made_at": utc(made_at),
        "made_by": f"interlock {version}",
        "run": _pick(run, _RUN) | {"trigger": shape(run.get("trigger"), allow=("source", "ref"))},
        "input": shape(run.get("input"), allow),
        "output": shape(run.get("result"), allow),
        "error": shape(run.get("error"), allow=("type", "code", "step", "reason")),
        "decisions": [
            _pick(one, _DECISION) | ({"request": shape(one["request"], _REQUEST)} if "request" in one else {})
            for one in decisions
        ],
        "approvals": [
            _pick(one, _APPROVAL)
            | {
                "action": _pick(action := one.get("action") or {}, _ACTION)
                | {"target": shape(action.get("target")), "fields": shape(action.get("fields"))},
                "votes": [_pick(vote, _VOTE) for vote in one.get("votes") or ()],
            }
            for one in approvals
        ],
        "receipts": [_pick(one, _RECEIPT) for one in receipts],
        "costs": rollup(costs),
        "journal": {
            "entries": len(entries),
            "sha256": digest,
            "positions": {"first": min(positions), "last": max(positions)} if positions else None,
            "sealed": bool(positions) and len(positions) == len(entries),
        },
        "checkpoints": [checkpoint.as_dict() for checkpoint in checkpoints],
    }
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": f"run/{run['id']}", "digest": {"sha256": digest}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": scrub(normal(predicate), secrets),
    }
    plain: dict[str, Any] = normal(statement)
    return plain


def rollup(costs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up the costs per provider and model. Money is decimal text, because float sums are not exact."""
    sums: dict[tuple[str, str], list[Any]] = {}
    for cost in costs:
        row = sums.setdefault((str(cost.get("provider") or ""), str(cost.get("model") or "")), [0, 0, 0, Decimal(0)])
        row[0] += cost.get("calls") or 1
        row[1] += cost.get("input_tokens") or 0
        row[2] += cost.get("output_tokens") or 0
        row[3] += Decimal(str(cost.get("cost_usd") or 0))
    by_model = [
        {
            "provider": provider,
            "model": model,
            "calls": calls,
            "input_tokens": asked,
            "output_tokens": answered,
            "cost_usd": _money(spent),
        }
        for (provider, model), (calls, asked, answered, spent) in sorted(sums.items())
    ]
    return {"total_usd": _money(sum((row[3] for row in sums.values()), Decimal(0))), "by_model": by_model}


def _money(amount: Decimal) -> str:
    text = f"{amount:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _pick(value: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: value[name] for name in names if name in value}


# ---------------------------------------------------------------- the envelope


class Trust(Term):
    GIVEN = "given", "It is signed with a key that you gave."
    FIRST_USE = "first_use", "It is signed with the key inside it; whether that key is the right one, you have to know."


@dataclass(frozen=True, slots=True)
class OpenedEnvelope:
    statement: dict[str, Any]
    key: VerifyKey
    trust: Trust
    sha256: str

    def __str__(self) -> str:
        return f"Nothing was changed since it was signed (key {self.key.key_id}). {self.trust.doc}"


def seal_envelope(statement: Mapping[str, Any], key: SigningKey) -> bytes:
    payload = canonical(statement)
    signature = {
        "keyid": key.key_id,
        "sig": _b64(key.sign(_signed_bytes(payload))),
        # Not signed and not to be trusted; it only saves looking up the key file.
        "public_key": _b64(key.verify_key.raw),
    }
    return canonical({"payloadType": PAYLOAD_TYPE, "payload": _b64(payload), "signatures": [signature]})


def open_envelope(data: bytes, keyring: Keyring | None = None, sha256: str | None = None) -> OpenedEnvelope:
    """Return the statement if no byte of the file was changed. Without a keyring, use the key inside the file.

    `sha256` is the digest that was recorded when the file was stored.
    """
    digest = hashlib.sha256(data).hexdigest()
    if sha256 is not None and digest != sha256:
        raise EvidenceInvalid(f"this is not the file that was stored: its sha256 is {digest}", code="HASH_DIFFERS")
    envelope = _json(data, "the envelope")
    if not isinstance(envelope, dict) or "payloadType" not in envelope:
        raise EvidenceInvalid("it is not an evidence bundle", code="NOT_AN_ENVELOPE")
    _refuse_rewritten(envelope, data, "the envelope")
    payload, signature, key = _read(envelope)
    if keyring is not None:
        trusted = keyring.get(key.key_id)
        if trusted is None:
            raise EvidenceInvalid(f"it is signed with key {key.key_id}, which is not one of yours", code="UNKNOWN_KEY")
        key = trusted
    if not key.verifies(_signed_bytes(payload), signature):
        raise EvidenceInvalid("the content was changed after it was signed, or the signature was", code="BAD_SIGNATURE")
    statement = _json(payload, "the statement")
    _refuse_rewritten(statement, payload, "the statement")
    _check(statement, keyring or Keyring([key]))
    return OpenedEnvelope(statement, key, Trust.FIRST_USE if keyring is None else Trust.GIVEN, digest)


def _signed_bytes(payload: bytes) -> bytes:
    """Return DSSE's pre-authentication encoding: the type is signed with the content."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def _json(data: bytes, what: str) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise EvidenceInvalid(f"{what} is not JSON: {error}", code="NOT_JSON") from error


def _refuse_rewritten(value: Any, data: bytes, what: str) -> None:
    """Reject a rewritten document, even if its meaning is the same.

    Examples are extra spaces, another order or a duplicate name.
    """
    if canonical(value) != data:
        raise EvidenceInvalid(f"{what} was written anew: it is not in canonical form", code="NOT_CANONICAL")


def _read(envelope: Any) -> tuple[bytes, bytes, VerifyKey]:
    match envelope:
        case {"payloadType": str(kind), "payload": str(payload), "signatures": [{**signature}], **rest} if not rest:
            pass
        case _:
            raise EvidenceInvalid("it is not an evidence bundle with one signature", code="NOT_AN_ENVELOPE")
    if kind != PAYLOAD_TYPE:
        raise EvidenceInvalid(f"it holds {kind}, not {PAYLOAD_TYPE}", code="WRONG_TYPE")
    match signature:
        case {"keyid": str(key_id), "sig": str(sig), "public_key": str(hint), **rest} if not rest:
            pass
        case _:
            raise EvidenceInvalid("its signature lacks key id, key or value", code="NOT_AN_ENVELOPE")
    try:
        key = VerifyKey(_unb64(hint, "the public key"))
    except KeyInvalid as error:
        raise EvidenceInvalid(f"the public key in it is none: {error.detail}", code="BAD_KEY") from error
    if key.key_id != key_id:
        raise EvidenceInvalid(f"the public key in it is not key {key_id}: one of the two was changed", code="BAD_KEY")
    return _unb64(payload, "the payload"), _unb64(sig, "the signature"), key


def _check(statement: Any, keyring: Keyring) -> None:
    match statement:
        case {
            "_type": str(kind),
            "predicateType": str(predicate_type),
            "subject": [{"name": str(name), "digest": {"sha256": str(digest)}}],
            "predicate": {"run": {"id": str(run_id)}, "journal": {"sha256": str(journal)}, "checkpoints": [*chain]},
        } if kind == STATEMENT_TYPE and predicate_type == PREDICATE_TYPE:
            pass
        case _:
            raise EvidenceInvalid("it is signed, but it is not evidence of a run", code="WRONG_TYPE")
    if name != f"run/{run_id}" or digest != journal:
        raise EvidenceInvalid("its subject is another run than the one it tells of", code="WRONG_SUBJECT")
    for fields in chain:
        try:
            checkpoint = Checkpoint.from_dict(fields)
        except (TypeError, KeyError, ValueError) as error:
            raise EvidenceInvalid(f"invalid checkpoint: {error}", code="BAD_CHECKPOINT") from error
        # A checkpoint with an older key that is not in the keyring is covered by the signature of the whole.
        if checkpoint.key_id in keyring and (fault := checkpoint.fault(keyring)):
            raise EvidenceInvalid(fault, code="BAD_CHECKPOINT")


def _b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _unb64(text: str, what: str) -> bytes:
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise EvidenceInvalid(f"{what} is not base64: {error}", code="NOT_BASE64") from error
    # The last character has bits that mean nothing.
    if _b64(raw) != text:
        raise EvidenceInvalid(f"{what} was written anew: it is not the base64 we write", code="NOT_CANONICAL")
    return raw


# ---------------------------------------------------------------- for people


class EvidenceSection(NamedTuple):
    """A part of a bundle to display: facts by name if there are no `columns`, else a table."""

    title: str
    rows: list[tuple[str, ...]]
    columns: tuple[str, ...] = ()


def describe(statement: Mapping[str, Any]) -> list[EvidenceSection]:
    told = statement["predicate"]
    run, journal, costs = told["run"], told["journal"], told["costs"]
    places = journal["positions"]
    sections = [
        EvidenceSection("Run", [(name, _text(run[name])) for name in _RUN if run.get(name) is not None]),
        EvidenceSection("Input", _flat(told["input"])),
        EvidenceSection("Output", _flat(told["output"])),
        EvidenceSection("Error", _flat(told["error"]) if told["error"] != {"type": "null"} else []),
        _table(
            "Policy decisions", _decisions(told["decisions"]), "step", "judged", "answer", "tier", "rule_ids", "reason",
            "policy_digest", "at",
        ),
        _table("Approvals", told["approvals"], "step_key", "step", "status", "tier", "two_person", "resolved_at"),
        _table("Votes", _votes(told["approvals"]), "approval", "by", "decision", "reason", "at"),
        _table(
            "Receipts", _receipts(told["receipts"]), "step_key", "step", "tool", "sent", "answered", "status",
            "idempotency_key", "completed_at",
        ),
        _table("Cost", costs["by_model"], "provider", "model", "calls", "input_tokens", "output_tokens", "cost_usd"),
        EvidenceSection(
            "Journal",
            [
                ("entries", _text(journal["entries"])),
                ("sha256", journal["sha256"]),
                ("in the chain", f"{places['first']} to {places['last']}" if places else "not sealed yet"),
            ],
        ),
        _table("Checkpoints", told["checkpoints"], "number", "position", "head", "at", "key_id"),
        EvidenceSection(
            "Made", [("at", told["made_at"]), ("by", told["made_by"]), ("total cost", f"${costs['total_usd']}")]
        ),
    ]  # fmt: skip
    return [section for section in sections if section.rows]


def _decisions(decisions: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the decisions, with a mark on those that judge an approved action again before it begins."""
    seen: set[tuple[Any, Any]] = set()
    marked = []
    for decision in decisions:
        action = decision.get("step"), decision.get("action_digest")
        marked.append({**decision, "judged": "again, before it began" if action in seen else "first"})
        seen.add(action)
    return marked if len(seen) < len(marked) else [dict(decision) for decision in decisions]


def _receipts(receipts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the receipts with the values that the tools let readers see."""
    parts = {"sent": "request_metadata", "answered": "response_metadata"}
    shown = []
    for receipt in receipts:
        kept = {name: " ".join(_kept(receipt.get(part))) for name, part in parts.items()}
        shown.append({**receipt, **{name: text for name, text in kept.items() if text}})
    return shown


def _kept(value: Any, name: str = "") -> Iterator[str]:
    """Yield `name=value` for each value that is kept as it is."""
    if isinstance(value, Mapping):
        if not _is_metadata(value):
            for key, member in value.items():
                yield from _kept(member, f"{name}.{key}" if name else key)
    elif value is not None:
        yield f"{name or 'value'}={_text(value)}"


def _votes(approvals: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**vote, "approval": approval.get("step_key") or approval.get("step") or approval.get("id")}
        for approval in approvals
        for vote in approval["votes"]
    ]


def _table(title: str, items: Sequence[Mapping[str, Any]], *names: str) -> EvidenceSection:
    columns = tuple(name for name in names if any(name in item for item in items))
    return EvidenceSection(title, [tuple(_text(item.get(name)) for name in columns) for item in items], columns)


def _flat(value: Any, name: str = "") -> list[tuple[str, ...]]:
    """Return metadata as lines of a dotted name and its description."""
    if not isinstance(value, Mapping):
        return [(name or "value", _text(value))]
    if _is_metadata(value):
        words = [str(value["type"]), *(f"{key} {value[key]}" for key in ("size", "length", "hash") if key in value)]
        items = [line for n, item in enumerate(value.get("items", ())) for line in _flat(item, f"{name}[{n}]")]
        return [(name or "value", ", ".join(words)), *items]
    return [line for key, member in value.items() for line in _flat(member, f"{name}.{key}" if name else key)]


def _is_metadata(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("type"), str) and value.keys() <= {"type", "size", "length", "hash", "items"}


def _text(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case str():
            return value
        case list():
            return ", ".join(map(_text, value))
        case _:
            return canonical(value).decode()
