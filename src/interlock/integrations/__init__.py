"""Integrations: deliver Interlock's events to other systems."""

from interlock.integrations.outbox import Dispatcher, deliver_forever, use_settings

__all__ = ["Dispatcher", "deliver_forever", "use_settings"]
