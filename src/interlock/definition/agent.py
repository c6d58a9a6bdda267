"""An agent: the YAML or JSON in which a user gives a model its instructions, tools and limits, as a checked plan."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import orjson

from interlock.definition import document
from interlock.definition.fault import Faults, described
from interlock.definition.plan import Agent, Limits, OnReject, Plan, digest_of
from interlock.definition.section import Section
from interlock.definition.workflow import NAME_FORM, caps, identifier
from interlock.errors import DefinitionInvalid

SCRIPTED = "scripted"

_TOP = (
    "name", "description", "model", "base_url", "api_key_env", "instructions", "tools", "limits", "settings",
    "on_reject", "timeout", "caps", "script",
)  # fmt: skip
_MODEL = re.compile(r"[a-z0-9][a-z0-9/_-]*:\S+")
_PATTERN = re.compile(r"\*|[A-Za-z_][A-Za-z0-9_.*-]{0,199}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# All that a definition can name: what else is in the environment of the workers is not for whoever applies an agent.
KEY_VARIABLE = re.compile(r"INTERLOCK_MODEL_KEY_[A-Za-z0-9_]+")
KEY_FORM = "the name of an environment variable that begins with INTERLOCK_MODEL_KEY_"
_ADDRESS = re.compile(r"https?://\S+")


def parse_agent(text: str | bytes, file: str = "agent") -> Plan:
    """Raises `DefinitionInvalid` with every fault and its line."""
    return document.made_from(text, file, partial(_plan, variable=KEY_VARIABLE))


def load_agent(source: Mapping[str, Any]) -> Plan:
    """The plan of a source that was stored; it has no lines.

    It can be from before its key had to have a certain name: then it is a plan all the same, and fails when it runs.
    """
    return _plan(orjson.loads(orjson.dumps(source)), Faults("agent"), _VARIABLE)


def is_agent(source: Mapping[str, Any]) -> bool:
    """No workflow and no flow has a model."""
    return "model" in source


def _plan(value: Any, faults: Faults, variable: re.Pattern[str]) -> Plan:
    if not isinstance(value, dict):
        faults.add((), f"expected an agent with a name and a model, found {described(value)}")
        raise DefinitionInvalid(faults.sorted())
    source = {key: member for key, member in value.items() if member is not None}
    top = Section(source, (), faults)
    top.only(_TOP)
    name = identifier(top, "name", *NAME_FORM)
    agent = Agent(
        model=_model(top),
        instructions=top.text("instructions"),
        tools=_tools(top),
        limits=_limits(top),
        settings=dict(top.section("settings", "{temperature: 0, max_tokens: 4000}").value),
        base_url=_matching(top, "base_url", _ADDRESS, "an address such as http://127.0.0.1:11434/v1"),
        api_key_env=_matching(top, "api_key_env", variable, KEY_FORM),
        script=_script(top),
    )
    description = top.text("description")
    on_reject = top.choice("on_reject", OnReject, OnReject.COMPLETE)
    timeout = top.duration("timeout", 0.0, above_zero=True) or None
    limits = caps(top)
    if faults:
        raise DefinitionInvalid(faults.sorted())
    return Plan(name, description, on_reject, timeout, (), source, digest_of(source), *limits, agent=agent)


def _model(top: Section) -> str:
    if not top.has("model"):
        top.fault("model", "`model` is missing; write provider:name, or `scripted` to try it without a provider")
        return SCRIPTED
    model = top.text("model")
    if isinstance(top.value["model"], str) and model != SCRIPTED and not _MODEL.fullmatch(model):
        top.fault("model", f"expected provider:name such as openai:gpt-5, or scripted, found {model[:120]!r}")
    return model


def _matching(top: Section, key: str, pattern: re.Pattern[str], what: str) -> str | None:
    if not top.has(key):
        return None
    text = top.text(key)
    if isinstance(top.value[key], str) and not pattern.fullmatch(text):
        top.fault(key, f"expected {what}, found {text[:120]!r}")
    return text


def _tools(top: Section) -> tuple[str, ...]:
    if not top.has("tools"):
        return ()
    tools = top.items("tools", "tools")
    for at, tool in enumerate(tools):
        if not isinstance(tool, str) or not _PATTERN.fullmatch(tool):
            top.faults.add(("tools", at), f"expected a tool such as shop.refund, or shop.*, found {described(tool)}")
    return tuple(tool for tool in tools if isinstance(tool, str))


def _limits(top: Section) -> Limits:
    limits = top.section("limits", "{turns: 10, tokens: 100000, cost_usd: 1.5}")
    limits.only(("turns", "tokens", "cost_usd"))
    return Limits(
        turns=limits.integer("turns", Limits().turns, 1, 1000),
        tokens=limits.integer("tokens", 0, 1, 1_000_000_000) or None,
        cost_usd=_amount(limits, "cost_usd"),
    )


def _amount(section: Section, key: str) -> float | None:
    if not section.has(key):
        return None
    value = section.value[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        section.expected(key, "an amount above zero")
        return None
    return float(value)


def _script(top: Section) -> tuple[Mapping[str, Any], ...]:
    if not top.has("script"):
        if top.value.get("model") == SCRIPTED:
            top.fault("script", "`script` is missing; a scripted model says what stands there")
        return ()
    if top.value.get("model") != SCRIPTED:
        top.fault("script", "only `model: scripted` has a script")
    rules = top.items("script", "rules such as {match: refund, turns: [{say: Done.}]}")
    for at, rule in enumerate(rules):
        if isinstance(rule, Mapping):
            _rule(Section(rule, ("script", at), top.faults))
        else:
            top.faults.add(("script", at), f"expected a rule {{match: …, turns: […]}}, found {described(rule)}")
    return tuple(rule for rule in rules if isinstance(rule, Mapping))


def _rule(rule: Section) -> None:
    rule.only(("match", "turns"))
    try:
        re.compile(rule.text("match"))
    except re.error as error:
        rule.fault("match", f"not a regular expression: {error}")
    for at, turn in enumerate(rule.items("turns", "turns")):
        if not isinstance(turn, Mapping):
            rule.faults.add((*rule.path, "turns", at), f"expected {{say: …}} or {{calls: …}}, found {described(turn)}")
            continue
        _turn(Section(turn, (*rule.path, "turns", at), rule.faults))


def _turn(turn: Section) -> None:
    turn.only(("say", "calls", "pause", "fail"))
    turn.text("say")
    turn.text("fail")
    turn.duration("pause", 0.0)
    if not any(turn.has(key) for key in ("say", "calls", "fail")):
        turn.faults.add(turn.path, "it does nothing; give it `say`, `calls` or `fail`")
    for at, call in enumerate(turn.items("calls", "calls") if turn.has("calls") else ()):
        if not isinstance(call, Mapping) or not isinstance(call.get("tool"), str):
            turn.faults.add((*turn.path, "calls", at), "expected a call such as {tool: shop.refund, args: {amount: 5}}")
            continue
        made = Section(call, (*turn.path, "calls", at), turn.faults)
        made.only(("tool", "args"))
        if made.has("args") and not isinstance(call["args"], Mapping | str):
            made.expected("args", "a mapping of the tool's parameters")
