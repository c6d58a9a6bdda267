"""Fixtures of the tests of pages."""

from tests.console.pages import admin, sign_in, viewer

__all__ = ["admin", "sign_in", "viewer"]
