"""Checks across steps: dependencies, steps that can never start, and which outputs an expression may use."""

from collections.abc import Iterable, Iterator, Mapping

from interlock.definition.diagnostics import Faults, Path
from interlock.definition.expression import FUNCTIONS, MACROS, ROOTS, Expression, SecretReference, Template
from interlock.definition.plan import PlanStep, StepKind
from interlock.wire.validation_errors import suggestion

Steps = Mapping[str, PlanStep]

_SECRETS_GO = "a secret can only go into the input of a tool: what is asked here is kept, and shown to people"
_SECRETS_STAND = 'a secret stands for itself: write ${secrets.name}, or "Bearer ${secrets.name}" with text around it'


def check(by_key: Steps, faults: Faults) -> None:
    order = _order(by_key)
    check_needs(by_key, faults)
    check_cycles(by_key, frozenset(by_key) - set(order), faults)
    check_never_run(by_key, order, faults)
    upstream = Upstream(by_key, order)
    for key, step in by_key.items():
        for path, expression in expressions(step):
            # A compensation step comes after its step and sees its output.
            undoes = path[2] == "compensate"
            later = [
                other for other in expression.steps()
                if not upstream.settles_before(other, key) and not (undoes and other == key)
            ]  # fmt: skip
            if check_steps(expression, path, step, by_key, later, faults):
                check_names(expression, path, faults, (*ROOTS, "output") if undoes else ROOTS)
        for path in misplaced_secrets(step):
            faults.add(path, _SECRETS_GO)


def check_needs(by_key: Steps, faults: Faults) -> None:
    for step in by_key.values():
        listed: set[str] = set()
        for at, key in enumerate(step.needs):
            path = (*_path(step), "needs", at)
            if key == step.key:
                faults.add(path, "a step cannot need itself")
            elif key not in by_key:
                faults.add(path, f"no step has the id `{key}`{suggestion(key, by_key)}")
            elif key in listed:
                faults.add(path, f"`{key}` is listed twice")
            listed.add(key)


def check_cycles(by_key: Steps, stuck: frozenset[str], faults: Faults) -> None:
    explained: set[str] = set()
    for key in by_key:
        if key not in stuck or key in explained:
            continue
        trail, met = _walk_back(key, by_key, stuck, explained)
        cycle = trail[trail.index(met) :] if met in trail else []
        if cycle:
            first = min(range(len(cycle)), key=lambda at: by_key[cycle[at]].index)
            named = [*cycle[first:], *cycle[: first + 1]]
            path = (*_path(by_key[named[0]]), "needs")
            faults.add(path, f"a cycle: {' → '.join(named)} (each waits for the next)")
        for waiting in trail[: len(trail) - len(cycle)]:
            faults.add(_path(by_key[waiting]), f"`{waiting}` never runs: it waits for a cycle, by way of `{met}`")
        explained.update(trail)


def _walk_back(key: str, by_key: Steps, stuck: frozenset[str], explained: set[str]) -> tuple[list[str], str]:
    """Return the steps from this one back to one that was met before.

    Each stuck step waits for another, so it exists.
    """
    trail: list[str] = []
    while key not in trail and key not in explained:
        trail.append(key)
        key = next(before for before in _before(by_key[key], by_key) if before in stuck)
    return trail, key


def check_never_run(by_key: Steps, order: list[str], faults: Faults) -> None:
    """Report steps that never run because a needed step is always skipped.

    Skips pass along `needs`; a step may be switched off itself.
    """
    off = {key for key, step in by_key.items() if step.when is not None and step.when.source == "false"}
    for step in (by_key[key] for key in order):
        lost = next((key for key in step.needs if key in off), None)
        if lost is not None:
            off.add(step.key)
            faults.add((*_path(step), "needs"), f"`{step.key}` never runs: it needs `{lost}`, which is always skipped")


def check_names(expression: Expression, path: Path, faults: Faults, known: tuple[str, ...] = ROOTS) -> None:
    if "secrets" in expression.names():
        faults.add(path, _SECRETS_STAND if "input" in path[2:4] else _SECRETS_GO)
    check_known(expression, expression.names() - {"secrets"}, path, faults, known)


