"""Everything that is derived from the tables: constraints, triggers, diagrams, label sets, reference pages.

The migrations carry what is rendered here as plain text, so that an old migration never changes its meaning;
a test compares what the database enforces with what these functions say today.
"""

from collections.abc import Iterable
from typing import Any

from interlock.lifecycle.couplings import COUPLINGS
from interlock.lifecycle.machine import Machine, Term

AnyMachine = Machine[Any, Any]


def listed(terms: Iterable[Term]) -> str:
    return ", ".join(f"'{term}'" for term in terms)


def checks(machine: AnyMachine) -> dict[str, str]:
    """CHECK constraints of the table that holds this machine's state in `status`, by constraint name."""
    found = {f"{machine.name}_status": f"status IN ({listed(machine.states)})"}
    for column, states in machine.columns.items():
        within = listed(s for s in machine.states if s in states)
        found[f"{machine.name}_{column}"] = f"({column} IS NOT NULL) = (status IN ({within}))"
    return found


def illegal_move(machine: AnyMachine) -> str:
    """The WHEN of the trigger that refuses an UPDATE of `status` which is in no row of the table."""
    rows = []
    for source in machine.states:
        targets = sorted({t.target for t in machine.transitions() if t.source == source}, key=machine.states.index)
        if targets:
            rows.append(f"WHEN '{source}' THEN NEW.status NOT IN ({listed(targets)})")
    return "OLD.status <> NEW.status AND CASE OLD.status " + " ".join(rows) + " ELSE true END"


def final(machine: AnyMachine) -> str:
    """The WHEN of the trigger that refuses any UPDATE of a row that has ended."""
    return f"OLD.status IN ({listed(s for s in machine.states if s in machine.terminal)})"


def legal_entry(run: AnyMachine, step: AnyMachine) -> str:
    """The CHECK of a journal entry: its transition stands in the run's table, or in the step's if it names one.

    One comparison with one list: the journal pays for this at every entry, and the server reads a constraint's text
    anew for every statement.
    """
    moves = ",".join(f"{m.name}:{t.source}:{t.event}:{t.target}" for m in (run, step) for t in m.transitions())
    return (
        "CASE"
        " WHEN event IS NULL THEN from_state IS NULL AND to_state IS NULL"
        # A CHECK lets NULL pass, and every comparison below is NULL without a target.
        " WHEN to_state IS NULL THEN false"
        f" WHEN from_state IS NULL THEN step IS NULL AND event = 'create' AND to_state = '{run.initial}'"
        f" ELSE CASE WHEN step IS NULL THEN '{run.name}:' ELSE '{step.name}:' END"
        f" || from_state || ':' || event || ':' || to_state = ANY ('{{{moves}}}'::text[]) END"
    )


def legal_history(*machines: AnyMachine) -> str:
    """The CHECK of a line of history: its transition stands in the table of the machine that it names."""
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
    """Every (from_state, to_state) a transition counter can have."""
    return sorted({(str(t.source), str(t.target)) for t in machine.transitions()})


def reference(machines: Iterable[AnyMachine]) -> str:
    """docs/reference/lifecycles.md"""
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
