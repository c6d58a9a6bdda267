"""The fields of a trigger, and the error for each mistake."""

from typing import Any

import orjson
import pytest

from interlock.definition.trigger import IncomingEvent, UnusableEvent, load, parse
from interlock.errors import DefinitionInvalid

GITHUB = """
name: deploys
github: {secret: gh, events: [push, pull_request.opened]}
workflow: deploy
when: payload.ref == "refs/heads/main"
input: {sha: "${payload.after}", note: "by ${event.type}"}
"""


def test_a_trigger_is_read() -> None:
    trigger = parse(GITHUB)
    assert (trigger.name, trigger.kind, trigger.secret, trigger.workflow) == ("deploys", "github", "gh", "deploy")
    push = IncomingEvent("github", "push", {"ref": "refs/heads/main", "after": "abc"})
    assert (trigger.ignores(push), trigger.input_for(push)) == (None, {"sha": "abc", "note": "by push"})
    assert load(orjson.dumps(trigger.source).decode()) == trigger


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("github: {secret: gh}|", "nothing starts it; give it one of github, webhook or slack"),
        ("github:|slack: {command: /x}\ngithub:", "a trigger is one of github, webhook or slack"),
        ("secret: gh|secret: Gh-1", "secret: expected a name of at most 100 of a-z"),
        ("secret: gh|events: [push]", "secret: `secret` is missing"),
        ("github: {secret: gh}|github: {secret: gh, event: [push]}", "event: unknown key; did you mean `events`?"),
        ("github: {secret: gh}|github: {secret: gh, events: [Push!]}", "events[0]: expected push or"),
        ("github: {secret: gh}|webhook: {secret: gh, header: x-sig}", "id: `id` is missing"),
        ("github: {secret: gh}|webhook: {secret: gh, id: payload.id}", "`id` goes with `header`"),
        ("github: {secret: gh}|slack: {command: deploy}", "expected a command such as /deploy"),
        ("github: {secret: gh}|github: gh", "expected a mapping such as {secret:"),
        ("name: t|name: T!", "name: expected a name"),
        ("workflow: w|", "`workflow` is missing"),
        ("workflow: w|workflow: w\nwhen: input.x", "unknown name `input`; known are payload, event, headers"),
        ("workflow: w|workflow: w\nwhen: 'payload.x ='", "is not valid CEL"),
        ('workflow: w|workflow: w\ninput: {k: "${secrets.gh}"}', "use the secret in a step of the workflow"),
        ("workflow: w|workflow: w\ninput: [1]", "expected a mapping"),
        ("workflow: w|workflow: w\nwhat: 1", "what: unknown key"),
    ],
)
def test_a_mistake_is_named_with_its_line(change: str, says: str) -> None:
    text = "name: t\ngithub: {secret: gh}\nworkflow: w\n"
    before, _, after = change.partition("|")
    with pytest.raises(DefinitionInvalid) as caught:
        parse(text.replace(before, after), "t.yaml")
    assert says in caught.value.detail
    assert caught.value.detail.startswith("t.yaml")


def test_of_what_is_not_there_nothing_more_is_missing() -> None:
    with pytest.raises(DefinitionInvalid) as caught:
        parse("name: t\ngithb: {secret: gh}\nworkflow: w\n")
    assert [fault.message.partition(";")[0] for fault in caught.value.faults] == ["nothing starts it", "unknown key"]


@pytest.mark.parametrize("value", [[], "text", None, 3])
def test_a_payload_that_is_no_mapping_needs_an_input(value: Any) -> None:
    trigger = parse("{name: t, webhook: {secret: s}, workflow: w}")
    with pytest.raises(UnusableEvent, match="its payload is"):
        trigger.input_for(IncomingEvent("webhook", "x", value))
    with_input = parse('{name: t, webhook: {secret: s}, workflow: w, input: {x: "${payload}"}}')
    assert with_input.input_for(IncomingEvent("webhook", "x", value)) == {"x": value}
