"""Errors are nouns with fields. The remedy for the caller decides the class.

InterlockError              any error that is answered as application/problem+json
├── Invalid        422     the request is wrong; the error says what would be right
│   └── DefinitionInvalid  … in a workflow, with file, line and path
├── Unauthorized   401     no key, or an invalid one
├── Forbidden      403     the key's role may not do this
├── NotFound       404     it does not exist, or belongs to another tenant
├── MethodNotAllowed 405   the path exists but not with this method; the error lists the allowed ones
├── Conflict       409     it is in the wrong state; the error names the state and the allowed events
│   ├── InvalidTransition
│   └── Unreadable         … this version of Interlock cannot read what is stored
├── LeaseLost      409     another worker holds the run now; nothing was changed
├── TooLarge       413     the body is over the limit
├── RateLimited    429     no run is left in this minute's limit, and the caller would not wait
└── Unavailable    503     the database is unavailable; try again

Retryable, Terminal        what a tool raises to classify its own failures
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any


class InterlockError(Exception):
    status: int = 500
    title: str = "Something went wrong"
    code: str = "INTERNAL_ERROR"
    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(self, detail: str, *, code: str | None = None, **fields: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.code = code or type(self).code
        self.fields: Mapping[str, Any] = fields
        if "retry_after" in fields:
            self.headers = {"Retry-After": str(fields["retry_after"])}


class Invalid(InterlockError):
    status, title, code = 422, "The request is not valid", "INVALID_REQUEST"


class DefinitionInvalid(Invalid):
    """All mistakes of one definition, so that the author can fix them together."""

    title, code = "The definition is not valid", "DEFINITION_INVALID"

    def __init__(self, faults: Iterable[Any]) -> None:
        self.faults = tuple(faults)
        super().__init__(
            "\n".join(str(fault) for fault in self.faults),
            errors=[fault.as_dict() for fault in self.faults],
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.faults,)


class Unauthorized(InterlockError):
    status, title, code = 401, "Not signed in", "UNAUTHORIZED"
    headers = MappingProxyType({"WWW-Authenticate": "Bearer"})


class Forbidden(InterlockError):
    status, title, code = 403, "Not allowed", "FORBIDDEN"


class NotFound(InterlockError):
    status, title, code = 404, "Not found", "NOT_FOUND"


class MethodNotAllowed(InterlockError):
    status, title, code = 405, "Method not allowed", "METHOD_NOT_ALLOWED"

    def __init__(self, method: str, path: str, allowed: Iterable[str]) -> None:
        allowed = tuple(allowed)
        super().__init__(f"{method} is not allowed on {path}. Allowed: {', '.join(allowed)}.", allowed=allowed)
        self.headers = {"Allow": ", ".join(allowed)}


class Conflict(InterlockError):
    status, title, code = 409, "Not possible in this state", "CONFLICT"


class InvalidTransition(Conflict):
    title, code = "Not possible in this state", "RUN_INVALID_TRANSITION"

    def __init__(
        self, *, machine: str, state: str, event: str, allowed: Iterable[str], terminal: bool,
        asked: Iterable[str] = (), allowed_states: Iterable[str] = (),
    ) -> None:  # fmt: skip
        allowed = tuple(allowed)
        can = f"allowed: {', '.join(allowed)}" if allowed else "it is final"
        code = f"{machine.upper()}_{'TERMINAL_STATE' if terminal else 'INVALID_TRANSITION'}"
        super().__init__(
            f"{machine} is {state}; {event} is not possible ({can})",
            code=code,
            state=str(state),
            event=str(event),
            allowed=[str(a) for a in allowed],
            asked_state=next((str(a) for a in asked), None),
            allowed_states=[str(a) for a in allowed_states],
        )
        self.machine = machine


class Unreadable(Conflict):
    title, code = "What is stored cannot be read", "UNREADABLE"


class LeaseLost(Conflict):
    title, code = "The lease was lost", "LEASE_LOST"


class TooLarge(InterlockError):
    status, title, code = 413, "The body is too large", "BODY_TOO_LARGE"


class RateLimited(InterlockError):
    status, title, code = 429, "Too many runs in this minute", "RATE_LIMITED"


class Unavailable(InterlockError):
    status, title, code = 503, "The database is not reachable", "UNAVAILABLE"
    headers = MappingProxyType({"Retry-After": "1"})


class Retryable(Exception):
    """Raised by a tool if trying again may help, `after` seconds if it knows."""

    def __init__(self, message: str, *, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


class Terminal(Exception):
    """Raised by a tool if trying again cannot help."""
