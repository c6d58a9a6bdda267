# ruff: noqa: E501  (tables: each definition beside its error)
import json
import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.definition import OnReject, StepKind, load, parse
from interlock.definition.diagnostics import Faults
from interlock.errors import DefinitionInvalid
from interlock.lifecycle import Tier
from interlock.wire import validation_errors
from interlock.wire.validation_errors import suggestion

REFUND = """
name: refund
on_reject: fail
steps:
  - id: lookup
    tool: shop.lookup_charge
    input: {charge: "${input.charge}"}
  - id: review
    approval: {tier: high, two_person: true, expires_in: 4h, summary: "Refund ${input.amount} to ${steps.lookup.output.name}"}
  - id: refund
    tool: shop.refund
    input: {charge: "${input.charge}", amount: "${input.amount}"}
    retry: {max_attempts: 4, base_delay: 5s}      # or backoff: [5s, 30s, 2m, 10m]
    timeout: 30s
  - id: settled
    wait: {duration: 1h}
  - id: tell
    tool: slack.post
    needs: [refund]
    when: "steps.refund.output.amount > 100"
    input: {text: "done"}
"""


def faults_of(text) -> list[str]:
    with pytest.raises(DefinitionInvalid) as refused:
        parse(text, "w.yaml")
    return [str(fault) for fault in refused.value.faults]


def one_step(step: str, before: str = "") -> str:
    return f"name: x\nsteps:\n  - {{id: first, tool: t.one}}\n{before}  - {{id: it, {step}}}\n"


def test_the_refund_workflow_parses():
    plan = parse(REFUND, "refund.yaml")
    lookup, review, refund, settled, tell = plan.steps
    assert (plan.name, plan.description, plan.on_reject, plan.timeout) == ("refund", "", OnReject.FAIL, None)
    assert [step.kind for step in plan.steps] == [
        StepKind.TOOL, StepKind.APPROVAL, StepKind.TOOL, StepKind.WAIT, StepKind.TOOL,
    ]  # fmt: skip
    assert lookup.tool == "shop.lookup_charge" and not lookup.input.is_constant
    assert review.gate and (review.gate.tier, review.gate.two_person, review.gate.expires_in) == (
        Tier.HIGH,
        True,
        14400,
    )
    assert (refund.retry.max_attempts, refund.retry.base_delay, refund.timeout) == (4, 5, 30)
    assert settled.duration and settled.duration.render(None) == "1h"  # type: ignore[arg-type]
    assert tell.when and tell.when.source == "steps.refund.output.amount > 100"
    assert tell.after == ("refund",)


def test_defaults_are_what_the_page_says():
    plan = parse("name: x\nsteps:\n  - {id: a, tool: t}\n  - id: b\n    approval:\n  - {id: c, approval: {tier: low}}")
    a, b, c = plan.steps
    assert (a.retry.max_attempts, a.retry.base_delay, a.retry.max_delay, a.timeout) == (4, 5, 600, None)
    assert a.input.render(None) == {}  # type: ignore[arg-type]
    assert b.gate and (b.gate.tier, b.gate.two_person, b.gate.expires_in) == (Tier.MED, False, 8 * 3600)
    assert c.gate and c.gate.expires_in == 24 * 3600


def test_a_backoff_list_is_not_cut_by_the_default_cap():
    plan = parse(one_step("tool: t, retry: {backoff: [5s, 30s, 20m]}"))
    assert plan.by_key["it"].retry.delay(3, 0.5) == 1200


# -- sameness ----------------------------------------------------------------------------------------------------------


def test_the_stored_source_gives_the_same_plan():
    plan = parse(REFUND)
    again = load(json.loads(json.dumps(plan.source)))
    assert again.digest == plan.digest
    assert again.steps == plan.steps


