"""The duration of a step in seconds, from the amount that it computes and reads.

There are two models. `Roofline` takes a card's data sheet and a model's sizes: the larger of compute and memory time,
plus the host's time. `Linear` takes measured figures (`read_cost_file`):

    seconds = fixed + prompt tokens × a + decode rows × b + context tokens read × c

The shares of a card's peak below are assumptions; docs/simulator.md compares them with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

GB = 1e9


@dataclass(frozen=True, slots=True)
class Card:
    """One accelerator, by its data sheet. Bandwidths in bytes/s."""

    name: str
    memory: float
    """bytes"""
    bandwidth: float
    flops: float
    """Dense 16-bit tensor FLOP/s."""
    host_bandwidth: float
    """Bytes/s that copies reach between the card and pinned host memory, in one direction."""


CARDS = {
    card.name: card
    for card in (
        Card("RTX6000", 24 * GB, 672 * GB, 130.5e12, 12.5 * GB),  # Turing, PCIe 3
        Card("A100-40", 40 * GB, 1555 * GB, 312e12, 20 * GB),  # PCIe 4
        Card("L40S", 48 * GB, 864 * GB, 362e12, 20 * GB),
        Card("H100", 80 * GB, 3350 * GB, 989e12, 50 * GB),  # SXM, PCIe 5
        Card("H200", 141 * GB, 4800 * GB, 989e12, 50 * GB),
    )
}


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """What a model costs, in bytes and numbers."""

    name: str
    layers: int
    body_parameters: int
    """Parameters of the layers, which every token is multiplied with; of experts, those that a token uses."""
    head_parameters: int
    weight_bytes: int
    """In the card's memory."""
    read_bytes: int
    """Weights that every step reads: no embedding, no experts."""
    expert_bytes: int = 0
    """Weights of all experts."""
    expert_share: float = 0.0
    """Share of the experts that a token uses."""
    pair_products: int
    """Products for each pair of a new token and a token that it attends to, in layers that see all tokens."""
    bytes_per_token: int
    """K and V, or latents, in these layers."""
    window: int = 0
    """Tokens that layers with a sliding window see; 0 without such layers."""
    window_pair_products: int = 0
    bytes_per_window_token: int = 0
    bytes_per_state: int = 0
    """Recurrent states of a sequence; 0 without such layers."""
    has_latents: bool = False

    def weights_read(self, tokens: int) -> float:
        """Bytes of weights that a step of so many new tokens reads, each of which chooses its experts by chance."""
        return self.read_bytes + self.expert_bytes * (1 - (1 - self.expert_share) ** tokens)


def dense_model(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    vocabulary: int,
    *,
    tied: bool = False,
) -> ModelSizes:
    """A dense decoder with grouped-query attention and a gated MLP, in 16 bits. tied: the head is the embedding."""
    body = layers * (hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * intermediate)
    head = vocabulary * hidden
    return ModelSizes(
        name=name,
        layers=layers,
        body_parameters=body,
        head_parameters=head,
        weight_bytes=2 * (body + head * (1 if tied else 2)),
        read_bytes=2 * (body + head),
        pair_products=2 * layers * heads * head_dim,
        bytes_per_token=2 * 2 * layers * kv_heads * head_dim,
    )


