"""Checks across steps: who waits for whom, who never gets its turn, and whose output an expression may use."""

from collections.abc import Iterator, Mapping

from interlock.definition.expression import FUNCTIONS, MACROS, ROOTS, Expression, Secret, Template
from interlock.definition.fault import Faults, Path, suggestion
from interlock.definition.plan import Step, StepKind

Steps = Mapping[str, Step]

_SECRETS_GO = "a secret can only go into the input of a tool: what is asked here is kept, and shown to people"
_SECRETS_STAND = 'a secret stands for itself: write ${secrets.name}, or "Bearer ${secrets.name}" with text around it'


def check(by_key: Steps, faults: Faults) -> None:
    order = _order(by_key)
    check_needs(by_key, faults)
    check_cycles(by_key, frozenset(by_key) - set(order), faults)
    check_never_run(by_key, order, faults)
    upstream = _upstream(by_key, order)
    for key, step in by_key.items():
        # Behind a cycle nobody stands before anybody; the cycle has its own fault.
        before = upstream.get(key, frozenset(by_key))
        for path, expression in expressions(step):
            # What undoes a step comes after it, and sees what it returned.
            undoes = path[2] == "compensate"
            if check_steps(expression, path, step, by_key, before | {key} if undoes else before, faults):
                check_names(expression, path, faults, (*ROOTS, "output") if undoes else ROOTS)
        for path in misplaced_secrets(step):
            faults.add(path, _SECRETS_GO)


def check_needs(by_key: Steps, faults: Faults) -> None:
    for step in by_key.values():
        for at, key in enumerate(step.needs):
            path = (*_path(step), "needs", at)
            if key == step.key:
                faults.add(path, "a step cannot need itself")
            elif key not in by_key:
                faults.add(path, f"no step has the id `{key}`{suggestion(key, by_key)}")
            elif key in step.needs[:at]:
                faults.add(path, f"`{key}` is listed twice")


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
    """The steps from this one back to one that was met before. Each stuck step waits for another, so there is one."""
    trail: list[str] = []
    while key not in trail and key not in explained:
        trail.append(key)
        key = next(before for before in _before(by_key[key], by_key) if before in stuck)
    return trail, key


def check_never_run(by_key: Steps, order: list[str], faults: Faults) -> None:
    """A skip passes along `needs`; a step that is switched off itself is its author's business."""
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
    expression: Expression, path: Path, step: Step, by_key: Steps, upstream: frozenset[str], faults: Faults
) -> bool:
    """False when the other names of the expression make no sense until this is mended."""
    if expression.references.any_step:
        faults.add(path, '`steps` alone says too little; name the step: steps.lookup or steps["look-up"]')
    for key in sorted(expression.steps() - upstream):
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


def expressions(step: Step) -> Iterator[tuple[Path, Expression]]:
    if step.when is not None:
        yield (*_path(step), "when"), step.when
    for where, template in _templates(step).items():
        for path, expression in template.expressions():
            yield (*where, *path), expression


def misplaced_secrets(step: Step) -> Iterator[Path]:
    for where, template in _templates(step).items():
        if where[-1] != "input" or step.kind is StepKind.FLOW:
            yield from ((*where, *path) for path, leaf in template.leaves() if isinstance(leaf, Secret))


def _templates(step: Step) -> dict[Path, Template]:
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
    """Steps in an order in which they can start; those on or behind a cycle are not in it."""
    waits = {key: set(_before(step, by_key)) for key, step in by_key.items()}
    later: dict[str, list[str]] = {key: [] for key in by_key}
    for key, before in waits.items():
        for other in before:
            later[other].append(key)
    order = [key for key, before in waits.items() if not before]
    for key in order:  # grows while it is walked
        for other in later[key]:
            waits[other].discard(key)
            if not waits[other]:
                order.append(other)
    return order


def _upstream(by_key: Steps, order: list[str]) -> dict[str, frozenset[str]]:
    upstream: dict[str, frozenset[str]] = {}
    for key in order:
        before = tuple(_before(by_key[key], by_key))
        upstream[key] = frozenset(before).union(*(upstream[other] for other in before))
    return upstream


def _before(step: Step, by_key: Steps) -> Iterator[str]:
    # Needing oneself and needing nobody that exists are faults of their own.
    return (key for key in step.after if key in by_key and key != step.key)


def _path(step: Step) -> Path:
    return "steps", step.index