def test_json_and_yaml_of_the_same_content_are_the_same_version():
    plan = parse(REFUND)
    for indent in (None, 2, "\t"):
        assert parse(json.dumps(plan.source, indent=indent)).digest == plan.digest
    assert parse(yaml.safe_dump(plan.source, sort_keys=True).encode()).digest == plan.digest


def test_what_is_said_makes_another_version_and_what_is_left_empty_does_not():
    plan = parse("name: x\nsteps: [{id: a, approval: {}}]")
    assert parse("name: x\ndescription:\nsteps: [{id: a, approval: , when: }]").digest == plan.digest
    assert parse("name: x\ndescription: y\nsteps: [{id: a, approval: {}}]").digest != plan.digest


def test_a_plan_does_not_share_what_it_was_loaded_from():
    source = {"name": "x", "steps": [{"id": "a", "tool": "t", "input": {"k": [1]}}]}
    plan = load(source)
    source["steps"][0]["input"]["k"].append(2)  # type: ignore[index]
    assert plan.steps[0].input.render(None) == {"k": [1]}  # type: ignore[arg-type]


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("on", "on"),
        ("yes", "yes"),
        ("no", "no"),
        ("off", "off"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("'true'", "true"),
        ("2024-01-01", "2024-01-01"),
        ("2024-01-01T00:00:00Z", "2024-01-01T00:00:00Z"),
        ("1:30", "1:30"),
        ("010", "010"),
        ("0x1F", "0x1F"),
        ("1_000", "1_000"),
        ("12", 12),
        ("-1.5", -1.5),
        ("1e3", 1000.0),
        ("'12'", "12"),
        (".nan", ".nan"),
        ("=", "="),
        ("<<", "<<"),
        ('"\\u00e9\\n"', "é\n"),
    ],
)
def test_plain_words_mean_what_they_mean_in_json(written, value):
    found = parse(f"name: x\nsteps:\n  - id: a\n    tool: t\n    input: {{v: {written}}}").source["steps"][0]["input"][
        "v"
    ]
    assert found == value
    assert type(found) is type(value)


def test_json_escapes_survive():
    value = {"emoji": "😀", "slash": "a/b", "quoted": '\\ud83d\\ude00 "x"\n', "é": "\u2028"}
    source = {"name": "x", "steps": [{"id": "a", "tool": "t", "input": value}]}
    assert parse(json.dumps(source)).source == source
    assert parse(json.dumps(source, ensure_ascii=False).replace("a/b", "a\\/b")).source == source
    assert parse("\ufeff" + json.dumps(source)).source == source


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "w.yaml: expected a workflow with a name and steps, found nothing"),
        ("# nothing", "found nothing"),
        ("just words", "w.yaml:1: expected a workflow with a name and steps, found a string"),
        ("- a", "found a list"),
        ("name: x\n\tsteps: 1", "w.yaml:2: not valid YAML"),
        ("name:\n\tx", "w.yaml:2: not valid YAML: it is indented with a tab; YAML wants spaces (column 1)"),
        ("name: x: y", "w.yaml:1: not valid YAML: mapping values are not allowed"),
        ("name: 'x", "w.yaml:1: not valid YAML: found unexpected end of stream"),
        ('{"name": "x",\n "steps": [}', "w.yaml:2: not valid JSON: Expecting value (column 12)"),
        ("name: x\n---\nname: y", "w.yaml:2: expected one document, found a second"),
        ("name: x\nname: y", "w.yaml:2: name: this key is written twice"),
        ('{"name": "x", "name": "y"}', "w.yaml:1: name: this key is written twice"),
        ("a: &a [1]\nb: *a", "w.yaml:2: b: `*a` is an alias; write the value out"),
        ("name: !!python/object:os.system x", "w.yaml:1: name: `tag:yaml.org,2002:python/object:os.system` is a tag"),
        ("? [a]\n: b", "w.yaml:1: a key must be a plain word"),
        ('name: "a\\0"', "w.yaml:1: name: it contains a NUL character"),
        ("timeout: 99999999999999999999", "w.yaml:1: timeout: 99999999999999999999 is too large for a number"),
        ("timeout: 1e999", "too large for a number"),
        ("a: \x01", "w.yaml:1: not valid YAML: it contains a control character"),
        (b"name: \xff", "w.yaml: not valid UTF-8"),
        ("name: \ud800", "w.yaml: not valid UTF-8"),
        ("[" * 100_000, "nested deeper than 64 levels"),
        ('{"a":' * 100_000, "nested deeper than 64 levels"),
        ("- " * 100, "nested deeper than 64 levels"),
        (" " * (1 << 20) + "x", "larger than 1024 KiB"),
    ],
)
def test_what_cannot_be_read_says_where_and_why(text, fault):
    assert fault in "\n".join(faults_of(text))


