"""The folder of what takes long to find out and is the same at the next start. All of it can be deleted at any time."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "BATON_CACHE_DIR"


def cache_folder() -> Path:
    """$BATON_CACHE_DIR, else baton in $XDG_CACHE_HOME or ~/.cache. It need not exist, and perhaps cannot be written.
    Raises OSError if there is no home folder either."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
    except RuntimeError as error:
        raise OSError(f"{error}; set {VARIABLE}") from error
