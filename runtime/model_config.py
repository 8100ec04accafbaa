"""Sizes and constants of a model, and how its architecture differs from others. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from ..scheduler.request_spec import PoolingKind

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh")
"""Activations of a gate, by their names in config.json."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of a layer; ``layers/rotary.py`` has the formulas.

    rope_type: default; linear: all frequencies divided by factor. llama3: low frequencies divided by factor, high ones
    kept, a ramp between (low_freq_factor, high_freq_factor, in turns over original_max_position_embeddings). yarn: the
    same with a ramp over the pairs, between those that turn beta_slow and beta_fast times. longrope: each frequency
    divided by its own of ``factors``.
    """

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    """Cosines and sines are multiplied by it."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: the ends of the ramp are whole pairs."""
    factors: tuple[float, ...] = ()
    """longrope: one for each pair."""
    partial: float = 1.0
    """Share of each head's coordinates that is rotated, the first ones."""


@dataclass(frozen=True, kw_only=True)
class NormNames:
    """The layer's norms, by their names in a checkpoint; None: there is no such norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


class Choice(Enum):
    """How a router makes scores of its logits."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    LOGITS = "logits"
    """The largest logits are chosen, and their weights are the softmax over those."""
    GATES = "gates"
    """The largest logits are chosen, and each one's sigmoid multiplies what its expert reads (Llama 4)."""


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Names in a checkpoint, all below the layer's ``block``."""

    block: str = "mlp"
    router: str = "gate"
    router_bias: bool = False
    correction: str | None = None
    """A number for each expert that is added to its score when experts are chosen, not when they are weighed."""
    correction_is_row: bool = False
    single: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of each expert's projections."""
    packed: tuple[str, str] | None = None
    """Instead, one tensor each for gate and up, and for down, of all experts."""
    is_transposed: bool = False
    """The packed tensors are [experts, in, out]."""
    shared: str | None = None
    """An MLP that all tokens use."""
    shared_gate: str | None = None
    """Its output is multiplied by the sigmoid of this projection."""


@dataclass(frozen=True, kw_only=True)
class ExpertTraits:
    """A mixture of experts in place of the MLP; see `layers/experts.py`.

    is_sparse: per layer, whether it has experts. intermediate_size: of each expert; shared_size: of the shared one.
    renormalises: the chosen weights are divided by their sum. weight_scale: they are multiplied by it.
    num_groups, top_groups: experts are chosen from the best groups only, those with the largest sum of their
    ``group_best`` best scores.
    routes_in_float32: the router's logits are computed in float32.
    has_bias: experts have biases. clamp: (alpha, limit) of a clamped SwiGLU in place of the model's activation.
    """

    is_sparse: tuple[bool, ...]
    num_experts: int
    top_k: int
    intermediate_size: int
    shared_size: int = 0
    choice: Choice = Choice.SOFTMAX
    renormalises: bool = True
    weight_scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    routes_in_float32: bool = False
    has_bias: bool = False
    clamp: tuple[float, float] | None = None
    names: ExpertNames = field(default_factory=ExpertNames)


@dataclass(frozen=True, kw_only=True)
class PositionScale:
    """q is multiplied by 1 + beta × ln(1 + ⌊(position + offset) / length⌋), in all layers, or only in those that rotate
    nothing."""

    beta: float
    length: int
    offset: int = 0
    unrotated_only: bool = False


@dataclass(frozen=True, kw_only=True)
class LatentTraits:
    """Multi-head latent attention; see `models/latent_attention.py`. Sizes in numbers.

    query_rank: of the latent that queries are made of; None: they are made of the input itself.
    latent_size: of the latent that keys and values are made of, which is what a token keeps.
    plain_size, rotary_size: of a head of q and k, the parts without and with rotary embedding.
    value_size: of a head of v.
    """

    query_rank: int | None
    latent_size: int
    plain_size: int
    rotary_size: int
    value_size: int

    @property
    def key_size(self) -> int:
        """What the KV pool keeps of a token in a layer."""
        return self.latent_size + self.rotary_size


class Mixer(Enum):
    """What a layer mixes the tokens of a sequence with."""

    ATTENTION = "attention"
    RECURRENT = "recurrent"
    """A layer with a state, as ``DecoderTraits.recurrent`` describes it."""
    BOTH = "both"
    """The two side by side, their results summed (Falcon-H1)."""
    NONE = "none"
    """The layer is an MLP alone (Nemotron-H)."""