MODELS = {
    model.name: model
    for model in (
        dense_model("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, tied=True),
        dense_model("llama-3.2-3b", 28, 3072, 24, 8, 128, 8192, 128256, tied=True),
        dense_model("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064),
        dense_model("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        dense_model("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936),
        dense_model("qwen2.5-14b", 48, 5120, 40, 8, 128, 13824, 152064),
        dense_model("qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, 152064),
    )
}


class StepSize(NamedTuple):
    """The work of one step."""

    prompt_tokens: int
    """New tokens of prompts."""
    decode_rows: int
    """Rows with one new token each."""
    context: int
    """Tokens of KV read by all rows together; each row reads its own once."""
    attended: int
    """(new token, token it attends to) pairs."""
    prompt_rows: int = 0
    window_context: int = 0
    """As ``context``, of layers with a sliding window."""
    window_attended: int = 0
    """As ``attended``, likewise."""

    @property
    def new_tokens(self) -> int:
        return self.prompt_tokens + self.decode_rows

    @property
    def rows(self) -> int:
        return self.prompt_rows + self.decode_rows


class StepCost(Protocol):
    @property
    def layers(self) -> int:
        """Number of layers: a step waits for a load layer by layer."""
        ...

    @property
    def window(self) -> int:
        """Tokens that layers with a sliding window see; 0 if what these read is not to be counted by itself."""
        ...

    def step_s(self, step: StepSize) -> float: ...

    def load_s(self, tokens: int, states: int = 0) -> float:
        """Seconds to copy the KV of so many tokens, and so many recurrent states, from the host to the device."""
        ...

    def store_s(self, tokens: int, states: int = 0) -> float: ...


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a card's peak that steps reach, and the host's time."""

    compute: float = 0.6
    memory: float = 0.88
    """4.24 TB/s of an H200's 4.8 were measured."""
    host_step_s: float = 0.0015
    """For each step."""
    host_row_s: float = 2e-5
    """For each row of a step."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """A `StepCost` from a card and a model."""

    card: Card
    model: ModelSizes
    efficiency: Efficiency = Efficiency()

    @property
    def layers(self) -> int:
        return self.model.layers

    @property
    def window(self) -> int:
        return self.model.window

    def step_s(self, step: StepSize) -> float:
        model, efficiency = self.model, self.efficiency
        products = model.body_parameters * step.new_tokens + model.head_parameters * step.rows
        pairs = model.pair_products * step.attended + model.window_pair_products * step.window_attended
        compute = 2 * (products + pairs) / (self.card.flops * efficiency.compute)
        kv = model.bytes_per_token * step.context + model.bytes_per_window_token * step.window_context
        states = 2 * model.bytes_per_state * step.rows  # each row reads its state and writes the next one
        read = model.weights_read(step.new_tokens) + kv + states
        memory = read / (self.card.bandwidth * efficiency.memory)
        return max(compute, memory) + efficiency.host_step_s + efficiency.host_row_s * step.rows

    def load_s(self, tokens: int, states: int = 0) -> float:
        """With a host tier all layers share one pool."""
        model = self.model
        size = tokens * (model.bytes_per_token + model.bytes_per_window_token) + states * model.bytes_per_state
        return size / self.card.host_bandwidth

    def store_s(self, tokens: int, states: int = 0) -> float:
        return self.load_s(tokens, states)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A `StepCost` from measured figures, all in seconds."""

    fixed_s: float
    prompt_token_s: float
    decode_row_s: float
    context_token_s: float
    prompt_row_s: float = 0.0
    """For each prompt in a step, whatever its length; includes the costs of its request outside the model."""
    attended_s: float = 0.0
    """For each pair of a new token and a token that it attends to."""
    load_token_s: float = 0.0
    store_token_s: float = 0.0
    load_state_s: float = 0.0
    """For each recurrent state."""
    store_state_s: float = 0.0
    layers: int = 1

    @property
    def window(self) -> int:
        return 0

    def step_s(self, step: StepSize) -> float:
        return (
            self.fixed_s
            + self.prompt_token_s * step.prompt_tokens
            + self.decode_row_s * step.decode_rows
            + self.context_token_s * step.context
            + self.prompt_row_s * step.prompt_rows
            + self.attended_s * step.attended
        )

    def load_s(self, tokens: int, states: int = 0) -> float:
        return self.load_token_s * tokens + self.load_state_s * states

    def store_s(self, tokens: int, states: int = 0) -> float:
        return self.store_token_s * tokens + self.store_state_s * states


class CostError(ValueError):
    """A card, a model or a file of costs cannot be used; the message says what to change."""


def read_cost_file(path: Path) -> Linear:
    """A file of measured costs: one JSON object with the fields of `Linear`. Raises CostError."""
    try:
        found: Any = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise CostError(f"{path}: {error}; it should be a JSON object of measured costs") from error
    if not isinstance(found, dict):
        raise CostError(f"{path}: it should be a JSON object, not {type(found).__name__}")
    known = {field.name: field.default for field in fields(Linear)}
    for name, value in found.items():
        if name not in known:
            raise CostError(f"{path}: unknown field {name!r}; the fields are {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise CostError(f"{path}: {name} is {value!r}; it should be a number of at least 0")
    missing = [name for name in ("fixed_s", "prompt_token_s", "decode_row_s", "context_token_s") if name not in found]
    if missing:
        raise CostError(f"{path}: {', '.join(missing)} missing")
    if not found["fixed_s"] + min(found["prompt_token_s"], found["decode_row_s"]) > 0:
        raise CostError(f"{path}: a step would take no time; fixed_s, or both token costs, must be above 0")
    layers = found.get("layers", 1)
    if layers != int(layers) or layers < 1:
        raise CostError(f"{path}: layers is {layers!r}; it should be a whole number of at least 1")
    return Linear(**found | {"layers": int(layers)})


def fill_by_computing_s(cost: StepCost, tokens: int, chunk: int = 2048) -> float:
    """T_fill: seconds to compute the KV of a pool of ``tokens``, in prompts of one chunk."""
    return tokens / chunk * cost.step_s(StepSize(chunk, 0, chunk, chunk * (chunk + 1) // 2, 1))