# -- shape -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("steps: [{id: a, tool: t}]", "w.yaml:1: name: `name` is missing"),
        ("name: Refund\nsteps: [{id: a, tool: t}]", "w.yaml:1: name: expected at most 100 lower-case letters"),
        (f"name: {'x' * 101}\nsteps: [{{id: a, tool: t}}]", "name: expected at most 100"),
        ("name: 5\nsteps: [{id: a, tool: t}]", "name: expected a string, found a number"),
        ("name: x", "steps: `steps` is missing"),
        ("name: x\nsteps: []", "w.yaml:2: steps: expected 1 to 1000 steps, found 0"),
        ("name: x\nsteps: a", "w.yaml:2: steps: expected a list of steps, found a string"),
        ("name: x\nsteps: {a: b}", "steps: expected a list of steps, found a mapping"),
        ("name: x\nsteps:\n  - 5", "w.yaml:3: steps[0]: expected a step such as {id: lookup, tool: shop.lookup}, found a number"),
        ("name: x\ndescription: [a]\nsteps: [{id: a, tool: t}]", "description: expected a string, found a list"),
        ("name: x\non_reject: maybe\nsteps: [{id: a, tool: t}]", "w.yaml:2: on_reject: expected one of fail, complete, continue, found `maybe`"),
        ("name: x\non_reject: 5\nsteps: [{id: a, tool: t}]", "on_reject: expected one of fail, complete, continue, found a number"),
        ("name: x\ntimeout: 0\nsteps: [{id: a, tool: t}]", "timeout: expected a duration above zero"),
        ("name: x\nstep: 1\nsteps: [{id: a, tool: t}]", "w.yaml:2: step: unknown key; did you mean `steps`?"),
        ("name: x\nzzz: 1\nsteps: [{id: a, tool: t}]", "zzz: unknown key; known are name, description"),
        ("name: x\nruns_on: gpu\nsteps: [{id: a, tool: t}]", "runs_on: unknown key"),
        ("name: x\nsteps: [{tool: t}]", "steps[0].id: `id` is missing"),
        ("name: x\nsteps: [{id: 1a, tool: t}]", "steps[0].id: expected at most 100 letters"),
        ("name: x\nsteps: [{id: 1, tool: t}]", "steps[0].id: expected a string, found a number"),
        ("name: x\nsteps:\n  - {id: a, tool: t}\n  - {id: a, tool: t}", "w.yaml:4: steps[1].id: `a` is already the id of steps[0]"),
    ],
)  # fmt: skip
def test_a_wrong_shape_says_what_was_expected_and_found(text, fault):
    assert fault in "\n".join(faults_of(text))


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        ("", "w.yaml:4: steps[1]: it does nothing; give it one of tool, approval, wait or flow"),
        ("tool: t, approval: {}", "steps[1].approval: a step is one of tool, approval, wait or flow; this one is tool and approval"),
        ("tool: ", "steps[1].tool: expected the name of a tool, found nothing"),
        ("tool: 5", "steps[1].tool: expected a string, found a number"),
        ("tool: 'a b'", "steps[1].tool: expected the name of a tool such as shop.refund, found 'a b'"),
        ("flow: ", "steps[1].flow: expected the name of a workflow or a flow, found nothing"),
        ("flow: 'A b'", "steps[1].flow: expected the name of a workflow or a flow, found a string"),
        ("flow: 5", "steps[1].flow: expected a string, found a number"),
        ("flow: f, input: {a: '${secrets.s}'}", "steps[1].input.a: a secret can only go into the input of a tool"),
        ("flow: f, retry: {}", "steps[1].retry: only a tool step has `retry`"),
        ("tool: t, compensate: u", "steps[1].compensate: expected a mapping such as {tool: shop.undo_refund"),
        ("tool: t, compensate: {input: {a: 1}}", "steps[1].compensate.tool: `tool` is missing; name the one that undoes this step"),
        ("tool: t, compensate: {tool: u, when: x}", "steps[1].compensate.when: unknown key"),
        ("tool: t, compensate: {tool: u, input: {a: '${outptu.id}'}}", "steps[1].compensate.input.a: unknown name `outptu`; did you mean `output`?"),
        ("tool: t, compensate: {tool: u, input: {a: '${steps.zz.output}'}}", "steps[1].compensate.input.a: no step has the id `zz`"),
        ("tool: t, compensate: {tool: u, retry: {max_attempts: 0}}", "steps[1].compensate.retry.max_attempts: expected a whole number"),
        ("tool: t, input: {a: '${output.id}'}", "steps[1].input.a: unknown name `output`"),
        ("approval: {}, compensate: {tool: u}", "steps[1].compensate: only a tool step has `compensate`"),
        ("wait: {event: e, correlation: c, duration: 5m}", "steps[1].wait.duration: unknown key"),
        ("wait: {event: e}", "steps[1].wait.correlation: `correlation` is missing; say what the event is about"),
        ("wait: {event: 'a b', correlation: c}", "steps[1].wait.event: expected the type of an event such as bank.settled, found 'a b'"),
        ("wait: {event: , correlation: c}", "steps[1].wait.event: expected the type of an event such as bank.settled, found ''"),
        ("wait: {event: 5, correlation: c}", "steps[1].wait.event: expected a string, found a number"),
        ("wait: {event: e, correlation: c, timeout: 0s}", "steps[1].wait.timeout: expected a duration above zero"),
        ("wait: {event: e, correlation: c, timeout: x}", "steps[1].wait.timeout: 'x' is not a duration"),
        ("wait: {event: e, correlation: '${secrets.a}'}", "steps[1].wait.correlation: a secret can only go into the input of a tool"),
        ("wait: {event: e, correlation: c, timeout: 1h}, on_timeout: skip", "steps[1].on_timeout: expected one of fail, continue, found `skip`"),
        ("wait: {event: e, correlation: c}, on_timeout: continue", "steps[1].on_timeout: without `timeout` in `wait` there is none"),
        ("wait: {event: e, correlation: c, on_timeout: continue}", "steps[1].wait.on_timeout: it stands beside `wait`, not in it"),
        ("wait: {duration: 5m}, on_timeout: continue", "steps[1].on_timeout: a wait for a duration has no time-out"),
        ("tool: t, on_timeout: continue", "steps[1].on_timeout: only a wait step has `on_timeout`"),
        ("wait: ", "steps[1].wait.duration: `duration` is missing"),
        ("wait: 5m", "steps[1].wait: expected a mapping such as {duration: 5m} or {event: bank.settled, correlation: ch_1}, found a string"),
        ("wait: {duration: 5 parsecs}", "steps[1].wait.duration: '5 parsecs' is not a duration"),
        ("wait: {duration: [1]}", "steps[1].wait.duration: expected a duration such as 30s, 5m or 4h, found a list"),
        ("wait: {duration: '${1 +}'}", "steps[1].wait.duration: `1 +` is not valid CEL"),
        ("wait: {duration: 5m}, input: {a: 1}", "steps[1].input: only a tool or a flow takes `input`"),
        ("approval: yes please", "steps[1].approval: expected a mapping such as {tier: high, expires_in: 4h}, found a string"),
        ("approval: {teir: high}", "steps[1].approval.teir: unknown key; did you mean `tier`?"),
        ("approval: {tier: huge}", "steps[1].approval.tier: expected one of low, med, high, found `huge`"),
        ("approval: {two_person: yes}", "steps[1].approval.two_person: expected true or false, found a string"),
        ("approval: {expires_in: 0s}", "steps[1].approval.expires_in: expected a duration above zero"),
        ("approval: {summary: [a]}", "steps[1].approval.summary: expected a string, found a list"),
        ("approval: {}, timeout: 5s", "steps[1].timeout: only a tool step has `timeout`"),
        ("tool: t, inputs: {}", "steps[1].inputs: unknown key; did you mean `input`?"),
        ("tool: t, input: [1]", "steps[1].input: expected a mapping of the tool's parameters, found a list"),
        ("tool: t, timeout: true", "steps[1].timeout: expected a duration such as 30s, 5m or 4h, found true"),
        ("tool: t, retry: 5", "steps[1].retry: expected a mapping such as {max_attempts: 4, base_delay: 5s}, found a number"),
        ("tool: t, retry: {max_attempts: 0}", "steps[1].retry.max_attempts: expected a whole number from 1 to 100, found 0"),
        ("tool: t, retry: {max_attempts: 1.5}", "steps[1].retry.max_attempts: expected a whole number from 1 to 100"),
        ("tool: t, retry: {attempts: 5}", "steps[1].retry.attempts: unknown key; did you mean `max_attempts`?"),
        ("tool: t, retry: {base_delay: 5 parsecs}", "steps[1].retry.base_delay: '5 parsecs' is not a duration; write 30s, 5m"),
        ("tool: t, retry: {backoff: [5s, x]}", "steps[1].retry.backoff[1]: 'x' is not a duration"),
        ("tool: t, retry: {backoff: []}", "steps[1].retry.backoff: expected at least one duration"),
        ("tool: t, retry: {backoff: 5s}", "steps[1].retry.backoff: expected a list of durations, found a string"),
        ("tool: t, retry: {backoff: [5s], base_delay: 5s}", "steps[1].retry.base_delay: `backoff` already says"),
        ("tool: t, needs: first", "steps[1].needs: expected a list of step ids, [] to start at once, found a string"),
        ("tool: t, needs: ", "steps[1].needs: expected a list of step ids, [] to start at once, found nothing"),
        ("tool: t, needs: [5]", "steps[1].needs[0]: expected the id of a step, found a number"),
        ("tool: t, needs: [frist]", "steps[1].needs[0]: no step has the id `frist`; did you mean `first`?"),
        ("tool: t, needs: [it]", "steps[1].needs[0]: a step cannot need itself"),
        ("tool: t, needs: [first, first]", "steps[1].needs[1]: `first` is listed twice"),
        ("tool: t, when: [1]", "steps[1].when: expected an expression, found a list"),
        ("tool: t, when: 'a b'", "steps[1].when: `a b` is not valid CEL"),
    ],
)  # fmt: skip
def test_a_wrong_step_says_what_would_be_right(step, fault):
    found = faults_of(one_step(step))
    assert len(found) == 1, found
    assert f"w.yaml:4: {fault.removeprefix('w.yaml:4: ')}" in found[0]


