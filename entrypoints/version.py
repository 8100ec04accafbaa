"""Which Baton this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def baton_version() -> str:
    """Of the package; a checkout that is only on the path has none."""
    try:
        return version("baton")
    except PackageNotFoundError:
        return "unknown"
