"""What happened: the entries of a run, their fold, and what may come next."""

from interlock.journal.advance import ENGINE, Awaited, Next, Stop, Wait, advance
from interlock.journal.ask import Ask, AskKind, ask
from interlock.journal.conclude import Leave, conclude, ended, go_on
from interlock.journal.entry import Entry, EntryType
from interlock.journal.journal import FATAL, FlowEnd, Journal, StepFold, encode
from interlock.journal.output import NO_OUTPUT, as_stored, read_back
from interlock.journal.turns import Reply, next_keys
from interlock.journal.undo import Settle, wind_up
from interlock.journal.words import TIMED_OUT, Command, Word, apply_word

__all__ = [
    "ENGINE",
    "FATAL",
    "NO_OUTPUT",
    "TIMED_OUT",
    "Ask",
    "AskKind",
    "Awaited",
    "Command",
    "Entry",
    "EntryType",
    "FlowEnd",
    "Journal",
    "Leave",
    "Next",
    "Reply",
    "Settle",
    "StepFold",
    "Stop",
    "Wait",
    "Word",
    "advance",
    "apply_word",
    "as_stored",
    "ask",
    "conclude",
    "encode",
    "ended",
    "go_on",
    "next_keys",
    "read_back",
    "wind_up",
]
