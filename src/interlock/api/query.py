"""Query parameters: an unknown name is rejected, with a suggestion of a similar name."""

from collections.abc import Iterator
from typing import Any

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from interlock.errors import Invalid
from interlock.visible import visible_text
from interlock.wire.validation_errors import suggestion


async def known_query(request: Request) -> None:
    """Reject unknown query parameters. If a misspelt filter were ignored, the answer would contain too many rows."""
    route = request.scope.get("route")
    if not request.scope["query_string"] or not isinstance(route, APIRoute) or not route.path.startswith("/api/"):
        return
    known = sorted(set(_parameters(route.dependant)))
    faults = [_fault(name, known) for name in dict.fromkeys(request.query_params) if name not in known]
    if faults:
        raise Invalid("; ".join(f"{fault['path']}: {fault['message']}" for fault in faults), errors=faults)


def _parameters(dependant: Dependant) -> Iterator[str]:
    yield from (field.alias for field in dependant.query_params)
    for each in dependant.dependencies:
        yield from _parameters(each)


def _fault(name: str, known: list[str]) -> dict[str, Any]:
    takes = f"Known are {', '.join(known)}." if known else "This endpoint takes none."
    shown = visible_text(name)[:100].encode(errors="replace").decode()
    message = f"There is no such query parameter{suggestion(name, known).removesuffix('?')}"
    return {"path": f"query.{shown}", "message": f"{message}{'?' if message.endswith('`') else '.'} {takes}"}
