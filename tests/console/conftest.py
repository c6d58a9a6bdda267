"""Fixtures of the page tests."""

from tests.console.pages import admin, sign_in, viewer

__all__ = ["admin", "sign_in", "viewer"]
