"""What the host tier tells a tier behind it, and asks of it."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..node import TreeNode


class Below(Protocol):
    """A tier behind the host, which reads the host's copies and brings others."""

    def stored(self, node: TreeNode) -> None:
        """A node has a copy on the host now."""
        ...

    def used(self, node: TreeNode) -> None:
        """The path down to this node is in use, whatever tier it is on."""
        ...

    def reading(self, slots: np.ndarray) -> list[int]:
        """Fences of all that reads some of these host slots, int32 [n]."""
        ...

    @property
    def coming(self) -> list[np.ndarray]:
        """Host slots, int32 [n] each, that it fills and that belong to no node yet."""
        ...

    def cut_loose(self) -> list[tuple[int, np.ndarray]]:
        """The tree is given up. Returns the fence and the host slots, int32 [n], of all that goes on for nobody."""
        ...
