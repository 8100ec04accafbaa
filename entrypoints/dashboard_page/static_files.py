"""The static files of the dashboard page: read once, looked up by their exact paths."""

from __future__ import annotations

from hashlib import blake2b
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

FIRST = "index.html"

_KINDS = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
}


class StaticFile(NamedTuple):
    content: bytes
    kind: str
    """Content type."""
    tag: str
    """ETag: a digest of the content, in quotes."""


def static_files(folder: Traversable | None = None) -> dict[str, StaticFile]:
    """Files by their paths in the folder, with slashes; only kinds of files that the page has. folder: None for this
    package's ``static``."""
    found: dict[str, StaticFile] = {}
    folders = [("", files("baton.entrypoints.dashboard_page") / "static" if folder is None else folder)]
    for path, below in folders:  # grows
        for entry in below.iterdir():
            if entry.is_dir():
                folders.append((f"{path}{entry.name}/", entry))
            elif (kind := _KINDS.get(entry.name.rsplit(".", 1)[-1])) is not None:
                content = entry.read_bytes()
                found[path + entry.name] = StaticFile(
                    content, kind, f'"{blake2b(content, digest_size=12).hexdigest()}"'
                )
    return found