# -- expressions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        ("tool: t, when: inptu.x > 1", "steps[1].when: unknown name `inptu`; did you mean `input`?"),
        ("tool: t, when: zzz", "steps[1].when: unknown name `zzz`; known are input, trigger, run, steps"),
        ("tool: t, when: sise(input.x) > 1", "steps[1].when: unknown function `sise`; did you mean `size`?"),
        ("tool: t, input: {a: ['${inptu.x}']}", "steps[1].input.a[0]: unknown name `inptu`"),
        ("approval: {summary: 'is ${inptu.x}'}", "steps[1].approval.summary: unknown name `inptu`"),
        ("wait: {duration: '${inptu.x}'}", "steps[1].wait.duration: unknown name `inptu`"),
        ("tool: t, input: {a: '${steps.frist.output}'}", "steps[1].input.a: no step has the id `frist`; did you mean `first`?"),
        ("tool: t, input: {a: '${steps.it.output}'}", "steps[1].input.a: `steps.it` is this step itself"),
        ("tool: t, needs: [], input: {a: '${steps.first.output}'}", "steps[1].input.a: `steps.first` may not be settled when `it` starts"),
        ("tool: t, input: {a: '${size(steps)}'}", "steps[1].input.a: `steps` alone says too little"),
    ],
)  # fmt: skip
def test_a_typo_in_an_expression_is_found_before_it_runs(step, fault):
    (found,) = faults_of(one_step(step))
    assert found.startswith(f"w.yaml:4: {fault}")


