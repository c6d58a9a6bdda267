"""Parsing what people type into commands, and making foreign text safe to show."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from interlock.visible import visible_text


def visible(text: str) -> str:
    """Return foreign text for a terminal: line breaks stay, all other invisible characters are escaped."""
    return visible_text(text, keep_newlines=True)


def one_line(text: str) -> str:
    return visible(" ".join(text.split()))


def read_text(name: str) -> str:
    """Return a file's text; `-` reads stdin."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise typer.TyperException(f"{name}: not a text file") from error


def parse_input(given: str | None, params: Iterable[str]) -> dict[str, Any]:
    """Return a run's input: a JSON object or `@file`, then single fields that override it."""
    found = parse_object(given, "--input") if given is not None else {}
    return found | parse_params(params, "--param")


def parse_inputs(given: str) -> list[Any]:
    """Return the inputs of many runs."""
    found = parse_json(given, "--inputs")
    if not isinstance(found, list):
        raise typer.BadParameter('expected a list like [{"id": 1}, {"id": 2}]', param_hint="--inputs")
    return found


def parse_json(given: str, option: str) -> Any:
    """Return the value of JSON, or of `@file` with JSON."""
    text = read_text(given[1:]) if given.startswith("@") else given
    try:
        return json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint=option) from error


def parse_object(given: str, option: str) -> dict[str, Any]:
    found = parse_json(given, option)
    if not isinstance(found, dict):
        raise typer.BadParameter('expected an object like {"amount": 120}', param_hint=option)
    return found


def parse_params(params: Iterable[str], option: str) -> dict[str, Any]:
    return dict(_parse_param(param, option) for param in params)


def _parse_param(param: str, option: str) -> tuple[str, Any]:
    """Return a name and value: `amount=120` is a number, `name=Ann` a string. Invalid JSON is text."""
    name, equals, value = param.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"expected name=value, not {param!r}", param_hint=option)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def parse_seconds(text: str, option: str = "--deadline") -> float:
    """Return the seconds of a duration as workflows write it, or of a plain number."""
    from interlock.definition.duration import parse_duration

    try:
        return parse_duration(float(text) if text.replace(".", "", 1).isdecimal() else text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
