"""The pools of a simulated machine: as a server with the same memory would divide it (`runtime/runner/memory_plan.py`),
or as a trace has them."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ...runtime.checkpoint.model_files import ModelLoadError
from ...runtime.pool_sizes import PoolSizes
from ...runtime.runner.memory_plan import MemorySettings, least_windows, plan_memory, wanted_windows
from ...scheduler.config import SchedulerConfig
from .cost_model import GB, Card, CostError, ModelSizes

MEMORY_SHARE = 0.9
"""Of a card's memory, for weights and pools."""

LEAST_CONTEXT = 1024
"""A pool must hold so many tokens at least. Jobs that are longer than the pool are refused one by one."""


class WantedPools(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that were asked for; what is 0 follows from the memory or from the trace."""

    tokens: int = 0
    states: int = 0
    window: int = 0
    """Tokens that layers with a sliding window see, in place of the model's."""
    window_ratio: float = 0.0
    """--swa-full-tokens-ratio"""
    recorded: PoolSizes | None = None
    """The pools of a trace, which stand for those that fit the card."""


def plan_pools(card: Card, model: ModelSizes, config: SchedulerConfig, wanted: WantedPools) -> PoolSizes:
    """The pools on the card. config: has the lengths and limits; its sizes of pools do not count. Raises CostError if
    they do not fit, or if there is no room for a window pool that was asked for."""
    recorded, page = wanted.recorded, config.page_size
    tokens = wanted.tokens or (recorded.tokens if recorded is not None else 0)
    states = wanted.states or (recorded.states if recorded is not None else 0)
    window, window_tokens = wanted.window or model.window, 0
    settings = _settings(config, wanted.window_ratio)
    if not tokens or (model.bytes_per_state and not states):
        fitting = replace(settings, max_total_tokens=tokens, max_states=states)
        tokens, fitted, window_tokens = _fit(card, model, fitting, window)
        states = states or fitted
    elif recorded is not None and not (wanted.tokens or wanted.window or wanted.window_ratio):
        window_tokens = recorded.window_tokens
    elif window:
        window_tokens = wanted_windows(settings, tokens, window)
    tokens, window_tokens = tokens - tokens % page, window_tokens - window_tokens % page
    if window and not least_windows(settings, window) <= window_tokens < tokens:
        if wanted.window or wanted.window_ratio:
            raise CostError(
                f"a window of {window} tokens needs a pool of {least_windows(settings, window)} tokens or more, which "
                f"must be smaller than the KV pool of {tokens}; raise --pool-tokens, or leave out --window and "
                "--swa-full-tokens-ratio"
            )
        window_tokens = 0
    if not window_tokens:
        window = 0
    return PoolSizes(
        tokens=tokens,
        page_size=page,
        bytes_per_token=model.bytes_per_token + (0 if window else model.bytes_per_window_token),
        states=states,
        bytes_per_state=model.bytes_per_state,
        window=window,
        window_tokens=window_tokens,
        bytes_per_window_token=model.bytes_per_window_token if window else 0,
    )


def one_pool(pools: PoolSizes) -> PoolSizes:
    """The same memory where layers with a sliding window share the KV pool, as they do with a host tier."""
    if not pools.window:
        return pools
    size = pools.tokens * pools.bytes_per_token + pools.window_tokens * pools.bytes_per_window_token
    bytes_per_token = pools.bytes_per_token + pools.bytes_per_window_token
    tokens = size // bytes_per_token
    return PoolSizes(
        tokens=tokens - tokens % pools.page_size, page_size=pools.page_size, bytes_per_token=bytes_per_token
    )


def add_host(pools: PoolSizes, host_gb: float, recorded: PoolSizes | None) -> PoolSizes:
    """The pools with a host tier, which has as many states for its tokens as the card. recorded: has the host tier if
    host_gb is 0."""
    if host_gb:
        ratio = host_gb * GB / (pools.tokens * pools.bytes_per_token + pools.states * pools.bytes_per_state)
    else:
        assert recorded is not None
        ratio = recorded.host_tokens / recorded.tokens
    tokens = int(ratio * pools.tokens)
    return msgspec.structs.replace(
        pools,
        host_tokens=max(pools.page_size, tokens - tokens % pools.page_size),
        host_states=max(1, int(ratio * pools.states)) if pools.states else 0,
    )


def with_recorded_bytes(model: ModelSizes, recorded: PoolSizes) -> ModelSizes:
    """The model, with KV and states of the sizes that a trace says."""
    return msgspec.structs.replace(
        model,
        bytes_per_token=recorded.bytes_per_token,
        window=recorded.window,
        bytes_per_window_token=recorded.bytes_per_window_token,
        bytes_per_state=recorded.bytes_per_state,
    )


def _settings(config: SchedulerConfig, window_ratio: float) -> MemorySettings:
    return MemorySettings(
        mem_fraction_static=MEMORY_SHARE,
        context_length=max(LEAST_CONTEXT, min(config.context_length, config.step_tokens)),
        num_rows=config.num_rows,
        page_size=config.page_size,
        chunked_prefill_size=config.step_tokens,
        window_ratio=window_ratio,
    )


def _fit(card: Card, model: ModelSizes, settings: MemorySettings, window: int) -> tuple[int, int, int]:
    """(tokens, states, tokens of the window pool) that fit beside the weights. Raises CostError if there is no room."""
    try:
        plan = plan_memory(
            settings,
            available=int(card.memory),
            weight_bytes=model.weight_bytes,
            bytes_per_token=model.bytes_per_token,
            bytes_per_state=model.bytes_per_state,
            bytes_per_window_token=model.bytes_per_window_token,
            window=window,
            is_cpu=False,
        )
    except ModelLoadError:
        room = max(0, int(card.memory * MEMORY_SHARE) - model.weight_bytes)
        states = f", recurrent states of {model.bytes_per_state / 1e6:.1f} MB" if model.bytes_per_state else ""
        raise CostError(
            f"{model.name} has {model.weight_bytes / GB:.1f} GB of weights; {MEMORY_SHARE:g} of {card.name}'s "
            f"{card.memory / GB:.0f} GB leaves {room / GB:.1f} GB for KV of "
            f"{model.bytes_per_token + model.bytes_per_window_token} bytes a token{states}: not enough. Choose a "
            "larger card or a smaller model, or lower --pool-tokens and --max-states if they are given"
        ) from None
    return plan.kv_tokens, plan.num_states, plan.window_tokens
