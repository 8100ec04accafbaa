"""The fixed sizes of a forward that is captured once and replayed (a CUDA graph)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class GraphKind(Enum):
    DECODE = "decode"
    """One query per sequence."""
    EXTEND = "extend"
    """Any number of queries per sequence."""
    SHARED = "shared prefixes"
    """One query per sequence; groups of them read their common prefix once."""


@dataclass(slots=True, frozen=True)
class GraphShape:
    """A graph of this shape runs steps that are padded to exactly ``tokens`` queries and ``sequences`` sequences."""

    kind: GraphKind
    tokens: int
    sequences: int

    def __str__(self) -> str:
        return f"{self.kind.value} {self.tokens}" + (f" × {self.sequences}" if self.kind is GraphKind.EXTEND else "")
