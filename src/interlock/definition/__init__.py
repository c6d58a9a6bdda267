"""Definitions: workflows and agents in YAML or JSON, expressions and durations, turned into a checked plan."""

from interlock.definition.agent import parse_agent
from interlock.definition.diagnostics import Fault
from interlock.definition.duration import format_duration, parse_duration
from interlock.definition.expression import Expression, ExpressionFailed, Scope, Template, TemplateInvalid
from interlock.definition.plan import ApprovalGate, OnReject, Plan, PlanStep, Retry, StepKind
from interlock.definition.workflow import load, parse

__all__ = [
    "ApprovalGate",
    "Expression",
    "ExpressionFailed",
    "Fault",
    "OnReject",
    "Plan",
    "PlanStep",
    "Retry",
    "Scope",
    "StepKind",
    "Template",
    "TemplateInvalid",
    "format_duration",
    "load",
    "parse",
    "parse_agent",
    "parse_duration",
]
