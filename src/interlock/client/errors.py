"""The errors of a client.

ClientError
├── ApiError       the server answered, and the answer is a problem
└── Unreachable    there was no answer
"""

from collections.abc import Mapping
from typing import Any, Protocol

import httpx2
from pydantic import ValidationError

from interlock.wire import Problem
from interlock.wire.validation_errors import explain


class HttpResponse(Protocol):
    """What the client needs of an answer, independent of the HTTP library."""

    @property
    def status_code(self) -> int: ...
    @property
    def content(self) -> bytes: ...
    @property
    def is_success(self) -> bool: ...
    @property
    def reason_phrase(self) -> str: ...
    @property
    def url(self) -> httpx2.URL | str: ...


class ClientError(Exception):
    pass


class ApiError(ClientError):
    """A problem that the server answered. `code` is for programs, the text for people."""

    def __init__(self, status: int, code: str, title: str, detail: str = "", fields: Mapping[str, Any] | None = None):
        super().__init__(f"{title}: {detail}" if detail else title)
        self.status = status
        self.code = code
        self.title = title
        self.detail = detail
        self.fields: Mapping[str, Any] = fields or {}

    @classmethod
    def of(cls, response: HttpResponse) -> "ApiError":
        try:
            problem = Problem.model_validate_json(response.content)
        except ValidationError:  # the page of a proxy, or another program at this address
            phrase = response.reason_phrase or "Error"
            return cls(
                response.status_code,
                f"HTTP_{response.status_code}",
                f"{response.url} answered {response.status_code} {phrase}",
            )
        return cls(response.status_code, problem.code, problem.title, problem.detail, problem.model_extra)

    @classmethod
    def of_body(cls, error: ValidationError) -> "ApiError":
        return cls.of_request(explain(error))

    @classmethod
    def of_request(cls, detail: str) -> "ApiError":
        """Return the error that the server would answer, for a request that the client rejects itself."""
        return cls(422, "INVALID_REQUEST", "The request is not valid", detail)

    @classmethod
    def unreadable(cls, response: HttpResponse) -> "ApiError":
        return cls(response.status_code, "UNREADABLE_ANSWER", f"what {response.url} answered is not Interlock's")


class Unreachable(ClientError):
    """The server did not answer. A request that changes something may or may not have been carried out."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(why)
        self.url = url

    @classmethod
    def by(cls, error: Exception, url: str) -> "Unreachable":
        match error:
            case httpx2.ConnectError() | httpx2.ConnectTimeout():
                return cls(url, f"no Interlock at {url}; start one with `interlock up`")
            case httpx2.TimeoutException():
                return cls(url, f"Interlock at {url} did not answer in time")
            case httpx2.UnsupportedProtocol() | httpx2.InvalidURL():
                return cls(url, f"{url!r} is not an address; expected one like http://127.0.0.1:8420")
            case _:
                return cls(url, f"the connection to Interlock at {url} broke: {error or type(error).__name__}")
