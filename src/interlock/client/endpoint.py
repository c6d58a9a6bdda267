"""A call: one request and how to read its answer, as a value that the sync and the async client can carry out."""

import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from interlock.client.errors import ApiError, HttpResponse

if TYPE_CHECKING:
    from interlock.client.clients import AsyncClient, Client

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class EndpointCall(Generic[T]):
    method: str
    path: str
    read: Callable[[HttpResponse], T]
    query: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    # How long the server may wait on purpose, in addition to the client's own timeout.
    wait: float = 0

    def answer(self, response: HttpResponse) -> T:
        if not response.is_success:
            raise ApiError.of(response)
        try:
            return self.read(response)
        except ValidationError as error:
            raise ApiError.unreadable(response) from error


def get(path: str, view: type[M], *, wait: float | None = None, **query: Any) -> EndpointCall[M]:
    return EndpointCall("GET", path, _reader(view), query=_given(query, wait=wait), wait=wait or 0)


def post(
    path: str,
    view: type[M],
    body: BaseModel | None = None,
    *,
    idempotency_key: str | None = None,
    wait: float | None = None,
    **query: Any,
) -> EndpointCall[M]:
    content = body.model_dump_json(exclude_none=True).encode() if body is not None else b"{}"
    return send_text(path, view, content, "application/json", idempotency_key=idempotency_key, wait=wait, **query)


def send_text(
    path: str,
    view: type[M],
    content: bytes,
    content_type: str,
    *,
    method: str = "POST",
    idempotency_key: str | None = None,
    wait: float | None = None,
    **query: Any,
) -> EndpointCall[M]:
    # Each change carries an idempotency key, so that it can be sent again when the connection breaks.
    key = _checked(idempotency_key) if idempotency_key is not None else str(uuid.uuid4())
    headers = {"Content-Type": content_type, "Idempotency-Key": key}
    return EndpointCall(method, path, _reader(view), _given(query, wait=wait), headers, content, wait or 0)


def _checked(key: str) -> str:
    """Return a valid idempotency key.

    An empty key, for example from an unset variable, would allow a duplicate, so it raises.
    """
    if not key.strip():
        raise ApiError.of_request("an idempotency key is not empty; leave it out if there is none")
    if not key.isascii() or not key.isprintable():
        raise ApiError.of_request("an idempotency key has printable ASCII characters: it is sent in a header")
    return key


@overload
def delete(path: str) -> EndpointCall[None]: ...
@overload
def delete(path: str, view: type[M]) -> EndpointCall[M]: ...
def delete(path: str, view: type[M] | None = None) -> EndpointCall[Any]:
    return EndpointCall("DELETE", path, _reader(view) if view is not None else lambda _: None)


def at(template: str, *names: str) -> str:
    """Return a path with its names quoted, so that a name cannot become another path."""
    return template.format(*(_quoted(str(name)) for name in names))


def _quoted(name: str) -> str:
    if name in ("", ".", ".."):  # path segments `.` and `..` survive percent-encoding
        raise ApiError.of_request(f"{name!r} is no id and no name")
    return quote(name, safe="")


def _reader(view: type[M]) -> Callable[[HttpResponse], M]:
    return lambda response: view.model_validate_json(response.content)


def _given(query: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {name: value for name, value in {**query, **more}.items() if value is not None}


class endpoint(Generic[P, T]):  # noqa: N801 - a decorator
    """Turn a method that describes a call into one that makes it: blocking on a Client, awaited on an AsyncClient."""

    def __init__(self, describe: Callable[Concatenate[Any, P], EndpointCall[T]]) -> None:
        self.describe = describe
        self.__doc__ = describe.__doc__

    @overload
    def __get__(self, client: "Client", owner: type | None = None) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: "AsyncClient", owner: type | None = None) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, client: None, owner: type | None = None) -> "endpoint[P, T]": ...
    def __get__(self, client: Any, owner: type | None = None) -> Any:
        if client is None:
            return self

        @wraps(self.describe)
        def method(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.send(self._describe(client, *args, **kwargs))

        return method

    def _describe(self, client: Any, *args: P.args, **kwargs: P.kwargs) -> EndpointCall[T]:
        try:
            return self.describe(client, *args, **kwargs)
        except ValidationError as error:  # the server would answer the same, one round trip later
            raise ApiError.of_body(error) from None
