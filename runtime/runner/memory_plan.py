"""Divides memory between weights, activations, CUDA graphs, recurrent states and the KV pool. Plain arithmetic without
torch: `memory_sizing` measures what there is.

The KV pool gets, on a CPU: mem_fraction_static × available host memory (within the cgroup limit) − weights, at most
CPU_POOL_LIMIT, as a host has other work. On a GPU: that share of the free memory − weights, or what a profile run
leaves of all of it, whichever is less:

    |-------------------------------- free before loading --------------------------------|
    |-- weights --|----------------- KV pool ----------------|-- activations --|- graphs -| MARGIN
    |------------- at most mem_fraction_static --------------|

Layers with a sliding window have a pool of their own beside it, with fewer tokens: as many as the rows need, and up to
WINDOW_RATIO of those of the KV pool. With f bytes per token in layers that see all tokens and w in those with a window,
one pool for both would hold B / (f + w) tokens in B bytes; the two hold at least B / (f + WINDOW_RATIO × w). Where five
of six layers have a window (Gemma 3), that is 3 times as many; where half have one (gpt-oss), 1.67 times, and never
more than twice.

Models with recurrent states have a pool of these in front of the KV pool: --max-states of them, or as many as the rows
need and up to STATE_SHARE of the memory for both. Where no layer keeps K and V, tokens take no memory, and the states
get all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...memory_pool.window_pages import least_tokens
from ..checkpoint.model_files import ModelLoadError

CPU_POOL_LIMIT = 4 * 2**30
"""Bytes. A larger pool on a CPU must be asked for with --max-total-tokens."""

MARGIN = 256 * 2**20
"""Bytes of a GPU left out of the plan: the driver takes some as it goes, and gaps between allocations waste some."""

STATE_SHARE = 0.4
"""Most of the memory for states and KV that states take, unless --max-states is set. There may be more than this only
where a model keeps no KV, or where `LEAST_STATES` take more."""
SMALL_SHARE = 0.05
"""States that fit in this share of it are worth having, however many: each is a prefix to resume from."""
STATES_PER_ROW = 4
"""A sequence needs up to three: of its last two steps, and of its last whole page. One more may stay in the tree."""
LEAST_STATES = 4
MOST_STATES = 1 << 16
SET_ASIDE = 2
"""States beside those that are handed out: zeros and trash."""

WINDOW_RATIO = 0.2
"""Most tokens of the pool for windows, by those of the KV pool, unless --swa-full-tokens-ratio is set or one request
needs more."""

MOST_TOKENS_WITHOUT_KV = 1 << 22
"""Tokens that the tree may remember for a model without KV. They take no memory on the device, but some on the host."""


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """The flags that decide about memory, so that errors can name them with their values."""

    mem_fraction_static: float
    context_length: int
    max_total_tokens: int = 0
    """0: sized from memory."""
    max_states: int = 0
    """0: sized from memory."""
    num_rows: int = 0
    """Sequences that run or are leased."""
    page_size: int = 1
    chunked_prefill_size: int = 0
    max_running_requests: int = 0
    cuda_graph_max_bs: int = 0
    """0: no graphs."""
    window_ratio: float = 0.0
    """Tokens of the pool for windows, by those of the KV pool; 0: as many as are needed."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """How memory is divided. All in bytes except kv_tokens (usable tokens; the padding page comes on top) and
    num_states."""

    weights: int
    activations: int
    graphs: int
    kv_tokens: int
    kv_bytes: int
    """Includes the padding page."""
    bytes_per_token: int
    free_left: int
    """The rest of what was available before loading."""
    num_states: int = 0
    """0 for a model without recurrent states."""
    state_bytes: int = 0
    """Includes the two that are not handed out."""
    bytes_per_state: int = 0
    window: int = 0
    """Tokens that a layer with a sliding window sees; 0 where these have no pool of their own."""
    window_tokens: int = 0
    window_bytes: int = 0
    """Includes the padding page."""
    bytes_per_window_token: int = 0

    def describe(self) -> str:
        """One line for the log."""
        states = f"{self.num_states} states × {self.bytes_per_state} bytes in {_gib(self.state_bytes)}, "
        windows = (
            f"windows of {self.window} tokens: {self.window_tokens} tokens × {self.bytes_per_window_token} bytes in "
            f"{_gib(self.window_bytes)}, "
        )
        return (
            f"memory: weights {_gib(self.weights)}, activations {_gib(self.activations)}, CUDA graphs "
            f"{_gib(self.graphs)}, {states if self.num_states else ''}KV {self.kv_tokens} tokens × "
            f"{self.bytes_per_token} bytes in {_gib(self.kv_bytes)}, {windows if self.window else ''}"
            f"{_gib(self.free_left)} left"
        )


def plan_memory(
    settings: MemorySettings,
    *,
    available: int,
    weight_bytes: int,
    bytes_per_token: int,
    is_cpu: bool,
    bytes_per_state: int = 0,
    bytes_per_window_token: int = 0,
    window: int = 0,
    activation_bytes: int = 0,
    graph_bytes: int = 0,
) -> MemoryPlan:
    """The KV pool gets a multiple of page_size tokens. available: bytes before the weights were loaded.
    bytes_per_token: 0 where no layer keeps K and V; without those of ``bytes_per_window_token``, of layers that see at
    most ``window`` tokens and may have a pool of their own. bytes_per_state: 0 for a model without recurrent states.

    Raises ModelLoadError if one request of context_length does not fit, or a requested pool exceeds the memory left.
    """
    page = settings.page_size
    share = int(available * settings.mem_fraction_static) - weight_bytes
    there = available - weight_bytes - activation_bytes - graph_bytes - (0 if is_cpu else MARGIN)
    others = f"weights take {_gib(weight_bytes)}"
    if activation_bytes or graph_bytes:
        others += f", activations {_gib(activation_bytes)}, CUDA graphs {_gib(graph_bytes)}"
    limit = min(there, CPU_POOL_LIMIT) if is_cpu else there
    states = state_bytes = 0
    if bytes_per_state:
        taken = f"{_gib(available)} was free, {others}"
        states = _plan_states(settings, share, limit, there, bytes_per_state, bytes_per_token, taken)
        state_bytes = (states + SET_ASIDE) * bytes_per_state
        others += f", {states} states {_gib(state_bytes)}"
        share, there = share - state_bytes, there - state_bytes
        limit = min(there, limit)
    windows = window_bytes = 0
    if bytes_per_window_token:
        budget = there if settings.max_total_tokens else min(share, limit)
        windows = _plan_windows(settings, budget, bytes_per_token, bytes_per_window_token, window)
    if windows:
        window_bytes = (windows + page) * bytes_per_window_token
        others += f", windows {_gib(window_bytes)}"
        share, limit, there = share - window_bytes, limit - window_bytes, there - window_bytes
    else:
        bytes_per_token += bytes_per_window_token
    if settings.max_total_tokens:
        tokens = _requested_tokens(settings, there, bytes_per_token, f"{_gib(available)} was free, {others}")
    elif not bytes_per_token:
        tokens = _tokens_without_kv(settings)
    else:
        # One page is set aside as the padding page.
        tokens = (max(min(share, limit), 0) // bytes_per_token // page - 1) * page
        if tokens < settings.context_length:
            raise ModelLoadError(
                f"the KV pool would hold {max(tokens, 0)} tokens, fewer than one request of the context length "
                f"({settings.context_length} tokens × {bytes_per_token} bytes = "
                f"{_gib(settings.context_length * bytes_per_token)}); {_gib(available)} was free, {others}. "
                + (_ask_for_more(settings, states) if share <= there else _reserve_less(settings))
            )
    kv_bytes = (tokens + page) * bytes_per_token
    return MemoryPlan(
        weights=weight_bytes,
        activations=activation_bytes,
        graphs=graph_bytes,
        kv_tokens=tokens,
        kv_bytes=kv_bytes,
        bytes_per_token=bytes_per_token,
        num_states=states,
        state_bytes=state_bytes,
        bytes_per_state=bytes_per_state,
        window=window if windows else 0,
        window_tokens=windows,
        window_bytes=window_bytes,
        bytes_per_window_token=bytes_per_window_token,
        free_left=available - weight_bytes - activation_bytes - graph_bytes - state_bytes - window_bytes - kv_bytes,
    )


def _plan_states(
    settings: MemorySettings,
    share: int,
    limit: int,
    there: int,
    bytes_per_state: int,
    bytes_per_token: int,
    taken: str,
) -> int:
    """States of the pool. share, limit: bytes that pools may take if no flag says otherwise; there: bytes that there
    are. Raises ModelLoadError if they do not fit."""
    budget, states = min(share, limit), settings.max_states
    if states:
        budget = there
    else:
        page = settings.page_size
        kv = (settings.max_total_tokens or (-(-settings.context_length // page) + 1) * page) * bytes_per_token
        room = (there if settings.max_total_tokens else budget) - kv
        most = min(room, int(budget * STATE_SHARE) if bytes_per_token else budget) // bytes_per_state - SET_ASIDE
        wanted = max(STATES_PER_ROW * settings.num_rows, int(budget * SMALL_SHARE) // bytes_per_state)
        states = max(LEAST_STATES, min(most, wanted, MOST_STATES))
    needed = (states + SET_ASIDE) * bytes_per_state
    if needed > budget:
        fitting = max(budget // bytes_per_state - SET_ASIDE, 0)
        advice = f"Lower --max-states to at most {fitting}" if settings.max_states else _ask_for_more(settings, states)
        raise ModelLoadError(
            f"{states} recurrent states and {SET_ASIDE} set aside × {bytes_per_state} bytes need {_gib(needed)}, but "
            f"{taken}. {advice}"
        )
    return states


def _plan_windows(
    settings: MemorySettings, budget: int, bytes_per_token: int, bytes_per_window_token: int, window: int
) -> int:
    """Tokens of a pool for layers with a window; 0 if one pool for all layers is as good. budget: bytes of both."""
    page, ratio = settings.page_size, settings.window_ratio or WINDOW_RATIO
    if settings.max_total_tokens:
        tokens = settings.max_total_tokens
    elif bytes_per_token:
        tokens = int(budget / (bytes_per_token + ratio * bytes_per_window_token))
    else:
        tokens = _tokens_without_kv(settings)
    if settings.window_ratio or bytes_per_token:
        windows = wanted_windows(settings, tokens, window)
    else:
        windows = budget // bytes_per_window_token - page
        windows -= windows % page
    if bytes_per_token and not settings.max_total_tokens:
        tokens = (budget - (windows + page) * bytes_per_window_token) // bytes_per_token - page
    return windows if least_windows(settings, window) <= windows < tokens else 0


def wanted_windows(settings: MemorySettings, kv_tokens: int, window: int) -> int:
    """Tokens that the pool for windows should have beside a KV pool of ``kv_tokens``; whole pages. One pool for all
    layers is as good if that has no more."""
    least, ratio = least_windows(settings, window), settings.window_ratio
    if ratio:
        windows = max(least, int(ratio * kv_tokens))
    else:
        chunk = _largest_chunk(settings)
        windows = max(least, min(settings.num_rows * (least - chunk) + chunk, int(WINDOW_RATIO * kv_tokens)))
    return windows - windows % settings.page_size


def least_windows(settings: MemorySettings, window: int) -> int:
    """Tokens of the pool for windows with which a request can run alone."""
    return least_tokens(window, settings.page_size, _largest_chunk(settings))


def _largest_chunk(settings: MemorySettings) -> int:
    return min(settings.chunked_prefill_size, settings.context_length)


def _tokens_without_kv(settings: MemorySettings) -> int:
    """Tokens of the KV pool where they take no memory."""
    wanted = min(max(settings.num_rows, 1) * settings.context_length, MOST_TOKENS_WITHOUT_KV)
    return -(-max(wanted, settings.context_length) // settings.page_size) * settings.page_size


def _requested_tokens(settings: MemorySettings, there: int, bytes_per_token: int, taken: str) -> int:
    requested, page = settings.max_total_tokens, settings.page_size
    tokens = requested // page * page
    if tokens < page:
        raise ModelLoadError(f"--max-total-tokens {requested} is less than one page (--page-size {page})")
    if tokens * bytes_per_token > there:
        raise ModelLoadError(
            f"--max-total-tokens {requested} needs {_gib(tokens * bytes_per_token)}, but {taken}; lower it to at most "
            f"{max(there, 0) // bytes_per_token}"
        )
    return tokens


def _ask_for_more(settings: MemorySettings, states: int = 0) -> str:
    fraction = settings.mem_fraction_static
    lower = f"Lower --context-length or --max-states ({states})" if states else "Lower --context-length"
    return f"{lower}, raise --mem-fraction-static ({fraction}), or set --max-total-tokens"


def _reserve_less(settings: MemorySettings) -> str:
    """Advice for when a larger share would not help, because the rest of the memory is taken."""
    ways = ["--context-length", f"--chunked-prefill-size ({settings.chunked_prefill_size})"]
    if settings.cuda_graph_max_bs:
        ways.append(f"--cuda-graph-max-bs ({settings.cuda_graph_max_bs})")
    return f"Lower {' or '.join(ways)}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
