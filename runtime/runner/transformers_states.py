"""The recurrent states of models that transformers computes.

    transformers' layers ──hidden──▶ StateLayer: a step's segments ──▶ forward of transformers' own mixer
                                       ▲ slots                           ▲
                                       └─▶ StatePool ◀── SegmentStates ──┘ in place of a cache

A *mixer* is a module that keeps states: a gated delta net, a Mamba, a short convolution. Its forward takes rows of
equal length and a cache that holds their states. Here it is called with a wave's rows of one token together, and with
every longer segment alone; in place of a cache it finds the states of the slots that these start from. What it leaves
there is written to their targets.

Which modules are mixers is read off their code: they call ``update_conv_state`` or ``update_recurrent_state``. What
they keep is found out by a trace, in which a cache notes what they put into it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ...memory_pool.state_pool import StateShape, StateTensor
from ..checkpoint.model_files import UnsupportedModelError
from ..layers.states.state_batch import StateBatch, Wave

CACHE_NAMES = ("cache_params", "past_key_values")
"""Parameters of a mixer's forward that take the cache."""


class TracedStates:
    """A cache without states, which notes what one mixer puts into it."""

    def __init__(self, name: str) -> None:
        """name: of the mixer, for errors."""
        self._name = name
        self.shape: dict[str, StateTensor] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(
        self, x: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> torch.Tensor:
        """x: [1, channels, tokens]. Raises UnsupportedModelError if the mixer does not say how many inputs it needs."""
        if conv_kernel_size is None:
            raise UnsupportedModelError(f"{self._name} does not say how many inputs its convolution reads")
        self.shape[_name("conv", state_idx)] = StateTensor((conv_kernel_size - 1, *x.shape[1:-1]), x.dtype)
        return x

    def update_recurrent_state(self, state: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """state: [1, …]"""
        self.shape[_name("recurrent", state_idx)] = StateTensor(tuple(state.shape[1:]), state.dtype)
        return state

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


class SegmentStates:
    """Stands for transformers' cache in the calls of one mixer for some rows: each starts from its state, or all begin.

    tensors: by name, [rows, …], as the pool keeps them. A mixer may change what it is given in place, or put something
    else there; either way they are those after its last token.
    """

    def __init__(self, shape: StateShape, tensors: dict[str, torch.Tensor] | None) -> None:
        """tensors: copies of the rows' states; None for rows that begin."""
        self._shape = shape
        self.tensors = tensors or {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """[rows, channels, inputs], a view; None for rows that begin."""
        inputs = self.tensors.get(_name("conv", state_idx))
        return None if inputs is None else inputs.movedim(1, -1)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """[rows, …]; None for rows that begin."""
        return self.tensors.get(_name("recurrent", state_idx))

    def update_conv_state(self, x: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """x: [rows, channels, tokens]. Returns the inputs before it, if any, and x."""
        name, before = _name("conv", state_idx), self.get_conv_state(layer_idx, state_idx)
        if before is not None:
            x = torch.cat((before, x), dim=-1)
        surplus = x.shape[-1] - self._shape[name].shape[0]
        kept = x[..., surplus:] if surplus >= 0 else F.pad(x, (-surplus, 0))
        self.tensors[name] = kept.movedim(-1, 1)
        return x

    def update_recurrent_state(self, state: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """state: [rows, …]"""
        self.tensors[_name("recurrent", state_idx)] = state
        return state

    def is_recording_past(self, layer_idx: int) -> bool:
        """See transformers' Cache: a state that could be cut back. None can."""
        return False


class StateLayer:
    """One mixer of a model. Its module computes with the states of a step once `take_over` was called."""

    def __init__(self, mixer: torch.nn.Module, number: int, shape: StateShape, hidden: torch.Tensor) -> None:
        """number: of the layer, among those with states. hidden: [1, 1, size], something to try the mixer with."""
        self.number = number
        self.shape = shape
        self._cache_name = _cache_name(mixer)
        self._mixer = mixer
        self._forward: Callable[..., torch.Tensor] = mixer.forward
        self.one_by_one = self._forgets(hidden)
        """Tokens that continue a state are computed each by itself."""

    def take_over(self, states: Callable[[], StateBatch]) -> None:
        """states: those of the step that is being computed."""

        def forward(hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
            others.pop("position_ids", None)  # some layers hand on whatever they get
            if any(isinstance(other, torch.Tensor) for other in others.values()):
                raise TypeError(f"{type(self._mixer).__name__} takes tensors beside the hidden states")
            return self._compute(hidden_states[0], states())[None]

        self._mixer.forward = forward

    def _forgets(self, hidden: torch.Tensor) -> bool:
        """True if the mixer starts several tokens from zeros, whatever state it is given (transformers' Mamba 1)."""
        after = []
        for fill in (0, 1):
            before = {
                name: torch.full((1, *kept.shape), fill * name.startswith("recurrent"), dtype=kept.dtype).to(
                    hidden.device
                )
                for name, kept in self.shape.items()
            }
            states = SegmentStates(self.shape, before)
            self._forward(hidden.repeat(1, 2, 1), **{self._cache_name: states})
            after.append([kept for name, kept in states.tensors.items() if name.startswith("recurrent")])
        return bool(after[0]) and all(map(torch.equal, *after))

    def _compute(self, hidden: torch.Tensor, states: StateBatch) -> torch.Tensor:
        """[tokens, size] of a step -> the same"""
        pool, out = states.pool.layers[self.number], torch.empty_like(hidden)
        for wave in states.waves:
            singles = np.flatnonzero((wave.stops - wave.starts == 1) & ~wave.begins)
            if len(singles):
                rows = torch.from_numpy(singles).to(hidden.device)
                tokens = torch.from_numpy(wave.starts[singles]).to(hidden.device)
                found = self._call(
                    hidden.index_select(0, tokens)[:, None], pool, wave.sources[rows], wave.targets[rows]
                )
                out.index_copy_(0, tokens, found[:, 0])
            for row in np.setdiff1d(np.arange(len(wave.starts)), singles).tolist():
                self._compute_alone(hidden, pool, wave, row, out)
        return out

    def _compute_alone(
        self, hidden: torch.Tensor, pool: Mapping[str, torch.Tensor], wave: Wave, row: int, out: torch.Tensor
    ) -> None:
        tokens = slice(int(wave.starts[row]), int(wave.stops[row]))
        source = None if wave.begins[row] else wave.sources[row : row + 1]
        out[tokens] = self._call(hidden[tokens][None], pool, source, wave.targets[row : row + 1])[0]

    def _call(
        self,
        hidden: torch.Tensor,
        pool: Mapping[str, torch.Tensor],
        sources: torch.Tensor | None,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        """hidden: [rows, tokens, size]. sources, targets: int64 [rows], slots; None: the rows begin."""
        before = None if sources is None else {name: kept.index_select(0, sources) for name, kept in pool.items()}
        states = SegmentStates(self.shape, before)
        pieces = hidden.split(1, dim=1) if self.one_by_one and before is not None else [hidden]
        found = [self._forward(piece, **{self._cache_name: states}) for piece in pieces]
        for name, kept in pool.items():
            kept.index_copy_(0, targets, states.tensors[name].to(kept.dtype))
        return torch.cat(found, dim=1)


def find_mixers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules that keep states, by name."""
    return {name: module for name, module in model.named_modules() if _keeps_states(module)}


def trace_states(model: torch.nn.Module, run: Callable[[], None]) -> list[StateLayer]:
    """The mixers of a model, in the order in which it computes them. run: computes one token, and nothing of a cache.

    Raises whatever ``run`` raises, and UnsupportedModelError for a mixer whose states cannot be kept."""
    found: list[tuple[torch.nn.Module, TracedStates, torch.Tensor]] = []

    def give(mixer: torch.nn.Module, inputs: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        name = type(mixer).__name__
        if any(mixer is other for other, *_ in found):
            raise UnsupportedModelError(f"{name} keeps states for several layers")
        traced = TracedStates(name)
        found.append((mixer, traced, inputs[0] if inputs else given["hidden_states"]))
        return inputs, given | {_cache_name(mixer): traced}

    mixers = find_mixers(model).values()
    hooks = [mixer.register_forward_pre_hook(give, with_kwargs=True) for mixer in mixers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return [StateLayer(mixer, number, traced.shape, hidden) for number, (mixer, traced, hidden) in enumerate(found)]


def _keeps_states(module: torch.nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and bool({"update_conv_state", "update_recurrent_state"} & set(code.co_names))


def _cache_name(mixer: torch.nn.Module) -> str:
    """The parameter that takes the cache. Raises UnsupportedModelError if there is none."""
    for name in inspect.signature(mixer.forward).parameters:
        if name in CACHE_NAMES:
            return name
    raise UnsupportedModelError(f"{type(mixer).__name__} takes no cache under a known name")


def _name(kind: str, number: int) -> str:
    """The name of one of a layer's states."""
    return f"{kind}{number or ''}"
