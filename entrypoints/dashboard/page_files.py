"""The page's files: read once, found by their exact paths."""

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


class PageFile(NamedTuple):
    content: bytes
    kind: str
    """Content type."""
    tag: str
    """ETag: a digest of the content, in quotes."""


def page_files(folder: Traversable | None = None) -> dict[str, PageFile]:
    """By path in the folder, with slashes; files of other kinds than a page has are left out. folder: None for the one
    of this package."""
    found: dict[str, PageFile] = {}
    folders = [("", files("baton.entrypoints.dashboard") / "page" if folder is None else folder)]
    for path, below in folders:  # grows
        for entry in below.iterdir():
            if entry.is_dir():
                folders.append((f"{path}{entry.name}/", entry))
            elif (kind := _KINDS.get(entry.name.rsplit(".", 1)[-1])) is not None:
                content = entry.read_bytes()
                found[path + entry.name] = PageFile(content, kind, f'"{blake2b(content, digest_size=12).hexdigest()}"')
    return found
