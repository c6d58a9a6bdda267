"""The console: pages for people, on the same server and through the same doors as the API.

Pages are drawn on the server and work without a script. One small module keeps them live, adds keys to press, and
sends nothing anywhere but here.
"""

from interlock.console.site import mount

__all__ = ["mount"]
