"""Errors are nouns with fields; what a caller can do about one decides its class.

Problem                    anything that is answered as application/problem+json
├── Invalid        422     the request is wrong; it says what would be right
│   └── DefinitionInvalid  … in a workflow, with file, line and path
├── Unauthorized   401     no key, or not a valid one
├── Forbidden      403     the key's role may not do this
├── NotFound       404     it does not exist, or belongs to another tenant
├── MethodNotAllowed 405   the path is there and is asked for in another way; it says in which
├── Conflict       409     it is in the wrong state; it says which, and what is allowed
│   ├── InvalidTransition
│   └── Unreadable         … this version of Interlock cannot read what is stored
├── LeaseLost      409     somebody else holds the run now; nothing was changed
├── TooLarge       413     the body is over the limit
├── RateLimited    429     the tenant's runs of this minute are taken, and the caller would not wait
└── Unavailable    503     the database is away; try again

Retryable, Terminal        what a tool raises to sort its own failures
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any


class Problem(Exception):
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


class Invalid(Problem):
    status, title, code = 422, "The request is not valid", "INVALID_REQUEST"


class DefinitionInvalid(Invalid):
    """All the mistakes of one definition at once, so that they can be mended at once."""

    title, code = "The definition is not valid", "DEFINITION_INVALID"

    def __init__(self, faults: Iterable[Any]) -> None:
        self.faults = tuple(faults)
        super().__init__(
            "\n".join(str(fault) for fault in self.faults),
            errors=[fault.as_dict() for fault in self.faults],
        )


class Unauthorized(Problem):
    status, title, code = 401, "Not signed in", "UNAUTHORIZED"
    headers = MappingProxyType({"WWW-Authenticate": "Bearer"})


class Forbidden(Problem):
    status, title, code = 403, "Not allowed", "FORBIDDEN"


class NotFound(Problem):
    status, title, code = 404, "Not found", "NOT_FOUND"


class MethodNotAllowed(Problem):
    status, title, code = 405, "Not done like this", "METHOD_NOT_ALLOWED"

    def __init__(self, method: str, path: str, allowed: Iterable[str]) -> None:
        allowed = tuple(allowed)
        super().__init__(f"{method} is not for {path}; it takes {' and '.join(allowed)}", allowed=allowed)
        self.headers = {"Allow": ", ".join(allowed)}


class Conflict(Problem):
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


class TooLarge(Problem):
    status, title, code = 413, "The body is too large", "BODY_TOO_LARGE"


class RateLimited(Problem):
    status, title, code = 429, "Too many runs in this minute", "RATE_LIMITED"


class Unavailable(Problem):
    status, title, code = 503, "The database is not reachable", "UNAVAILABLE"
    headers = MappingProxyType({"Retry-After": "1"})


class Retryable(Exception):
    """A tool's word that trying again may help; `after` seconds, if it knows."""

    def __init__(self, message: str, *, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


class Terminal(Exception):
    """A tool's word that trying again cannot help."""
