"""The API reference: a page made from the API's own OpenAPI description, without third-party scripts."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from interlock.console.rendering import plain

Schema = dict[str, Any]


@dataclass(frozen=True)
class Field:
    name: str
    where: str
    kind: str
    is_required: bool
    about: str


@dataclass(frozen=True)
class Operation:
    tag: str
    method: str
    path: str
    about: str
    fields: tuple[Field, ...]
    answers: str


async def show(request: Request) -> Response:
    described = request.app.openapi()
    operations = sorted(_operations(described), key=lambda each: each.tag)
    groups = [(tag, list(found)) for tag, found in groupby(operations, key=lambda each: each.tag)]
    return await plain(request, "reference.html", groups=groups, server=str(request.base_url).rstrip("/"))


def _operations(described: Schema) -> list[Operation]:
    schemas = described["components"]["schemas"]
    return [
        Operation(
            tag=op.get("tags", ["other"])[0],
            method=method.upper(),
            path=path,
            about=op.get("description") or op["summary"],
            fields=(*(_parameter(each, schemas) for each in op.get("parameters", ())), *_body(op, schemas)),
            answers=_answers(op, schemas),
        )
        for path, methods in described["paths"].items()
        for method, op in methods.items()
    ]


def _parameter(described: Schema, schemas: Schema) -> Field:
    schema, about = described["schema"], described.get("description", "")
    return Field(described["name"], described["in"], kind(schema, schemas), described.get("required", False), about)


def _body(op: Schema, schemas: Schema) -> list[Field]:
    sent = op.get("requestBody", {}).get("content", {})
    schema = sent.get("application/json", {}).get("schema", {})
    named = next((each["$ref"] for each in (schema, *schema.get("anyOf", ())) if "$ref" in each), None)
    if named is None:
        return [Field("", "body", " or ".join(sent), True, "")] if sent else []
    body = schemas[named.rpartition("/")[2]]
    return [
        Field(name, "body", kind(of, schemas), name in body.get("required", ()), of.get("description", ""))
        for name, of in body["properties"].items()
    ]


def _answers(op: Schema, schemas: Schema) -> str:
    said = []
    for status, answer in op["responses"].items():
        if status.startswith("2"):
            schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
            said.append(f"{status} {kind(schema, schemas)}".strip())
    return ", ".join(said)


def kind(schema: Schema, schemas: Schema) -> str:
    """Return a JSON schema in a few words. A nullable field only means that the field may be omitted."""
    if "$ref" in schema:
        named = schema["$ref"].rpartition("/")[2]
        return kind(schemas[named], schemas) if "enum" in schemas[named] else named.replace("_", " ").strip()
    if "anyOf" in schema:
        kinds = dict.fromkeys(kind(each, schemas) for each in schema["anyOf"] if each.get("type") != "null")
        return " or ".join(kinds)
    if "enum" in schema or "const" in schema:
        return " or ".join(f'"{each}"' for each in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {kind(schema.get('items', {}), schemas) or 'anything'}"
    return str(schema.get("format") or schema.get("type") or "")
