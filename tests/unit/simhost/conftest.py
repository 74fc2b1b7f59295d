"""Hosts for these tests."""

from __future__ import annotations

from integration.conftest import MakeHost, make_host

__all__ = ["MakeHost", "make_host"]