@dataclass(frozen=True, kw_only=True)
class ShortConvTraits:
    """Gated short convolutions; see `models/short_conv.py`. kernel: tokens that one sees; bias: of all its parts."""

    kernel: int
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class GatedDeltaTraits:
    """A gated delta net; see `models/gated_delta_net.py`.

    kernel: tokens that its convolution sees. has_grouped_inputs: the checkpoint holds its input projections as two
    matrices, their outputs grouped by key head (Qwen3-Next), not as four.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int
    has_grouped_inputs: bool = False


@dataclass(frozen=True, kw_only=True)
class Mamba2Traits:
    """Mamba 2; see `models/mamba2.py`.

    kernel: tokens that its convolution sees. bias, out_bias, conv_bias: of the projections to and from the scan, and of
    the convolution. limits: of a step's length. norm_groups: parts of a token's numbers that
    are normed each by itself; 0: there is a gate and no norm. norms_first: the norm comes before the gate. input_scale,
    part_scales, output_scale: factors of the input, of its projections to z, x, B, C and Δ, and of the output.
    """

    heads: int
    head_size: int
    groups: int
    state_size: int
    kernel: int
    bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    limits: tuple[float, float] = (0.0, float("inf"))
    norm_groups: int = 1
    norms_first: bool = False
    input_scale: float = 1.0
    part_scales: tuple[float, ...] = (1.0,) * 5
    output_scale: float = 1.0


RecurrentTraits = ShortConvTraits | GatedDeltaTraits | Mamba2Traits


@dataclass(frozen=True, kw_only=True)
class DecoderTraits:
    """How an architecture differs from the others that share `models/decoder.py`.

    layer_windows: per layer, how many tokens a query sees, itself included; None: all. Layers without attention have
    an entry, too.
    mixers: per layer, what mixes tokens; empty: attention in all layers. recurrent: the layers with a state, and
    recurrent_name, their name in a checkpoint. has_mlp: per layer; empty: in all layers.
    layer_chunks: per layer, the size of the chunks beyond which a query sees nothing; None, or empty: no chunks.
    layer_kinds: per layer, the name under which rope_parameters has its rotary embedding, where layers differ in it.
    rotates: per layer, whether q and k are rotated at all; empty: in all layers.
    qkv_bias, o_bias, mlp_bias: these projections add a bias.
    qk_norm: RMSNorm over each head of q and k, before the rotary embedding.
    qk_unit_norm: RMSNorm over each head of q and k without a weight, in layers that rotate them.
    qk_row_norm: RMSNorm over all of q, and over all of k, before the rotary embedding.
    partial_rotary: share of each head that is rotated, if the config does not say; None: this cannot be changed.
    is_interleaved: neighbouring coordinates rotate together, instead of those of the two halves.
    has_fused_qkv, has_fused_gate_up: the checkpoint holds these projections as one matrix.
    activation: of the gate, one of ACTIVATIONS; None: the config's hidden_act.
    ties_by_default: the LM head is the embedding if the config does not say.
    mlp_name, dense_size: of the MLP in a checkpoint, and its size in layers without experts; 0: intermediate_size.
    experts: a mixture of experts in some layers.
    latent: attention over latents, in all layers; qkv_bias is then of the projections to latents.
    has_sinks: each head has a learned score that takes a share of the attention weights.
    norms: where the layer has norms. norm_offset: is added to the weights of norms, also those of q and k.
    embedding_multiplier, residual_multiplier, logit_multiplier: scale embeddings, what a layer adds, and logits.
    logit_cap: logits are cap × tanh(logits / cap); None: as they are.
    attention_scale: of the scores; None: head_dim ** -0.5. attention_cap: soft cap of the scores.
    position_scale: of queries. output_gate: the q projection also makes a gate for each number of attention's output.
    attention_input_scale, attention_output_scale: factors of what attention reads and of what it returns; mlp_scales:
    of the MLP's gate and of its output. plain_mlp: the MLP has no gate, and this activation.
    renames: (part of a tensor's name as it is here, that part in a checkpoint), applied in order.
    """

    layer_windows: tuple[int | None, ...]
    mixers: tuple[Mixer, ...] = ()
    recurrent: RecurrentTraits | None = None
    recurrent_name: str = ""
    has_mlp: tuple[bool, ...] = ()
    layer_chunks: tuple[int | None, ...] = ()
    layer_kinds: tuple[str, ...] = ()
    rotates: tuple[bool, ...] = ()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_unit_norm: bool = False
    qk_row_norm: bool = False
    partial_rotary: float | None = None
    is_interleaved: bool = False
    has_fused_qkv: bool = False
    has_fused_gate_up: bool = False
    activation: str | None = None
    ties_by_default: bool = False
    mlp_name: str = "mlp"
    dense_size: int = 0
    experts: ExpertTraits | None = None
    latent: LatentTraits | None = None
    has_sinks: bool = False
    norms: NormNames = field(default_factory=NormNames)
    norm_offset: float = 0.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_cap: float | None = None
    attention_scale: float | None = None
    attention_cap: float | None = None
    position_scale: PositionScale | None = None
    output_gate: bool = False
    attention_input_scale: float = 1.0
    attention_output_scale: float = 1.0
    mlp_scales: tuple[float, float] = (1.0, 1.0)
    plain_mlp: str | None = None
    renames: tuple[tuple[str, str], ...] = ()

    def mixer(self, layer_id: int) -> Mixer:
        return self.mixers[layer_id] if self.mixers else Mixer.ATTENTION

    def has_attention(self, layer_id: int) -> bool:
        return self.mixer(layer_id) in (Mixer.ATTENTION, Mixer.BOTH)

    @property
    def uses_states(self) -> bool:
        """True if layers call operations of `StateOps`."""
        return self.recurrent is not None or self.output_gate

    @property
    def needs_torch(self) -> bool:
        """True if a layer calls torch beside `Ops`, `StateOps` and its products, so that its steps cannot be
        recorded."""
        return (
            self.qk_row_norm
            or self.position_scale is not None
            or self.experts is not None
            or self.latent is not None
            or self.embedding_multiplier != 1
            or self.residual_multiplier != 1
            or self.plain_mlp is not None
            or Mixer.BOTH in self.mixers
        )


HeadKind = Literal["language", "labels", "none"]
"""What stands on the decoder: logits of the next token; logits of classes; nothing, as in models that only embed."""

LabelActivation = Literal["softmax", "sigmoid", "none"]
"""What turns the logits of classes into their scores."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """How a prompt becomes an embedding, as the checkpoint has it.

    is_embedder: the checkpoint says so itself, with the files of sentence-transformers. normalizes: the vector is
    divided by its length. refusal: why this model's embeddings cannot be computed; "" if they can.
    """

    is_embedder: bool = False
    pooling: PoolingKind = "last"
    normalizes: bool = True
    refusal: str = ""


@dataclass(frozen=True, kw_only=True)
class ServedConfig:
    """What a server needs to know of a model, whatever computes it. Sizes in elements, lengths in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    dtype: str
    """The checkpoint's: float32, float16 or bfloat16."""
    context_length: int
    """Longest prompt + output that is served; at most max_position_embeddings."""
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Tokens that end an output; empty if the files name none."""
    fingerprint: str = ""
    """Whatever else determines what is computed, as text."""
    head: HeadKind = "language"
    labels: tuple[str, ...] = ()
    """Names of the classes, where the head is one of labels."""
    label_activation: LabelActivation = "softmax"
    embedding: EmbeddingConfig = EmbeddingConfig()


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ServedConfig):
    """Shape and constants of a decoder that `models/decoder.py` computes."""

    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """With latent attention, of the rotated part."""
    rms_norm_eps: float
    activation: str
    """Activation of the gate, one of ACTIVATIONS."""
    ropes: tuple[RopeConfig | None, ...]
    """Rotary embedding of each layer; None where q and k are not rotated."""
    traits: DecoderTraits
    tie_word_embeddings: bool

    def position_scale(self, layer_id: int) -> PositionScale | None:
        """How a layer scales its queries by position; None if no position within the context is scaled."""
        scale = self.traits.position_scale
        if scale is None or self.context_length + scale.offset <= scale.length:
            return None
        return scale if self.ropes[layer_id] is None or not scale.unrotated_only else None
