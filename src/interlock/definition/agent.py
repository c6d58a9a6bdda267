"""An agent: the YAML or JSON with a model's instructions, tools and limits, turned into a checked plan."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import orjson

from interlock.definition import document
from interlock.definition.diagnostics import Faults
from interlock.definition.mapping_reader import MappingReader
from interlock.definition.patterns import PatternInvalid, pattern
from interlock.definition.plan import AgentLimits, AgentPlan, OnReject, Plan, Price, digest_of
from interlock.definition.workflow import NAME_FORM, caps, identifier
from interlock.errors import DefinitionInvalid
from interlock.wire.validation_errors import described

SCRIPTED = "scripted"

_TOP = (
    "name", "description", "model", "base_url", "api_key_env", "instructions", "tools", "limits", "settings",
    "price", "on_reject", "timeout", "caps", "script",
)  # fmt: skip
_MODEL = re.compile(r"[a-z0-9][a-z0-9/_-]*:\S+")
_PATTERN = re.compile(r"\*|[A-Za-z_][A-Za-z0-9_.*-]{0,199}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A definition can name only these variables, so that its author cannot read the rest of the workers' environment.
KEY_VARIABLE = re.compile(r"INTERLOCK_MODEL_KEY_[A-Za-z0-9_]+")
KEY_FORM = "the name of an environment variable that begins with INTERLOCK_MODEL_KEY_"
_ADDRESS = re.compile(r"https?://\S+")


def parse_agent(text: str | bytes, file: str = "agent", *, also: Callable[[Plan, Faults], None] | None = None) -> Plan:
    """Return the plan of a definition.

    Raise `DefinitionInvalid` with every fault and its line. `also` may add faults (see `tools.fit`).
    """
    return document.made_from(text, file, partial(_plan, variable=KEY_VARIABLE), also)


def load_agent(source: Mapping[str, Any]) -> Plan:
    """Return the plan of a stored source, which has no lines.

    The source may be older than the naming rule for its key variable. It is still a valid plan, and fails when it runs.
    """
    return _plan(orjson.loads(orjson.dumps(source)), Faults("agent"), _VARIABLE)


def is_agent(source: Mapping[str, Any]) -> bool:
    """Return True for an agent: workflows and flows have no model."""
    return "model" in source


def _plan(value: Any, faults: Faults, variable: re.Pattern[str]) -> Plan:
    if not isinstance(value, dict):
        faults.add((), f"expected an agent with a name and a model, found {described(value)}")
        raise DefinitionInvalid(faults.sorted())
    source = {key: member for key, member in value.items() if member is not None}
    top = MappingReader(source, (), faults)
    top.only(_TOP)
    name = identifier(top, "name", *NAME_FORM)
    agent = AgentPlan(
        model=_model(top),
        instructions=top.text("instructions"),
        tools=_tools(top),
        limits=_limits(top),
        settings=dict(top.section("settings", "{temperature: 0, max_tokens: 4000}").value),
        base_url=_matching(top, "base_url", _ADDRESS, "an address such as http://127.0.0.1:11434/v1"),
        api_key_env=_matching(top, "api_key_env", variable, KEY_FORM),
        script=_script(top),
        price=_price(top),
    )
    description = top.text("description")
    on_reject = top.choice("on_reject", OnReject, OnReject.COMPLETE)
    timeout = top.duration("timeout", 0.0, above_zero=True) or None
    limits = caps(top)
    if faults:
        raise DefinitionInvalid(faults.sorted())
    return Plan(name, description, on_reject, timeout, (), source, digest_of(source), *limits, agent=agent)


def _model(top: MappingReader) -> str:
    if not top.has("model"):
        top.fault("model", "`model` is missing; write provider:name, or `scripted` to try it without a provider")
        return SCRIPTED
    model = top.text("model")
    if isinstance(top.value["model"], str) and model != SCRIPTED and not _MODEL.fullmatch(model):
        top.fault("model", f"expected provider:name such as openai:gpt-5, or scripted, found {model[:120]!r}")
    return model


def _matching(top: MappingReader, key: str, pattern: re.Pattern[str], what: str) -> str | None:
    if not top.has(key):
        return None
    text = top.text(key)
    if isinstance(top.value[key], str) and not pattern.fullmatch(text):
        top.fault(key, f"expected {what}, found {text[:120]!r}")
    return text


def _tools(top: MappingReader) -> tuple[str, ...]:
    if not top.has("tools"):
        return ()
    tools = top.items("tools", "tools")
    for at, tool in enumerate(tools):
        if not isinstance(tool, str) or not _PATTERN.fullmatch(tool):
            top.faults.add(("tools", at), f"expected a tool such as shop.refund, or shop.*, found {described(tool)}")
    return tuple(tool for tool in tools if isinstance(tool, str))


def _limits(top: MappingReader) -> AgentLimits:
    limits = top.section("limits", "{turns: 10, tokens: 100000, cost_usd: 1.5}")
    limits.only(("turns", "tokens", "cost_usd"))
    return AgentLimits(
        turns=limits.integer("turns", AgentLimits().turns, 1, 1000),
        tokens=limits.integer("tokens", 0, 1, 1_000_000_000) or None,
        cost_usd=_amount(limits, "cost_usd"),
    )


def _price(top: MappingReader) -> Price | None:
    if not top.has("price"):
        return None
    price = top.section("price", "{input: 3.00, output: 15.00}, in USD for a million tokens")
    price.only(("input", "output"))
    for key in ("input", "output"):
        if not price.has(key):
            price.faults.add(price.path, f"`{key}` is missing; write {{input: 3.00, output: 15.00}}")
    amounts = {key: _amount(price, key) for key in ("input", "output")}
    return Price(amounts["input"] or 0.0, amounts["output"] or 0.0)


def _amount(section: MappingReader, key: str) -> float | None:
    if not section.has(key):
        return None
    value = section.value[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        section.expected(key, "an amount above zero")
        return None
    return float(value)


def _script(top: MappingReader) -> tuple[Mapping[str, Any], ...]:
    if not top.has("script"):
        if top.value.get("model") == SCRIPTED:
            top.fault("script", "`script` is missing; a scripted model says what stands there")
        return ()
    if top.value.get("model") != SCRIPTED:
        top.fault("script", "only `model: scripted` has a script")
    rules = top.items("script", "rules such as {match: refund, turns: [{say: Done.}]}")
    for at, rule in enumerate(rules):
        if isinstance(rule, Mapping):
            _rule(MappingReader(rule, ("script", at), top.faults))
        else:
            top.faults.add(("script", at), f"expected a rule {{match: …, turns: […]}}, found {described(rule)}")
    return tuple(rule for rule in rules if isinstance(rule, Mapping))


def _rule(rule: MappingReader) -> None:
    rule.only(("match", "turns"))
    try:
        pattern(rule.text("match"), dot_matches_newline=True)
    except PatternInvalid as error:
        rule.fault("match", f"not a regular expression: {error}")
    for at, turn in enumerate(rule.items("turns", "turns")):
        if not isinstance(turn, Mapping):
            rule.faults.add((*rule.path, "turns", at), f"expected {{say: …}} or {{calls: …}}, found {described(turn)}")
            continue
        _turn(MappingReader(turn, (*rule.path, "turns", at), rule.faults))


def _turn(turn: MappingReader) -> None:
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
        made = MappingReader(call, (*turn.path, "calls", at), turn.faults)
        made.only(("tool", "args"))
        if made.has("args") and not isinstance(call["args"], Mapping | str):
            made.expected("args", "a mapping of the tool's parameters")