def test_a_dash_in_an_id_asks_for_brackets():
    before = "  - {id: look-up, tool: t}\n"
    (found,) = faults_of(one_step("tool: t, when: steps.look-up.output", before))
    assert found.endswith('write steps["look-up"]')
    parse(one_step("tool: t, when: 'steps[\"look-up\"].output'", before))


def test_steps_far_upstream_may_be_used():
    middle = "".join(f"  - {{id: s{n}, tool: t}}\n" for n in range(5))
    parse(one_step("tool: t, input: {a: '${steps.first.output}', b: '${steps.s2.status}'}", middle))


@pytest.mark.parametrize("when", ["input.x > 1", "${input.x > 1}", " ${ input.x > 1 } "])
def test_when_is_written_with_or_without_braces(when):
    step = parse(one_step(f'tool: t, when: "{when}"')).by_key["it"]
    assert step.when and step.when.source == "input.x > 1"


def test_when_may_be_a_boolean():
    step = parse(one_step("tool: t, when: false")).by_key["it"]
    assert step.when and step.when.source == "false"


def test_a_wait_for_an_event_says_what_it_is_about_and_how_long():
    step = parse(one_step('wait: {event: bank.settled, correlation: "${input.charge}", timeout: 1h}')).by_key["it"]
    assert step.event and (step.event.type, step.event.on_timeout, step.duration) == ("bank.settled", "fail", None)
    assert step.event.timeout and step.event.timeout.value == "1h"
    step = parse(one_step("wait: {event: e, correlation: c, timeout: '${input.t}'}, on_timeout: continue")).by_key["it"]
    assert step.event and step.event.on_timeout == "continue"
    assert parse(one_step("wait: {event: e, correlation: c}")).by_key["it"].event.timeout is None


