"""A trigger: the workflow that a webhook delivery or a Slack command starts, and its input."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import orjson

from interlock.definition import document
from interlock.definition.diagnostics import Faults, Path
from interlock.definition.expression import SECRET_NAME, Expression, ExpressionFailed, Scope, SecretReference, Template
from interlock.definition.mapping_reader import MappingReader
from interlock.definition.plan import digest_of
from interlock.definition.validation import check_known
from interlock.errors import DefinitionInvalid
from interlock.lifecycle import Term
from interlock.wire.validation_errors import described

# The values visible to a trigger's expressions.
ROOTS = ("payload", "event", "headers")

_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,99}")
_EVENT = re.compile(r"[a-z_]+(\.[a-z_]+)?")
_HEADER = re.compile(r"[A-Za-z0-9-]{1,100}")
_COMMAND = re.compile(r"/[a-z0-9_-]{1,31}")
# The command for Interlock itself.
OWN_COMMAND = "/interlock"
_WORDS = "lower-case letters, digits, `_`, `.` and `-`, beginning with a letter"
_LONGEST_ID = 255
_MOST_BYTES = 32 << 10


class TriggerKind(Term):
    GITHUB = "github", "A GitHub webhook."
    WEBHOOK = "webhook", "Any signed webhook."
    SLACK = "slack", "A command in Slack."


_EXAMPLES = {
    TriggerKind.GITHUB: "{secret: github_deploys, events: [push]}",
    TriggerKind.WEBHOOK: "{secret: alerts_key}",
    TriggerKind.SLACK: "{command: /deploy}",
}


@dataclass(frozen=True, slots=True)
class IncomingEvent:
    """An incoming event in the form that expressions see."""

    source: str
    type: str
    payload: Any
    headers: Mapping[str, str] = field(default_factory=dict)
    action: str | None = None
    id: str | None = None
    # Whether a long evaluation would block others: see `Scope`.
    on_event_loop: bool = field(default=False, compare=False)

    @property
    def name(self) -> str:
        return f"{self.type}.{self.action}" if self.action else self.type

    def scope(self) -> Scope:
        event = {"source": self.source, "type": self.type, "action": self.action, "id": self.id}
        scope = Scope.of(payload=self.payload, event=event, headers=dict(self.headers))
        scope.on_event_loop = self.on_event_loop
        return scope


@dataclass(frozen=True, slots=True)
class TriggerDefinition:
    name: str
    kind: TriggerKind
    workflow: str
    when: Expression | None
    # None means the unchanged payload.
    input: Template | None
    secret: str | None
    events: tuple[str, ...]
    # For a webhook that is not signed by Standard Webhooks: the header with its HMAC, and the expression for a
    # delivery's id.
    header: str | None
    id: Expression | None
    command: str | None
    source: Mapping[str, Any]
    digest: str

    def ignores(self, event: IncomingEvent) -> str | None:
        """Return why this event starts nothing, or None.

        Raise UnusableEvent for a condition that cannot be evaluated.
        """
        if self.events and event.type not in self.events and event.name not in self.events:
            return f"it is about {', '.join(self.events)}, not {event.name}"
        if self.when is None:
            return None
        wanted = _evaluated("when", self.when, event)
        if not isinstance(wanted, bool):
            raise UnusableEvent(f"when: `{self.when.source}` gave {described(wanted)}; a condition gives true or false")
        return None if wanted else f"`{self.when.source}` is false"

    def input_for(self, event: IncomingEvent) -> dict[str, Any]:
        try:
            made = event.payload if self.input is None else self.input.render(event.scope())
        except ExpressionFailed as error:
            raise UnusableEvent(f"input: {error}") from None
        if not isinstance(made, dict):
            whose = "its payload" if self.input is None else "input"
            raise UnusableEvent(f"{whose} is {described(made)}; a run's input is a mapping, so write `input:` as one")
        try:
            orjson.dumps(made)  # a parsed value may be nested too deeply to be serialized
        except orjson.JSONEncodeError as error:
            raise UnusableEvent(f"input: it cannot be stored: {error}") from None
        return made

    def id_of(self, event: IncomingEvent) -> str:
        assert self.id is not None
        found = _evaluated("id", self.id, event)
        if isinstance(found, bool) or not isinstance(found, str | int) or not 0 < len(str(found)) <= _LONGEST_ID:
            raise UnusableEvent(f"id: `{self.id.source}` gave {described(found)}; it has to name the delivery, shortly")
        return str(found)


class UnusableEvent(ValueError):
    """An event for which the trigger's expressions have no value."""


def _evaluated(where: str, expression: Expression, event: IncomingEvent) -> Any:
    try:
        return expression.evaluate(event.scope())
    except ExpressionFailed as error:
        raise UnusableEvent(f"{where}: {error}") from None


# ---------------------------------------------------------------- reading


def parse(text: str | bytes, file: str = "trigger") -> TriggerDefinition:
    """Return the trigger of a definition. Raise `DefinitionInvalid` with every fault and its line."""
    if len(text) > _MOST_BYTES:
        faults = Faults(file)
        faults.add((), f"a trigger is at most {_MOST_BYTES >> 10} KiB long: it is read for each delivery")
        raise DefinitionInvalid(faults.sorted())
    return document.made_from(text, file, _trigger)


