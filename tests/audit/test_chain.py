"""The audit log: after any change to an entry, a seal or a checkpoint, verification names the place."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.audit.canonical import canonical
from interlock.audit.chain import (
    GENESIS,
    Break,
    Checkpoint,
    LinkedEntry,
    Verdict,
    fold,
    journal_digest,
    leaf,
    link,
    missing_link,
    next_checkpoint,
    text_digest,
    utc,
    verify_chain,
)
from interlock.audit.keys import Keyring, SigningKey

TENANT = "01976a2e-0000-7000-8000-000000000001"
RUNS = [f"01976a2e-1111-7000-8000-00000000000{n}" for n in range(3)]
NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
KEY = SigningKey.generate()
RING = Keyring([KEY.verify_key])


def entry(run: int, seq: int, **fields: Any) -> dict[str, Any]:
    return {
        "tenant_id": TENANT, "run_id": RUNS[run], "seq": seq, "at": NOON + timedelta(seconds=seq),
        "type": "step_transition", "step": f"step{seq}",
        "from_state": "running", "event": "succeed", "to_state": "succeeded", "attempt": 1,
        "token": 3, "actor": "worker:a", "data_sha256": text_digest('{"n": 1}'), "output_sha256": None,
    } | fields  # fmt: skip


ENTRIES = [entry(run, seq) for seq in range(1, 5) for run in range(3)]


class Chain:
    """Twelve entries of three runs, sealed in batches of four."""

    def __init__(self, entries: list[dict[str, Any]] = ENTRIES, key: SigningKey = KEY) -> None:
        self.key = key
        self.sealed: list[LinkedEntry] = []
        self.checkpoints: list[Checkpoint] = []
        for begin in range(0, len(entries), 4):
            self.seal(entries[begin : begin + 4])

    def seal(self, entries: list[dict[str, Any]]) -> None:
        head = self.sealed[-1].link if self.sealed else GENESIS
        for one, made in zip(entries, fold(head, entries), strict=True):
            self.sealed.append(LinkedEntry(len(self.sealed) + 1, one["run_id"], one["seq"], made, one))
        self.sign()

    def sign(self, **fields: Any) -> None:
        last = self.checkpoints[-1] if self.checkpoints else None
        at, head = NOON, self.sealed[-1].link
        self.checkpoints.append(
            next_checkpoint(self.key, last, tenant_id=TENANT, position=len(self.sealed), head=head, at=at, **fields)
        )

    def verdict(self, keyring: Keyring = RING, anchors: list[Checkpoint] | None = None) -> Verdict:
        return verify_chain(TENANT, self.sealed, self.checkpoints, keyring, anchors or ())

    def broken(self, **options: Any) -> Break:
        broken = self.verdict(**options).broken_at
        assert broken is not None
        return broken


@pytest.fixture
def chain() -> Chain:
    return Chain()


def test_an_untouched_chain_is_whole(chain: Chain) -> None:
    verdict = chain.verdict()
    assert verdict.ok
    assert verdict.as_dict() == {"ok": True, "events": 12, "checkpoints": 3, "unsealed": 0, "broken_at": None}


def test_an_empty_chain_is_whole() -> None:
    assert Chain([]).verdict() == Verdict(0, 0)


@pytest.mark.parametrize("field", sorted(ENTRIES[0]))
def test_a_change_of_any_field_of_any_entry_is_found_and_named(chain: Chain, field: str) -> None:
    for position, one in enumerate(list(chain.sealed), 1):
        changed = {
            "at": NOON + timedelta(seconds=one.seq, microseconds=1), "seq": 9, "attempt": 2, "token": 4,
        }.get(field, "x")  # fmt: skip
        chain.sealed[position - 1] = replace(one, entry={**(one.entry or {}), field: changed})
        broken = chain.broken()
        assert (broken.position, broken.run_id, broken.seq) == (position, one.run_id, one.seq)
        assert "changed" in broken.why
        chain.sealed[position - 1] = one
    assert chain.verdict().ok


def test_a_deleted_entry_is_named(chain: Chain) -> None:
    for position, one in enumerate(list(chain.sealed), 1):
        chain.sealed[position - 1] = replace(one, entry=None)
        assert chain.broken() == Break(position, one.run_id, one.seq, "the entry is missing: it was deleted")
        chain.sealed[position - 1] = one


def test_an_entry_deleted_with_its_seal_is_named() -> None:
    for position in range(1, 13):
        chain = Chain()
        del chain.sealed[position - 1]
        broken = chain.broken()
        assert broken.position == position
        assert "deleted" in broken.why or "tail was cut" in broken.why


def test_two_swapped_entries_are_named() -> None:
    for position in range(1, 12):
        chain = Chain()
        one, two = chain.sealed[position - 1 : position + 1]
        chain.sealed[position - 1] = replace(one, entry=two.entry)
        chain.sealed[position] = replace(two, entry=one.entry)
        assert chain.broken().position == position


def test_two_swapped_places_are_named(chain: Chain) -> None:
    chain.sealed[4], chain.sealed[5] = (
        replace(chain.sealed[5], position=5),
        replace(chain.sealed[4], position=6),
    )
    assert chain.broken().position == 5


def test_a_cut_tail_is_found(chain: Chain) -> None:
    for kept in reversed(range(12)):
        del chain.sealed[kept:]
        broken = chain.broken()
        assert broken.position == kept + 1
        assert "the tail was cut" in broken.why


def test_an_entry_put_in_between_is_named(chain: Chain) -> None:
    chain.sealed.insert(5, replace(chain.sealed[5], entry=entry(1, 9)))
    assert chain.broken().position == 6


def rewrite(chain: Chain, position: int) -> None:
    """Change an entry like an attacker who can write every row but cannot sign."""
    one = chain.sealed[position - 1]
    chain.sealed[position - 1] = replace(one, entry={**(one.entry or {}), "actor": "somebody else"})
    head = chain.sealed[position - 2].link if position > 1 else GENESIS
    for index in range(position - 1, len(chain.sealed)):
        one = chain.sealed[index]
        head = link(head, one.entry or {})
        chain.sealed[index] = replace(one, link=head)


@pytest.mark.parametrize(("position", "first"), [(1, 1), (4, 1), (5, 5), (12, 9)])
def test_a_chain_that_was_linked_anew_does_not_meet_its_checkpoint(chain: Chain, position: int, first: int) -> None:
    rewrite(chain, position)
    broken = chain.broken()
    assert broken.position == first
    assert f"positions {first} to {first + 3} were rewritten after checkpoint" in broken.why


def test_a_checkpoint_of_somebody_else_does_not_count(chain: Chain) -> None:
    rewrite(chain, 6)
    thief = SigningKey.generate()
    forged = replace(chain.checkpoints[1], head=chain.sealed[7].link.hex())
    chain.checkpoints[1] = forged.signed(thief)
    assert "not in the keyring" in chain.broken().why
    chain.checkpoints[1] = replace(forged.signed(thief), key_id=KEY.key_id)
    assert "forged" in chain.broken().why


CHANGES: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "position": lambda c: replace(c, position=c.position - 1),
    "head": lambda c: replace(c, head="00" * 32),
    "at": lambda c: replace(c, at="2020-01-01T00:00:00.000000Z"),
    "previous": lambda c: replace(c, previous="00" * 32),
    "released": lambda c: replace(c, released=RUNS[2]),
    "number": lambda c: replace(c, number=c.number + 1),
    "signature": lambda c: replace(c, signature=bytes([c.signature[0] ^ 1]) + c.signature[1:]),
    "tenant_id": lambda c: replace(c, tenant_id=RUNS[0]),
}


def test_a_change_of_any_field_of_a_checkpoint_is_found(chain: Chain) -> None:
    for index, one in enumerate(list(chain.checkpoints)):
        for field, change in CHANGES.items():
            chain.checkpoints[index] = change(one)
            assert not chain.verdict().ok, (index, field)
        chain.checkpoints[index] = one
    assert chain.verdict().ok


def test_a_deleted_checkpoint_is_found() -> None:
    for index in range(3):
        chain = Chain()
        del chain.checkpoints[index]
        why = chain.broken().why
        assert "is missing" in why if index < 2 else "no checkpoint covers positions 9 to 12" in why


def test_a_chain_cut_back_to_an_older_checkpoint_is_found_with_one_that_was_kept_elsewhere(chain: Chain) -> None:
    kept = chain.checkpoints[2]
    del chain.sealed[8:], chain.checkpoints[2:]
    assert chain.verdict().ok  # nothing in the log shows that there was more
    broken = chain.broken(anchors=[kept])
    assert broken.position == 9 and "checkpoint 3, which you hold, covers 12 entries" in broken.why


def test_history_that_was_redone_with_the_key_is_found_with_a_checkpoint_that_was_kept_elsewhere(chain: Chain) -> None:
    redone = Chain([*ENTRIES[:5], entry(2, 2, actor="somebody else"), *ENTRIES[6:]])
    assert redone.verdict().ok
    assert "history was redone" in redone.broken(anchors=[chain.checkpoints[2]]).why
    assert chain.verdict(anchors=chain.checkpoints).ok


def test_an_entry_that_was_lost_before_it_was_sealed_shows_as_a_gap_in_its_run() -> None:
    gap = [one for one in ENTRIES if (one["run_id"], one["seq"]) != (RUNS[1], 2)]
    broken = Chain(gap).broken()
    assert (broken.run_id, broken.seq) == (RUNS[1], 3)
    assert "entry 2 was never sealed" in broken.why


def test_a_place_that_was_sealed_without_its_entry_stays_broken() -> None:
    chain = Chain(ENTRIES[:4])
    head = missing_link(chain.sealed[-1].link, RUNS[1], 2)
    chain.sealed.append(LinkedEntry(5, RUNS[1], 2, head, None))
    chain.sign()
    assert chain.broken().position == 5


def test_nothing_follows_the_end_of_a_run() -> None:
    end = entry(0, 2, step=None, to_state="succeeded")
    assert Chain([entry(0, 1), end]).verdict().ok
    assert not Chain([entry(0, 1), end, entry(0, 3)]).verdict().ok


# ---------------------------------------------------------------- rotation, retention


def test_after_a_rotation_both_keys_count(chain: Chain) -> None:
    new = chain.key = SigningKey.generate()
    chain.seal([entry(0, 5)])
    assert not chain.verdict().ok
    assert chain.verdict(RING | Keyring([new.verify_key])).ok


def test_entries_that_retention_let_go_are_no_fault_once_that_is_signed(chain: Chain) -> None:
    chain.sealed = [replace(one, entry=None) if one.run_id < RUNS[2] else one for one in chain.sealed]
    assert chain.broken().position == 1
    chain.sign(released=RUNS[2])
    assert chain.verdict().ok
    chain.seal([entry(2, 5)])
    assert chain.checkpoints[-1].released == RUNS[2]
    assert chain.verdict().ok


def test_what_retention_did_not_let_go_is_still_missed(chain: Chain) -> None:
    chain.sign(released=RUNS[1])
    chain.sealed[1] = replace(chain.sealed[1], entry=None)
    assert chain.broken().position == 2


def test_a_release_that_nobody_signed_excuses_nothing(chain: Chain) -> None:
    chain.sealed[0] = replace(chain.sealed[0], entry=None)
    chain.checkpoints[-1] = replace(chain.checkpoints[-1], released=RUNS[2])
    assert chain.broken().position == 1


# ---------------------------------------------------------------- forms


def test_a_checkpoint_survives_being_written_down(chain: Chain) -> None:
    for one in chain.checkpoints:
        assert Checkpoint.from_dict(one.as_dict()) == one


def test_a_time_has_one_spelling() -> None:
    assert utc(NOON) == utc(NOON.astimezone(timezone(timedelta(hours=5)))) == "2026-11-16T12:00:00.000000Z"


def test_a_journal_digest_covers_every_entry_and_their_order() -> None:
    journal = [entry(0, seq) for seq in range(1, 4)]
    digests = {journal_digest(j) for j in (journal, journal[:-1], journal[::-1], [], [*journal, entry(0, 4)])}
    assert len(digests) == 5


words = st.none() | st.text(st.characters(exclude_categories=["Cs"]))
numbers = st.none() | st.integers(0, 2**53 - 1)


@given(
    st.fixed_dictionaries(dict.fromkeys(("step", "from_state", "event", "to_state", "actor", "type"), words)),
    numbers,
)
def test_a_leaf_is_canonical_json(fields: dict[str, Any], number: int | None) -> None:
    one = entry(0, 1, **fields, token=number, attempt=number)
    assert leaf(one) == canonical({**one, "at": utc(one["at"])})
