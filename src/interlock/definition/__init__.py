"""What a user writes: workflows and agents in YAML or JSON, expressions and durations, turned into a checked plan."""

from interlock.definition.agent import parse_agent
from interlock.definition.duration import format_duration, parse_duration
from interlock.definition.expression import Expression, ExpressionFailed, Scope, Template, TemplateInvalid
from interlock.definition.fault import Fault
from interlock.definition.plan import Gate, OnReject, Plan, Retry, Step, StepKind
from interlock.definition.workflow import load, parse

__all__ = [
    "Expression",
    "ExpressionFailed",
    "Fault",
    "Gate",
    "OnReject",
    "Plan",
    "Retry",
    "Scope",
    "Step",
    "StepKind",
    "Template",
    "TemplateInvalid",
    "format_duration",
    "load",
    "parse",
    "parse_agent",
    "parse_duration",
]
