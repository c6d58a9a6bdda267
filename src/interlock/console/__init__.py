"""The console: pages for people, on the same server and with the same checks as the API.

The server renders pages, which work without a script. One small module keeps them current, adds keyboard shortcuts, and
sends requests only to this server.
"""

from interlock.console.app import mount

__all__ = ["mount"]
