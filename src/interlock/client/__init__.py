"""A typed client of the HTTP API, sync and async. It depends on the wire and on no other part of Interlock."""

from interlock.client.clients import DEFAULT_URL, AsyncClient, Client
from interlock.client.errors import ApiError, ClientError, Unreachable

__all__ = ["DEFAULT_URL", "ApiError", "AsyncClient", "Client", "ClientError", "Unreachable"]
