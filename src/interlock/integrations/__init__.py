"""Integrations: how what happens here is told to others."""

from interlock.integrations.outbox import Dispatcher, deliver_forever, use_settings

__all__ = ["Dispatcher", "deliver_forever", "use_settings"]
