"""The journal: the entries of a run, their fold, and the next possible actions."""

from interlock.journal.advance import ENGINE, EventSubscription, InterruptInFlight, NextActions, Suspend, advance
from interlock.journal.agent_loop import ModelReply, next_keys
from interlock.journal.approval_request import ApprovalKind, ApprovalRequest, request_approval
from interlock.journal.cause import DEADLINE, POLICY, Cause, cause_of_command, cause_of_step
from interlock.journal.commands import TIMED_OUT, CommandType, RunCommand, apply_command
from interlock.journal.compensation import RunOutcome, begin_compensation
from interlock.journal.entry import Entry, EntryType
from interlock.journal.journal import FATAL, FlowEnd, Journal, StepSnapshot, encode
from interlock.journal.output import NO_OUTPUT, as_stored, read_back
from interlock.journal.release import LeaseRelease, final_release, release_for, requeue

__all__ = [
    "DEADLINE",
    "ENGINE",
    "FATAL",
    "NO_OUTPUT",
    "POLICY",
    "TIMED_OUT",
    "ApprovalKind",
    "ApprovalRequest",
    "Cause",
    "CommandType",
    "Entry",
    "EntryType",
    "EventSubscription",
    "FlowEnd",
    "InterruptInFlight",
    "Journal",
    "LeaseRelease",
    "ModelReply",
    "NextActions",
    "RunCommand",
    "RunOutcome",
    "StepSnapshot",
    "Suspend",
    "advance",
    "apply_command",
    "as_stored",
    "begin_compensation",
    "cause_of_command",
    "cause_of_step",
    "encode",
    "final_release",
    "next_keys",
    "read_back",
    "release_for",
    "request_approval",
    "requeue",
]
