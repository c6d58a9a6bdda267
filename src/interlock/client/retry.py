"""Retries: when to try again, and when to give up. Pure; the clients do the waiting."""

from typing import Generic, TypeVar, cast

import httpx2
from pydantic import ValidationError

from interlock.client.errors import ApiError, HttpResponse, Unreachable
from interlock.wire import Event, JobHistoryEvent

E = TypeVar("E", bound=Event | JobHistoryEvent)

# About a second in total: long enough for a server that restarts, short enough for a person at a prompt.
RETRY_SECONDS = (0.1, 0.3, 0.8)

# A follower that was connected before waits longer: twelve refusals in a row are about half a minute.
FOLLOW_FIRST_SECONDS = 0.1
FOLLOW_MOST_SECONDS = 5.0
FOLLOW_REFUSALS = 12

# The server sends something every 15 seconds, so a stream that is silent for longer than this is dead.
FOLLOW_SILENCE_SECONDS = 60.0

AWAY = frozenset({502, 503, 504})


def is_final(error: Exception) -> bool:
    """Return whether a retry would only take as long again or fail for the same reason."""
    if isinstance(error, (httpx2.ConnectTimeout, httpx2.PoolTimeout)):
        return False
    return isinstance(error, (httpx2.TimeoutException, httpx2.UnsupportedProtocol, httpx2.LocalProtocolError))


def is_in_flight(response: HttpResponse) -> bool:
    """Return whether a repeated request met its own first attempt, whose answer will follow."""
    return response.status_code == 409 and ApiError.of(response).code == "IDEMPOTENCY_CONFLICT"


class Attempts:
    """The attempts at one call. Every call can be repeated: it only reads, or it carries an Idempotency-Key."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pauses = iter(RETRY_SECONDS)

    def pause_after(self, error: Exception) -> float:
        """Return how long to wait before the next attempt. Raises Unreachable after the last."""
        pause = next(self._pauses, None)
        if pause is None or is_final(error):
            raise Unreachable.by(error, self._url) from error
        return pause

    def pause_before_answer(self, response: HttpResponse) -> float | None:
        """Return the pause before the next attempt, or None if this answer is final, which is the usual case."""
        return next(self._pauses, None) if is_in_flight(response) else None


class Following(Generic[E]):
    """An event stream over as many connections as necessary: every event once, in order, without gaps."""

    def __init__(self, url: str, path: str, kind: type[E], after: int) -> None:
        self.path = path
        self.seq = after
        self.ended = False
        self._url = url
        self._kind = kind
        self._was_open = False
        self._refusals = 0
        self._fruitless = 0
        self._missed_after: int | None = None

    def headers(self) -> dict[str, str]:
        return {"Accept": "text/event-stream", "Cache-Control": "no-store", "Last-Event-ID": str(self.seq)}

    def query(self) -> dict[str, int]:
        return {"after": self.seq}

    def opened(self, response: httpx2.Response) -> None:
        if response.status_code in AWAY:
            raise httpx2.ConnectError(f"{response.status_code} {response.reason_phrase}")
        if not response.is_success:
            raise ApiError.of(response)
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            raise ApiError.unreadable(response)
        self._was_open = True
        self._refusals = 0

    def take(self, sent: httpx2.ServerSentEvent, response: httpx2.Response) -> E | None:
        """Return the event if it is the next one, otherwise None."""
        self.ended = sent.event == "end"
        try:
            event = cast(E, self._kind.model_validate_json(sent.data)) if sent.data else None
        except ValidationError as error:
            if self.ended:  # an end mark without an event
                return None
            raise ApiError.unreadable(response) from error
        if event is None or event.seq <= self.seq:
            return None
        self._refuse_gap(event.seq)
        self.seq = event.seq
        self._fruitless = 0
        return event

    def _refuse_gap(self, seq: int) -> None:
        # Ask once more from the current position. If the server leaves the number out again, the event does not exist.
        if seq > self.seq + 1 and self._missed_after != self.seq:
            self._missed_after = self.seq
            self.ended = False
            raise httpx2.RemoteProtocolError(f"event {self.seq + 1} is missing")

    def pause_after(self, error: Exception | None) -> float:
        """Return how long to wait before reconnecting. Raises Unreachable when the server stays away."""
        if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout)):
            self._refusals += 1
        allowed = FOLLOW_REFUSALS if self._was_open else len(RETRY_SECONDS)
        if error is not None and (self._refusals > allowed or isinstance(error, httpx2.LocalProtocolError)):
            raise Unreachable.by(error, self._url) from error
        pause = min(FOLLOW_FIRST_SECONDS * 2.0**self._fruitless, FOLLOW_MOST_SECONDS)
        self._fruitless = min(self._fruitless + 1, 16)
        return pause
