"""A shorter way into an endpoint that is called often."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

Shortcut = Callable[[Request], Awaitable[Response | None]]


class DirectRoute(APIRoute):
    """A route that calls the endpoint's `shortcut` first.

    Resolving the dependencies of a request costs more than most requests do. A shortcut knows what its endpoint needs.
    It returns None for a request that it does not understand; the ordinary route then handles it or reports the error.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        ordinary = super().get_route_handler()
        shortcut: Shortcut | None = getattr(self.endpoint, "shortcut", None)
        if shortcut is None:
            return ordinary

        async def handle(request: Request) -> Response:
            return await shortcut(request) or await ordinary(request)

        return handle


def by_way_of(shortcut: Shortcut) -> Callable[[Any], Any]:
    def mark(endpoint: Any) -> Any:
        endpoint.shortcut = shortcut
        return endpoint

    return mark