def test_a_compensation_is_a_step_of_its_own_that_sees_the_output():
    text = 'tool: t, compensate: {tool: t.undo, input: {id: "${output.id}", of: "${steps.it.output}"}, timeout: 5s}'
    plan = parse(one_step(text))
    undo = plan.by_key["it"].undo
    assert undo and (undo.key, undo.tool, undo.undoes, undo.timeout) == ("it:undo", "t.undo", "it", 5.0)
    assert "t.undo" in plan.tools and undo.key not in plan.by_key


# -- the graph ---------------------------------------------------------------------------------------------------------


def graph(**needs: list[str] | None) -> str:
    steps = [{"id": key, "tool": "t", **({} if after is None else {"needs": after})} for key, after in needs.items()]
    return yaml.safe_dump({"name": "x", "steps": steps})


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (graph(a=["b"], b=["a"]), ["a cycle: a → b → a"]),
        (graph(a=["c"], b=["a"], c=["b"]), ["a cycle: a → c → b → a"]),
        (graph(a=["b"], b=None), ["a cycle: a → b → a"]),
        (graph(a=["b"], b=["a"], c=["d"], d=["c"]), ["a cycle: a → b → a", "a cycle: c → d → c"]),
        (graph(z=["a"], a=["b"], b=["a"]), ["`z` never runs: it waits for a cycle, by way of `a`", "a cycle: a → b → a"]),
        (graph(a=["b"], b=["a"], c=None, d=[]), ["a cycle: a → b → a", "`c` never runs: it waits for a cycle, by way of `b`"]),
    ],
)  # fmt: skip
def test_a_cycle_is_named(text, messages):
    found = faults_of(text)
    assert len(found) == len(messages), found
    for fault, message in zip(found, messages, strict=True):
        assert message in fault