def check_known(
    expression: Expression, names: frozenset[str], path: Path, faults: Faults, known: tuple[str, ...]
) -> None:
    for name in sorted(names - {*known}):
        faults.add(path, f"unknown name `{name}`" + (suggestion(name, known) or f"; known are {', '.join(known)}"))
    for name in sorted(expression.functions() - FUNCTIONS - MACROS):
        faults.add(path, f"unknown function `{name}`{suggestion(name, FUNCTIONS | MACROS)}")


def check_steps(
    expression: Expression, path: Path, step: PlanStep, by_key: Steps, later: Iterable[str], faults: Faults
) -> bool:
    """Report the steps of an expression that may not be settled when its own step starts.

    Return False if checking the other names makes no sense until this is fixed.
    """
    if expression.references.any_step:
        faults.add(path, '`steps` alone says too little; name the step: steps.lookup or steps["look-up"]')
    for key in sorted(later):
        if key == step.key:
            faults.add(path, f"`steps.{key}` is this step itself, which has no output yet")
        elif key in by_key:
            faults.add(path, f"`steps.{key}` may not be settled when `{step.key}` starts; add it to needs")
        elif dashed := next((other for other in by_key if other.startswith(f"{key}-")), None):
            faults.add(path, f'`steps.{key}-…` is a subtraction in CEL; write steps["{dashed}"]')
            return False
        else:
            faults.add(path, f"no step has the id `{key}`{suggestion(key, by_key)}")
    return True


def expressions(step: PlanStep) -> Iterator[tuple[Path, Expression]]:
    if step.when is not None:
        yield (*_path(step), "when"), step.when
    for where, template in _templates(step).items():
        for path, expression in template.expressions():
            yield (*where, *path), expression


def misplaced_secrets(step: PlanStep) -> Iterator[Path]:
    for where, template in _templates(step).items():
        if where[-1] != "input" or step.kind is StepKind.FLOW:
            yield from ((*where, *path) for path, leaf in template.leaves() if isinstance(leaf, SecretReference))


def _templates(step: PlanStep) -> dict[Path, Template]:
    found = {(*_path(step), "input"): step.input}
    if step.duration is not None:
        found[(*_path(step), "wait", "duration")] = step.duration
    if step.event is not None:
        found[(*_path(step), "wait", "correlation")] = step.event.correlation
        if step.event.timeout is not None:
            found[(*_path(step), "wait", "timeout")] = step.event.timeout
    if step.undo is not None:
        found[(*_path(step), "compensate", "input")] = step.undo.input
    if step.gate is not None:
        found[(*_path(step), "approval", "summary")] = step.gate.summary
    return found


def _order(by_key: Steps) -> list[str]:
    """Return the steps in an order in which they can start, without those on or behind a cycle."""
    waits = {key: set(_before(step, by_key)) for key, step in by_key.items()}
    later: dict[str, list[str]] = {key: [] for key in by_key}
    for key, before in waits.items():
        for other in before:
            later[other].append(key)
    order = [key for key, before in waits.items() if not before]
    for key in order:  # grows during the loop
        for other in later[key]:
            waits[other].discard(key)
            if not waits[other]:
                order.append(other)
    return order


class Upstream:
    """Records which steps settle before which, as a bit for each.

    Sets would take space in the square of the number of steps.
    """

    def __init__(self, by_key: Steps, order: list[str]) -> None:
        self._bit = {key: 1 << at for at, key in enumerate(order)}
        self._known = by_key.keys()
        self._before: dict[str, int] = {}
        for key in order:
            before = 0
            for other in _before(by_key[key], by_key):
                before |= self._before[other] | self._bit[other]
            self._before[key] = before

    def settles_before(self, key: str, later: str) -> bool:
        """Return True if the first step settles before the second.

        Steps behind a cycle have no order; the cycle has its own fault, so any known step passes.
        """
        if later not in self._before:
            return key in self._known
        return bool(self._before[later] & self._bit.get(key, 0))


def _before(step: PlanStep, by_key: Steps) -> Iterator[str]:
    # A step that needs itself or a missing step has its own fault.
    return (key for key in step.after if key in by_key and key != step.key)


def _path(step: PlanStep) -> Path:
    return "steps", step.index
