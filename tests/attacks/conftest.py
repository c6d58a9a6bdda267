"""Short tracebacks, as a server writes them: structlog's default ones block the event loop for seconds."""

from tests.matrix.conftest import _plain_tracebacks

__all__ = ["_plain_tracebacks"]
