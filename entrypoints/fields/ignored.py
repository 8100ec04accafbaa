"""Collects what a request asks for that has no effect, so that its client and the operator learn of it.

A reader adds to the `Ignored` of its request, the answer has the ``X-Baton-Warning`` header, and the log has a line
for each field, once per server.
"""

from __future__ import annotations

import logging
from typing import Literal

import msgspec

logger = logging.getLogger(__name__)

UnknownFields = Literal["refuse", "warn"]

WARNING_HEADER = "X-Baton-Warning"

_MAX_HEADER_CHARS = 2_000
_MAX_SHOWN = 16
"""Fields in one header. A client that sends more learns of these, and that there are more."""

_MAX_LOGGED = 1_000
"""Fields. With ``--unknown-fields warn`` clients make up the names."""

_MAX_NAME_CHARS = 128


class Ignored:
    """The ignored fields of one request: name -> why. takes_unknown: also those that no table lists."""

    def __init__(self, unknown: UnknownFields = "refuse") -> None:
        self.takes_unknown = unknown == "warn"
        self.reasons: dict[str, str] = {}

    def add_field(self, name: str, why: str) -> None:
        """name: as it stands in the body, such as ``options`` or ``tools[3]``. why: a few words."""
        if len(name) > _MAX_NAME_CHARS:
            name = f"{name[:_MAX_NAME_CHARS]}..."
        self.reasons.setdefault(name, why)


class IgnoredLog:
    """Logs ignored fields, each once per server. Used on the server's loop only."""

    def __init__(self, unknown: UnknownFields = "refuse") -> None:
        self._unknown: UnknownFields = unknown
        self._logged: set[str] = set()

    def begin_request(self) -> Ignored:
        """For one request."""
        return Ignored(self._unknown)

    def report(self, ignored: Ignored) -> dict[str, str]:
        """Log what was not logged before. Returns the answer's header; empty if nothing was ignored."""
        if not ignored.reasons:
            return {}
        for name, why in ignored.reasons.items():
            kind = _kind_of(name)
            if kind not in self._logged and len(self._logged) < _MAX_LOGGED:
                self._logged.add(kind)
                logger.warning("a request's %s has no effect (%s); later ones are not logged", _ascii(name), why)
        parts = [f"{_ascii(name)}: {why}" for name, why in list(ignored.reasons.items())[:_MAX_SHOWN]]
        if (more := len(ignored.reasons) - _MAX_SHOWN) > 0:
            parts.append(f"and {more} more")
        text = "no effect: " + "; ".join(parts)
        return {WARNING_HEADER: text if len(text) <= _MAX_HEADER_CHARS else text[: _MAX_HEADER_CHARS - 3] + "..."}


def _kind_of(name: str) -> str:
    """``messages[17].mood`` and ``messages[3].mood`` are logged once."""
    return "".join(character for character in name if not character.isdecimal())


def _ascii(text: str) -> str:
    """Without what a header cannot hold, and what could begin another."""
    if text.isascii() and text.isprintable():
        return text
    escaped = msgspec.json.encode(text.encode("ascii", "backslashreplace").decode()).decode()[1:-1]
    return escaped.replace("\x7f", "")
