"""The HTTP API."""

from interlock.api.app import create_app
from interlock.api.services import Services

__all__ = ["Services", "create_app"]
