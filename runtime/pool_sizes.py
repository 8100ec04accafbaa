"""The sizes of a worker's pools as plain numbers, for programs that replay its work without a model."""

from __future__ import annotations

import msgspec


class PoolSizes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens, states, and the bytes of each. What a model does not keep is 0, and is left out where this is written.

    Padding is not counted.
    """

    tokens: int
    """Of the KV pool, whole pages."""
    page_size: int
    bytes_per_token: int
    """K and V of all layers, or their latents; without the layers that have a window pool. 0 if no layer keeps any."""
    states: int = 0
    """Recurrent states; 0 for a model without."""
    bytes_per_state: int = 0
    window: int = 0
    """Tokens that layers with a sliding window see; 0 where these have no pool of their own."""
    window_tokens: int = 0
    """Of their pool, whole pages."""
    bytes_per_window_token: int = 0
    host_tokens: int = 0
    """Of the host tier, whole pages; 0 without one."""
    host_states: int = 0
