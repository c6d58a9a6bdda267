"""The lifecycles: every state and every transition, defined once.

The CHECK constraints, triggers, diagrams, enums, metric labels and reference docs are rendered from these
tables (`render.py`); nothing else in the package spells out a state list.
"""

from interlock.lifecycle.approval import APPROVAL, ApprovalEvent, ApprovalState, Tier
from interlock.lifecycle.couplings import COUPLINGS, fired_by, fires
from interlock.lifecycle.idempotency import IDEMPOTENCY, IdempotencyEvent, IdempotencyState
from interlock.lifecycle.job import JOB, JobEvent, JobState
from interlock.lifecycle.machine import Machine, Term, Transition
from interlock.lifecycle.receipt import RECEIPT, ReceiptEvent, ReceiptState
from interlock.lifecycle.run import RUN, RunEvent, RunReason, RunState
from interlock.lifecycle.step import SETTLED_WELL, STEP, StepEvent, StepState
from interlock.lifecycle.worker import MAY_APPEND, WORKER, WorkerEvent, WorkerState

MACHINES = (RUN, STEP, APPROVAL, RECEIPT, WORKER, JOB, IDEMPOTENCY)

__all__ = [
    "APPROVAL",
    "COUPLINGS",
    "IDEMPOTENCY",
    "JOB",
    "MACHINES",
    "MAY_APPEND",
    "RECEIPT",
    "RUN",
    "SETTLED_WELL",
    "STEP",
    "WORKER",
    "ApprovalEvent",
    "ApprovalState",
    "IdempotencyEvent",
    "IdempotencyState",
    "JobEvent",
    "JobState",
    "Machine",
    "ReceiptEvent",
    "ReceiptState",
    "RunEvent",
    "RunReason",
    "RunState",
    "StepEvent",
    "StepState",
    "Term",
    "Tier",
    "Transition",
    "WorkerEvent",
    "WorkerState",
    "fired_by",
    "fires",
]