@lru_cache(maxsize=256)
def load(source: str) -> TriggerDefinition:
    """Return the trigger of a stored source, which is JSON."""
    return document.made_from(source, "trigger", _trigger)


def _trigger(value: Any, faults: Faults) -> TriggerDefinition:
    if not isinstance(value, dict):
        faults.add((), f"expected a trigger with a name, a kind and a workflow, found {described(value)}")
        raise DefinitionInvalid(faults.sorted())
    source = {key: member for key, member in value.items() if member is not None}
    top = MappingReader(source, (), faults)
    top.only(("name", *TriggerKind, "workflow", "when", "input"))
    kind = _kind(top)
    about = top.section(kind, _EXAMPLES[kind])
    header = _header(about) if kind is TriggerKind.WEBHOOK else None
    trigger = TriggerDefinition(
        name=_named(top, "name", _NAME, _WORDS),
        kind=kind,
        workflow=_named(top, "workflow", _NAME, _WORDS),
        when=top.condition("when"),
        input=_input(top),
        secret=_secret(about) if kind is not TriggerKind.SLACK and top.has(kind) else None,
        events=_events(about) if kind is TriggerKind.GITHUB else (),
        header=header,
        id=_id(about, header) if kind is TriggerKind.WEBHOOK else None,
        command=_command(about) if kind is TriggerKind.SLACK else None,
        source=source,
        digest=digest_of(source),
    )
    about.only(_KNOWN[kind])
    _check_expressions(trigger, faults)
    if faults:
        raise DefinitionInvalid(faults.sorted())
    return trigger


_KNOWN = {
    TriggerKind.GITHUB: ("secret", "events"),
    TriggerKind.WEBHOOK: ("secret", "header", "id"),
    TriggerKind.SLACK: ("command",),
}


def _kind(top: MappingReader) -> TriggerKind:
    kinds = [kind for kind in TriggerKind if kind in top.value]
    if not kinds:
        top.faults.add((), "nothing starts it; give it one of github, webhook or slack, such as "
                       f"`github: {_EXAMPLES[TriggerKind.GITHUB]}`")  # fmt: skip
    elif len(kinds) > 1:
        top.fault(kinds[1], f"a trigger is one of github, webhook or slack; this one is {' and '.join(kinds)}")
    return kinds[0] if kinds else TriggerKind.WEBHOOK


def _named(section: MappingReader, key: str, pattern: re.Pattern[str], what: str) -> str:
    if not section.has(key):
        section.fault(key, f"`{key}` is missing")
        return ""
    text = section.text(key)
    if isinstance(section.value[key], str) and not pattern.fullmatch(text):
        section.fault(key, f"expected a name of at most 100 {what}, found {text[:120]!r}")
    return text


def _secret(about: MappingReader) -> str:
    return _named(about, "secret", SECRET_NAME, "of a-z, 0-9 and `_`")


def _events(about: MappingReader) -> tuple[str, ...]:
    if not about.has("events"):
        return ()
    events = about.items("events", "events such as push or pull_request.opened")
    for at, event in enumerate(events):
        if not isinstance(event, str) or not _EVENT.fullmatch(event):
            found = repr(event[:120]) if isinstance(event, str) else described(event)
            about.faults.add((*about.path, "events", at), f"expected push or pull_request.opened, found {found}")
    return tuple(event for event in events if isinstance(event, str))


def _header(about: MappingReader) -> str | None:
    if not about.has("header"):
        return None
    text = about.text("header")
    if not _HEADER.fullmatch(text):
        about.fault("header", "expected the name of the header with the signature, such as X-Signature-256")
    return text.lower()


def _id(about: MappingReader, header: str | None) -> Expression | None:
    if header is None and about.has("id"):
        about.fault("id", "Standard Webhooks has an id of its own; `id` goes with `header`")
    if header is not None and not about.has("id"):
        about.fault("id", "`id` is missing: what names a delivery, so that a repetition can be told from another one; "
                          'write payload.id or headers["x-request-id"]')  # fmt: skip
    return about.condition("id")


def _command(about: MappingReader) -> str:
    command = about.text("command")
    if not _COMMAND.fullmatch(command):
        about.fault("command", "expected a command such as /deploy")
    elif command == OWN_COMMAND:
        about.fault("command", f"{OWN_COMMAND} is taken; give it one of its own, such as /deploy")
    return command


def _input(top: MappingReader) -> Template | None:
    if not top.has("input"):
        return None
    if not isinstance(top.value["input"], dict | str):
        top.expected("input", "a mapping such as {sha: ${payload.after}}")
    return top.template("input", {})


def _check_expressions(trigger: TriggerDefinition, faults: Faults) -> None:
    found: list[tuple[Path, Expression | SecretReference]] = []
    if trigger.when is not None:
        found.append((("when",), trigger.when))
    if trigger.id is not None:
        found.append(((trigger.kind, "id"), trigger.id))
    if trigger.input is not None:
        found += [(("input", *path), leaf) for path, leaf in trigger.input.leaves()]
    for path, leaf in found:
        if isinstance(leaf, SecretReference):
            faults.add(path, "the input of a run is kept and shown to people; use the secret in a step of the workflow")
            continue
        check_known(leaf, leaf.names(), path, faults, ROOTS)
