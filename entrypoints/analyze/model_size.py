"""What a model keeps of a sequence, in bytes."""

from __future__ import annotations

from dataclasses import dataclass


class ModelSizeError(ValueError):
    """The size cannot be told from the file; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """In the checkpoint's dtype.

    bytes_per_token: K and V, or the latent, of a token in all layers. bytes_per_state: all recurrent states of a
    sequence; 0 for a model without. window: tokens that layers with a sliding window see; 0 where these have no pool of
    their own. bytes_per_window_token: the part of bytes_per_token in these layers. context_length: 0 where it does not
    matter.
    """

    bytes_per_token: int
    bytes_per_state: int = 0
    window: int = 0
    bytes_per_window_token: int = 0
    context_length: int = 0
