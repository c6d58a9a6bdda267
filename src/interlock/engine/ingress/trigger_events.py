"""Derive the event from a delivery's headers and payload, in one place for deliveries and for trials.

If `trigger test` derived `event.type` in its own way, it would answer for events that no sender can send.
"""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from interlock.definition.trigger import IncomingEvent, TriggerDefinition, TriggerKind, UnusableEvent
from interlock.errors import Invalid

_PRIVATE_HEADERS = ("authorization", "cookie", "proxy-authorization")
_LONGEST_ID = 255
_TRIAL_ID = "test"
# Of the form that Slack sends with a command, expressions see these fields, and `words`.
_COMMAND_FIELDS = (
    "text", "command", "user_id", "user_name", "channel_id", "channel_name", "team_id", "team_domain",
)  # fmt: skip


def visible_headers(trigger: TriggerDefinition, headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that expressions may read. Credentials and signatures would end up in a run's input."""
    given = ((name.lower(), value) for name, value in headers.items())
    hidden = (*_PRIVATE_HEADERS, trigger.header)
    return {name: value for name, value in given if name not in hidden and "signature" not in name}


def github_event(
    trigger: TriggerDefinition, headers: Mapping[str, str], payload: Any, *, on_event_loop: bool = False
) -> IncomingEvent:
    seen = visible_headers(trigger, headers)
    type_, delivery = seen.get("x-github-event"), seen.get("x-github-delivery")
    if not type_ or not delivery or len(delivery) > _LONGEST_ID:
        raise Invalid("The headers X-GitHub-Event and X-GitHub-Delivery are required, as GitHub sends them.")
    action = payload.get("action") if isinstance(payload, dict) else None
    action = action if isinstance(action, str) else None
    return IncomingEvent("github", type_, payload, seen, action, delivery, on_event_loop)


def webhook_event(
    trigger: TriggerDefinition, headers: Mapping[str, str], payload: Any, *, on_event_loop: bool = False
) -> IncomingEvent:
    """Return the event of a webhook. An expression may compute its id, which can be too expensive for an event loop."""
    seen = visible_headers(trigger, headers)
    type_ = payload.get("type") if isinstance(payload, dict) else None
    event = IncomingEvent(
        "webhook", type_ if isinstance(type_, str) else "webhook", payload, seen, on_event_loop=on_event_loop
    )  # fmt: skip
    try:
        named = trigger.id_of(event) if trigger.header is not None else seen["webhook-id"]
    except UnusableEvent as error:
        raise Invalid(str(error), code="TRIGGER_UNFIT") from None
    if len(named) > _LONGEST_ID:
        raise Invalid(f"webhook-id may have {_LONGEST_ID} characters; this one has {len(named)}")
    return replace(event, id=named)


def words_of(text: str) -> list[str]:
    """Split a command's text as a shell would. Phones turn quotes into curly quotes, which count as quotes here."""
    for curly, straight in (("“", '"'), ("”", '"'), ("‘", "'"), ("’", "'")):
        text = text.replace(curly, straight)
    try:
        return shlex.split(text)
    except ValueError as error:
        raise Invalid(f"this cannot be read: {error}", code="TRIGGER_UNFIT") from None


def command_event(form: Mapping[str, str], *, on_event_loop: bool = False) -> IncomingEvent:
    """Return the event of a command in Slack, from the form that Slack sends."""
    payload: dict[str, Any] = {name: form.get(name, "") for name in _COMMAND_FIELDS}
    payload["words"] = words_of(payload["text"])
    return IncomingEvent(
        "slack", form["command"], payload, id=form.get("trigger_id"), on_event_loop=on_event_loop
    )  # fmt: skip


def trial_event(
    trigger: TriggerDefinition,
    payload: Any,
    headers: Mapping[str, str],
    named: str | None,
    *,
    on_event_loop: bool = False,
) -> IncomingEvent:
    """Return the event that a sender's delivery of this payload would be.

    `named` is the event type that the caller expects, such as `push` or `pull_request.opened`. If the payload already
    contains the type, another name is an error and does not change it.
    """
    given = {name.lower(): value for name, value in headers.items()}
    match trigger.kind:
        case TriggerKind.GITHUB:
            kind = named.partition(".")[0] if named else given.get("x-github-event")
            if not kind:
                raise Invalid("GitHub names the event in the header X-GitHub-Event; give `event`, for example push.")
            own = {"x-github-event": kind, "x-github-delivery": given.get("x-github-delivery", _TRIAL_ID)}
            event = github_event(trigger, given | own, payload, on_event_loop=on_event_loop)
            where = "the event in the header X-GitHub-Event and the action in the payload's `action`"
        case TriggerKind.WEBHOOK:
            own = {} if trigger.header is not None else {"webhook-id": given.get("webhook-id", _TRIAL_ID)}
            seen = webhook_event(trigger, given | own, payload, on_event_loop=on_event_loop)
            # The id belongs to the trial. An expression that shows all headers shows those that were given.
            event = replace(seen, headers=visible_headers(trigger, given))
            where = "the type in the payload's `type`"
        case TriggerKind.SLACK:
            form = _trial_form(trigger, payload)
            event = replace(command_event(form, on_event_loop=on_event_loop), id=_TRIAL_ID)
            where = "the command as the event"
    if named not in (None, event.type, event.name):
        raise Invalid(f"A delivery has {where}: this one is {event.name}, not {named}. Change it there.")
    return event


def _trial_form(trigger: TriggerDefinition, payload: Any) -> dict[str, str]:
    assert trigger.command is not None
    if not isinstance(payload, dict) or not all(isinstance(value, str) for value in payload.values()):
        example = '{"text": "v1.3 now", "user_name": "ada"}'
        only_text = " Interlock makes `words` of `text`." if isinstance(payload, dict) and "words" in payload else ""
        raise Invalid(f"Slack sends a command as form fields, which are texts, such as {example}.{only_text}")
    if (command := payload.get("command", trigger.command)) != trigger.command:
        raise Invalid(f"`command` is {command}, but this trigger is about {trigger.command}. Change it there.")
    return {**payload, "command": command}


def ignored(trigger: TriggerDefinition, event: IncomingEvent, *, on_event_loop: bool = False) -> str | None:
    """Return why this event starts nothing, or None. Raises Unfit for a condition without an answer."""
    return trigger.ignores(replace(event, on_event_loop=on_event_loop))


def input_of(trigger: TriggerDefinition, event: IncomingEvent, *, on_event_loop: bool = False) -> dict[str, Any]:
    """Return the input of the run that the event starts. Raises Unfit."""
    return trigger.input_for(replace(event, on_event_loop=on_event_loop))