def test_what_needs_a_step_that_is_always_skipped_never_runs():
    text = """
name: x
steps:
  - {id: a, tool: t, when: "false"}
  - {id: b, tool: t}
  - {id: c, tool: t, needs: [a]}
  - {id: d, tool: t, needs: [c]}
"""
    assert faults_of(text) == [
        "w.yaml:6: steps[2].needs: `c` never runs: it needs `a`, which is always skipped",
        "w.yaml:7: steps[3].needs: `d` never runs: it needs `c`, which is always skipped",
    ]


# -- faults ------------------------------------------------------------------------------------------------------------


def test_all_faults_are_reported_at_once_in_the_order_of_lines():
    text = """
name: Refund
steps:
  - id: a
    tool: x
    retry: {base_delay: 5 parsecs}
    input: {p: "${1 +}", q: "${inptu.x}"}
  - id: b
    wait: {event: paid}
    needs: [nobody]
"""
    with pytest.raises(DefinitionInvalid) as refused:
        parse(text, "refund.yaml")
    assert [(fault.line, fault.path) for fault in refused.value.faults] == [
        (2, "name"),
        (6, "steps[0].retry.base_delay"),
        (7, "steps[0].input.p"),
        (7, "steps[0].input.q"),
        (9, "steps[1].wait.correlation"),
        (10, "steps[1].needs[0]"),
    ]
    assert refused.value.fields["errors"][1] == {
        "file": "refund.yaml",
        "line": 6,
        "path": "steps[0].retry.base_delay",
        "message": "'5 parsecs' is not a duration; write 30s, 5m, 4h, 7d or 1h30m",
    }
    assert str(refused.value).splitlines()[1].startswith("refund.yaml:6: steps[0].retry.base_delay: '5 parsecs' is not")


def test_a_stored_source_has_no_lines():
    with pytest.raises(DefinitionInvalid, match=r"^workflow: steps\[0\].id: `id` is missing$"):
        load({"name": "x", "steps": [{"tool": "t"}]})


@pytest.mark.parametrize("odd", [object(), {1: 2}, 2**70, "\ud800"])
def test_a_source_that_is_not_json_is_refused(odd):
    with pytest.raises(DefinitionInvalid, match="not a JSON value"):
        load({"name": "x", "steps": [{"id": "a", "tool": "t", "input": {"x": odd}}]})


def test_a_document_full_of_mistakes_costs_no_more_than_an_honest_one():
    found = faults_of("name: x\nsteps: [{id: a, tool: t}]\n" + "".join(f"k{n}: 1\n" for n in range(50_000)))
    assert len(found) == Faults.MOST


def test_many_misspelt_names_among_many_similar_ones_are_compared_with_few_of_them(monkeypatch):
    compared = []
    real = validation_errors.get_close_matches
    monkeypatch.setattr(
        validation_errors,
        "get_close_matches",
        lambda word, known, n: compared.append(len(known)) or real(word, known, n=n),
    )
    steps = [{"id": f"{'ab' * 18}{number:04}", "tool": "t"} for number in range(1000)]
    steps[0]["needs"] = [f"{'ba' * 18}{number:04}" for number in range(300)]
    with pytest.raises(DefinitionInvalid):
        load({"name": "w", "steps": steps})
    assert 0 < sum(compared) <= 200 * 20


