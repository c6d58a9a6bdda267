"""Output derived from the tables: constraints, triggers, diagrams, label sets, reference pages.

The migrations contain this output as plain text, so that an old migration never changes its meaning;
a test compares what the database enforces with the current output of these functions.
"""

from collections.abc import Iterable
from typing import Any

from interlock.lifecycle.couplings import COUPLINGS
from interlock.lifecycle.machine import Machine, Term

AnyMachine = Machine[Any, Any]


def listed(terms: Iterable[Term]) -> str:
    return ", ".join(f"'{term}'" for term in terms)


def checks(machine: AnyMachine) -> dict[str, str]:
    """Return the CHECK constraints of the table with this machine's state in `status`, by constraint name.

    Their lists are in domains, and so is the list of all states, the type of `status`: the server parses a constraint's
    text again for every statement, but a domain's only once for each connection.
    """
    found = {}
    for column in machine.columns:
        without, having = (f"status::interlock.{domain}" for domain in _domains_of(machine, column))
        found[f"{machine.name}_{column}"] = f"CASE WHEN {column} IS NULL THEN {without} ELSE {having} END IS NOT NULL"
    return found


def domains(machine: AnyMachine) -> dict[str, tuple[str, str]]:
    """Return the domains of the checks: each with its text, and its constraint's name, which errors show."""
    found = {f"{machine.name}_state": (f"{machine.name}_status", f"VALUE IN ({listed(machine.states)})")}
    for column, states in machine.columns.items():
        without, having = _domains_of(machine, column)
        for domain, is_there in ((without, False), (having, True)):
            within = listed(s for s in machine.states if (s in states) is is_there)
            found[domain] = (f"{machine.name}_{column}", f"VALUE IN ({within})")
    return found


def _domains_of(machine: AnyMachine, column: str) -> tuple[str, str]:
    return f"{machine.name}_without_{column}", f"{machine.name}_with_{column}"


def may_move(machine: AnyMachine) -> str:
    """Return the body of the function that decides whether an UPDATE may change `before` to `after`."""
    rows = []
    for source in machine.states:
        targets = sorted({t.target for t in machine.transitions() if t.source == source}, key=machine.states.index)
        if targets:
            rows.append(f"    WHEN '{source}' THEN after IN ({listed(targets)})\n")
    return "\nBEGIN\n  RETURN CASE before\n" + "".join(rows) + "    ELSE false\n  END;\nEND "


def illegal_move(machine: AnyMachine) -> str:
    """Return the WHEN of the trigger that refuses an UPDATE of `status` that is in no row of the table."""
    return f"OLD.status <> NEW.status AND NOT interlock.{machine.name}_may_move(OLD.status, NEW.status)"


def final(machine: AnyMachine) -> str:
    """Return the WHEN of the trigger that refuses any UPDATE of an ended row; most have a column that marks the end."""
    if mark := next((column for column, states in machine.columns.items() if states == machine.terminal), None):
        return f"OLD.{mark} IS NOT NULL"
    return f"OLD.status IN ({listed(s for s in machine.states if s in machine.terminal)})"


# The CHECK of a journal entry: its transition is one of `entry_moves`. Compared as an array, so that NULLs take part.
LEGAL_ENTRY = (
    "(CASE WHEN step IS NULL THEN 'run ' ELSE 'step ' END || ARRAY[from_state, event, to_state]::text)"
    "::interlock.entry_move IS NOT NULL"
)


def entry_moves(run: AnyMachine, step: AnyMachine) -> tuple[str, str]:
    """Return the domain of an entry's transition: of the run, of the step that the entry names, or none."""
    moves = ["run {NULL,NULL,NULL}", "step {NULL,NULL,NULL}", f"run {{NULL,create,{run.initial}}}"]
    for name, machine in (("run", run), ("step", step)):
        moves += [f"{name} {{{t.source},{t.event},{t.target}}}" for t in machine.transitions()]
    return "journal_entry_transition", "VALUE IN (" + ", ".join(f"'{move}'" for move in moves) + ")"


def legal_history(*machines: AnyMachine) -> str:
    """Return the CHECK of a history line: its transition must be in the table of the machine that it names."""
    begins = ",".join(f"{m.name}:{m.initial}" for m in machines)
    moves = ",".join(f"{m.name}:{t.source}:{t.event}:{t.target}" for m in machines for t in m.transitions())
    return (
        "CASE"
        " WHEN event IS NULL THEN from_state IS NULL AND to_state IS NULL"
        " WHEN to_state IS NULL THEN false"
        f" WHEN from_state IS NULL THEN event = 'create' AND machine || ':' || to_state = ANY ('{{{begins}}}'::text[])"
        f" ELSE machine || ':' || from_state || ':' || event || ':' || to_state = ANY ('{{{moves}}}'::text[]) END"
    )


def mermaid(machine: AnyMachine) -> str:
    lines = ["stateDiagram-v2", f"  [*] --> {machine.initial}"]
    merged: dict[tuple[str, str], list[str]] = {}
    for t in machine.transitions():
        merged.setdefault((str(t.source), str(t.target)), []).append(str(t.event))
    lines += [f"  {source} --> {target}: {', '.join(events)}" for (source, target), events in merged.items()]
    lines += [f"  {state} --> [*]" for state in machine.states if state in machine.terminal]
    return "\n".join(lines)


def label_sets(machine: AnyMachine) -> list[tuple[str, str]]:
    """Return every (from_state, to_state) that a transition counter can have."""
    return sorted({(str(t.source), str(t.target)) for t in machine.transitions()})


def reference(machines: Iterable[AnyMachine]) -> str:
    """Return the text of docs/reference/lifecycles.md."""
    out = ["# Lifecycles", "", "Generated from `interlock.lifecycle` by `make docs`.", ""]
    for machine in machines:
        out += [f"## {machine.name.capitalize()}", "", "```mermaid", mermaid(machine), "```", ""]
        out += ["| state | means | |", "|---|---|---|"]
        for state in machine.states:
            mark = "initial" if state == machine.initial else "final" if state in machine.terminal else ""
            out.append(f"| `{state}` | {state.doc} | {mark} |")
        out += ["", "| from | event | to | when |", "|---|---|---|---|"]
        out += [f"| `{t.source}` | {t.event} | `{t.target}` | {t.event.doc} |" for t in machine.transitions()]
        out.append("")
    out += ["## Couplings", "", "| when | happens | then | happens | if |", "|---|---|---|---|---|"]
    out += [f"| {c.machine} | {c.event} | {c.fires} | {c.with_event} | {c.when} |" for c in COUPLINGS]
    return "\n".join(out) + "\n"
