"""A state machine is one table: for each state, the possible events and where they lead."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Generic, Self, TypeVar

from interlock.errors import InvalidTransition


class Term(StrEnum):
    """A term of the product with its meaning, so that no view has to explain it again."""

    doc: str

    def __new__(cls, value: str, doc: str = "") -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.doc = doc
        return member


S = TypeVar("S", bound=Term)
E = TypeVar("E", bound=Term)


@dataclass(frozen=True, slots=True)
class Transition(Generic[S, E]):
    source: S
    event: E
    target: S

    def __str__(self) -> str:
        return f"{self.source} -{self.event}-> {self.target}"


@dataclass(frozen=True)
class Machine(Generic[S, E]):
    """The first row is the initial state; rows without exits are terminal.

    An event may have several targets where the circumstances decide (cancel: is something in flight?);
    the caller then names the one it means. `columns` are non-null exactly in the states given.
    """

    name: str
    table: Mapping[S, Mapping[E, S | tuple[S, ...]]]
    columns: Mapping[str, frozenset[S]] = field(default_factory=dict)

    @property
    def initial(self) -> S:
        return next(iter(self.table))

    @cached_property
    def states(self) -> tuple[S, ...]:
        return tuple(self.table)

    @cached_property
    def terminal(self) -> frozenset[S]:
        return frozenset(state for state, exits in self.table.items() if not exits)

    @cached_property
    def open(self) -> frozenset[S]:
        return frozenset(self.table) - self.terminal

    def transitions(self) -> Iterator[Transition[S, E]]:
        for source, exits in self.table.items():
            for event, targets in exits.items():
                for target in targets if isinstance(targets, tuple) else (targets,):
                    yield Transition(source, event, target)

    def allowed(self, state: S) -> tuple[E, ...]:
        return tuple(self.table[state])

    def targets(self, state: S, event: E) -> tuple[S, ...]:
        found = self.table[state].get(event, ())
        return found if isinstance(found, tuple) else (found,)

    def permits(self, source: S, event: E, target: S) -> bool:
        return target in self.targets(source, event)

    def move(self, state: S, event: E, to: S | None = None) -> S:
        """Return the state after `event`, or raise InvalidTransition with the allowed events."""
        targets = self.targets(state, event)
        if to is None and len(targets) == 1:
            return targets[0]
        if to is not None and to in targets:
            return to
        raise self.refusal(state, event)

    def refusal(self, state: S, event: E | str) -> InvalidTransition:
        """Return the error for an impossible event: where it would have led, and the possible events of this state."""
        return InvalidTransition(
            machine=self.name,
            state=state,
            event=event,
            allowed=self.allowed(state),
            terminal=state in self.terminal,
            asked=dict.fromkeys(t.target for t in self.transitions() if t.event == event),
            allowed_states=dict.fromkeys(t.target for t in self.transitions() if t.source == state),
        )
