"""What pools take in memory, divided as the server divides it."""

from __future__ import annotations

from ...runtime.runner.memory_plan import SET_ASIDE, MemorySettings, plan_memory
from ...scheduler.config import SchedulerConfig
from .model_size import ModelSize

GIB = 2**30

_ENDLESS = 1 << 62
"""Bytes of memory, for plans of a given number of tokens."""


class PoolSizes:
    """Sizes in GiB; None where the model is not known.

    model: None if not known. window_ratio: --swa-full-tokens-ratio, 0 for the server's choice.
    """

    def __init__(self, model: ModelSize | None, page_size: int = 1, window_ratio: float = 0.0) -> None:
        self.model = model
        self.window_ratio = window_ratio
        self._page_size = page_size

    def device_gib(self, tokens: int | None) -> float | None:
        """A KV pool of so many tokens on a device without a host tier: layers with a sliding window have a smaller pool
        of their own beside it."""
        model = self.model
        if tokens is None or model is None or not model.window:
            return self.shared_gib(tokens)
        of_windows = (self.window_tokens(tokens) or tokens) * model.bytes_per_window_token
        return (tokens * (model.bytes_per_token - model.bytes_per_window_token) + of_windows) / GIB

    def shared_gib(self, tokens: int | None) -> float | None:
        """So many tokens where all layers share one pool: on the host, on disk, and on a device with a host tier."""
        return None if tokens is None or self.model is None else tokens * self.model.bytes_per_token / GIB

    def states_gib(self, num_states: int | None) -> float | None:
        """A pool of so many recurrent states, with those that are not handed out."""
        if num_states is None or self.model is None:
            return None
        return (num_states + SET_ASIDE) * self.model.bytes_per_state / GIB

    def window_tokens(self, tokens: int) -> int:
        """Tokens of the pool for windows that the server plans beside a KV pool of so many, with its default settings;
        0 where all layers share one pool."""
        model = self.model
        if model is None or not model.window or tokens < self._page_size:
            return 0
        config = SchedulerConfig()
        settings = MemorySettings(
            mem_fraction_static=1.0,
            context_length=model.context_length,
            max_total_tokens=tokens,
            num_rows=config.num_rows,
            page_size=self._page_size,
            chunked_prefill_size=config.step_tokens,
            window_ratio=self.window_ratio,
        )
        plan = plan_memory(
            settings,
            available=_ENDLESS,
            weight_bytes=0,
            bytes_per_token=model.bytes_per_token - model.bytes_per_window_token,
            bytes_per_window_token=model.bytes_per_window_token,
            window=model.window,
            is_cpu=False,
        )
        return plan.window_tokens

    def device_tokens(self, gib: float) -> int:
        """The most tokens of a KV pool that takes so much memory, with the pool for windows beside it. The model is
        known, and keeps K and V."""
        model = self.model
        assert model is not None
        least = int(gib * GIB / model.bytes_per_token)
        most = int(gib * GIB / ((model.bytes_per_token - model.bytes_per_window_token) or model.bytes_per_token))
        while least < most:
            middle = (least + most + 1) // 2
            size = self.device_gib(middle)
            assert size is not None
            least, most = (middle, most) if size <= gib else (least, middle - 1)
        return least