def test_a_misspelt_name_among_many_is_still_guessed():
    assert suggestion("lookpu", [*(f"step-number-{n}" for n in range(500)), "lookup"]) == "; did you mean `lookup`?"


def test_a_thousand_steps_are_allowed_and_not_one_more():
    steps = [{"id": f"s{n}", "tool": "t", "input": {"a": "${steps.s0.output}"} if n else {}} for n in range(1000)]
    assert len(parse(json.dumps({"name": "x", "steps": steps})).steps) == 1000
    (found,) = faults_of(json.dumps({"name": "x", "steps": [*steps, {"id": "more", "tool": "t"}]}))
    assert "expected 1 to 1000 steps, found 1001" in found


@settings(max_examples=200)
@given(st.binary() | st.text() | st.text(alphabet=st.sampled_from("name: steps-{}[]\"'&*!|>\n\t #,?%@`x1$")))
def test_any_bytes_are_a_plan_or_a_refusal(text):
    with pytest.raises(DefinitionInvalid):
        parse(text)


KEYS = st.sampled_from(
    ["name", "description", "on_reject", "timeout", "steps", "id", "tool", "approval", "wait", "needs", "when", "input", "retry", "max_attempts", "base_delay", "max_delay", "backoff", "tier", "two_person", "expires_in", "summary", "duration", "event", "correlation", "on_timeout", "compensate"]
)  # fmt: skip
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
    | st.sampled_from(["a", "b", "5s", "${input.x}", "${steps.a.output}", "steps.b.output > 1", "${", "high", "false"])
)  # fmt: skip
VALUES = st.recursive(LEAVES, lambda v: st.lists(v, max_size=4) | st.dictionaries(KEYS, v, max_size=5), max_leaves=25)
STEPS = st.lists(
    st.fixed_dictionaries(
        {"id": st.sampled_from(["a", "b", "c"])},
        optional={
            "tool": LEAVES, "approval": VALUES, "wait": VALUES, "needs": st.lists(st.sampled_from("abcd")) | LEAVES,
            "when": LEAVES, "input": VALUES, "retry": VALUES, "timeout": LEAVES, "compensate": VALUES, "on_timeout": LEAVES,
        },
    ),
    max_size=4,
)  # fmt: skip


@settings(max_examples=300)
@given(st.fixed_dictionaries({"name": st.just("x"), "steps": STEPS | VALUES}, optional={"timeout": LEAVES}))
def test_any_shape_is_a_plan_that_round_trips_or_a_refusal(source):
    try:
        plan = load(source)
    except DefinitionInvalid:
        return
    assert load(plan.source).digest == plan.digest
    assert parse(json.dumps(plan.source)).digest == plan.digest


GOOD_STEPS = st.lists(
    st.fixed_dictionaries(
        {"tool": st.sampled_from(["t.one", "t.two"])},
        optional={
            "input": st.dictionaries(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=5), st.integers(-99, 99)),
            "timeout": st.sampled_from(["5s", 5, "1h30m"]),
            "retry": st.fixed_dictionaries({}, optional={"max_attempts": st.integers(1, 100)}),
            "when": st.sampled_from(["true", "input.x > 1", "${input.x == 'a'}"]),
        },
    ),
    min_size=1,
    max_size=5,
)  # fmt: skip


@given(GOOD_STEPS, st.randoms())
def test_the_order_of_keys_makes_no_difference(steps, random):
    source = {"name": "x", "steps": [{"id": f"s{n}", **step} for n, step in enumerate(steps)]}

    def shuffled(value):
        if isinstance(value, dict):
            keys = random.sample(list(value), len(value))
            return {key: shuffled(value[key]) for key in keys}
        return [shuffled(item) for item in value] if isinstance(value, list) else value

    plan = load(source)
    assert parse(yaml.safe_dump(shuffled(source), sort_keys=False)).digest == plan.digest
    assert math.isclose(plan.steps[0].retry.base_delay, 5.0)
