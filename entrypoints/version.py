"""Baton's version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def baton_version() -> str:
    """The installed package's version; "unknown" for a checkout that is only on the path."""
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "unknown"
