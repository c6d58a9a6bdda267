"""The HTTP API."""

from interlock.api.app import create_app
from interlock.api.dependencies import AppContext

__all__ = ["AppContext", "create_app"]
