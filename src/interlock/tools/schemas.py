"""Schemas of MCP servers: JSON Schema, with its patterns matched in bounded time."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from interlock.definition.patterns import MOST_WORK, pattern


@cache
def validator() -> Any:
    """Return JSON Schema's validator class with every keyword replaced that would run an unbounded pattern."""
    from jsonschema import Draft202012Validator, ValidationError
    from jsonschema.validators import extend

    def of_text(_: Any, source: str, instance: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
        if isinstance(instance, str) and not _matches(source, instance):
            yield ValidationError(f"{instance[:200]!r} does not match {source!r}")

    def of_properties(self: Any, patterns: Mapping[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
        if isinstance(instance, dict):
            for source, wanted in patterns.items():
                for name in instance:
                    if _matches(source, name):
                        yield from self.descend(instance[name], wanted, path=name, schema_path=source)

    plain: Callable[..., Any] = Draft202012Validator.VALIDATORS["additionalProperties"]
    unevaluated: Callable[..., Any] = Draft202012Validator.VALIDATORS["unevaluatedProperties"]

    def additional(self: Any, wanted: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
        yield from plain(self, wanted, instance, _named(schema, instance)) or ()

    def not_evaluated(self: Any, wanted: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
        if "patternProperties" in str(schema):
            raise ValueError("unevaluatedProperties together with patternProperties is not supported")
        yield from unevaluated(self, wanted, instance, schema) or ()

    replaced = {
        "pattern": of_text, "patternProperties": of_properties, "additionalProperties": additional,
        "unevaluatedProperties": not_evaluated,
    }  # fmt: skip
    return extend(Draft202012Validator, replaced)


def _named(schema: Mapping[str, Any], instance: Any) -> Mapping[str, Any]:
    """Return the schema with the properties that match its patterns listed by name."""
    patterns = schema.get("patternProperties")
    if not patterns or not isinstance(instance, dict):
        return schema
    matched = {name: True for source in patterns for name in instance if _matches(source, name)}
    return {**schema, "patternProperties": {}, "properties": {**matched, **schema.get("properties", {})}}


def _matches(source: str, text: str) -> bool:
    """Return whether the pattern matches. Raise ValueError for an unbounded pattern."""
    match = pattern(source)
    if match.work(text) > MOST_WORK:
        raise ValueError(f"the pattern {source[:120]!r} is too large for a text of {len(text):,} characters")
    return match.matches(text)
