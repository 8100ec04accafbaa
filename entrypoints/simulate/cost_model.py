"""The duration of a step in seconds, from the amount that it computes and reads.

There are two models. `Roofline` takes a card's data sheet and a model's shape: the larger of compute and memory time,
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


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder with grouped-query attention and a gated MLP, in 16 bits."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = False

    BYTES = 2

    @property
    def body_parameters(self) -> int:
        """Parameters of the layers, which every token is multiplied with."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def weight_bytes(self) -> int:
        return self.BYTES * (self.body_parameters + self.head_parameters * (1 if self.tied else 2))

    @property
    def kv_bytes_per_token(self) -> int:
        return self.BYTES * 2 * self.layers * self.kv_heads * self.head_dim


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, tied=True),
        ModelShape("llama-3.2-3b", 28, 3072, 24, 8, 128, 8192, 128256, tied=True),
        ModelShape("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064),
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936),
        ModelShape("qwen2.5-14b", 48, 5120, 40, 8, 128, 13824, 152064),
        ModelShape("qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, 152064),
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


class StepCost(Protocol):
    @property
    def layers(self) -> int:
        """Number of layers: a step waits for a load layer by layer."""
        ...

    def step_s(self, step: StepSize) -> float: ...

    def load_s(self, tokens: int) -> float:
        """Seconds to copy the KV of so many tokens from the host to the device."""
        ...

    def store_s(self, tokens: int) -> float: ...


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
    model: ModelShape
    efficiency: Efficiency = Efficiency()

    @property
    def layers(self) -> int:
        return self.model.layers

    def step_s(self, step: StepSize) -> float:
        model, efficiency = self.model, self.efficiency
        rows = step.decode_rows + step.prompt_rows
        products = model.body_parameters * (step.prompt_tokens + step.decode_rows) + model.head_parameters * rows
        pairs = 2 * model.layers * model.heads * model.head_dim * step.attended
        compute = 2 * (products + pairs) / (self.card.flops * efficiency.compute)
        weights = model.BYTES * (model.body_parameters + model.head_parameters)
        memory = (weights + model.kv_bytes_per_token * step.context) / (self.card.bandwidth * efficiency.memory)
        return max(compute, memory) + efficiency.host_step_s + efficiency.host_row_s * rows

    def load_s(self, tokens: int) -> float:
        return tokens * self.model.kv_bytes_per_token / self.card.host_bandwidth

    def store_s(self, tokens: int) -> float:
        return self.load_s(tokens)


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
    layers: int = 1

    def step_s(self, step: StepSize) -> float:
        return (
            self.fixed_s
            + self.prompt_token_s * step.prompt_tokens
            + self.decode_row_s * step.decode_rows
            + self.context_token_s * step.context
            + self.prompt_row_s * step.prompt_rows
            + self.attended_s * step.attended
        )

    def load_s(self, tokens: int) -> float:
        return self.load_token_s * tokens

    def store_s(self, tokens: int) -> float:
        return self.store_token_s * tokens


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


def pool_tokens(card: Card, model: ModelShape, share: float = 0.9) -> int:
    """Tokens of KV that fit beside the weights in ``share`` of the card's memory. Raises CostError if there is no
    room."""
    room = card.memory * share - model.weight_bytes
    tokens = int(room / model.kv_bytes_per_token)
    if tokens < 1024:
        raise CostError(
            f"{model.name} has {model.weight_bytes / GB:.1f} GB of weights; {share:g} of {card.name}'s "
            f"{card.memory / GB:.0f} GB leaves room for {max(0, tokens)} tokens of KV. Choose a larger card or a "
            "smaller model"
        )
    return tokens


def fill_by_computing_s(cost: StepCost, tokens: int, chunk: int = 2048) -> float:
    """T_fill: seconds to compute the KV of a pool of ``tokens``, in prompts of one chunk."""
    return tokens / chunk * cost.step_s(StepSize(chunk, 0, chunk, chunk * (chunk + 1) // 2, 1))
