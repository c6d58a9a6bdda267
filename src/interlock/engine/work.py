"""A unit of work: one transaction of a command, and what its functions need."""

from dataclasses import dataclass

from interlock.engine.workflows import Plans
from interlock.store.pool import Tx


@dataclass(frozen=True, slots=True)
class UnitOfWork:
    tx: Tx
    plans: Plans
