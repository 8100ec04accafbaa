"""Chooses, at start, the layer ops, attention and CUDA graphs that fit the device, for the model runner.

CPU      Numba's ops and attention, if it is installed and they pass their probes; else torch. Nothing of CUDA is
         imported
CUDA     sglang-kernel and Triton ops, FlashInfer, graphs: each if it is installed and passes its probe; else torch,
         with one warning that says why and what to install
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ...attention import processor
from ...attention.backend import AttentionBackend, AttentionSpec
from ...attention.double_sparse import DoubleSparseBackend, ScoreLabels, Sparsity, is_sparse_layer
from ...attention.error_text import describe_error
from ...attention.latent import LatentBackend
from ...attention.numba_paged.compiling import NumbaMissingError
from ...attention.numba_paged.team import NoTeamError, Team
from ...attention.torch_native import TorchNativeBackend
from ...attention.windowed import open_windowed
from ...memory_pool.kv_pool import KVPool, WindowedKVPool
from ..checkpoint.model_files import ModelLoadError
from ..config import ModelArgs
from ..layers.embedding import LogitsProduct, widened_product
from ..layers.op_libraries import select_ops
from ..layers.ops import TORCH_OPS, Ops, OpShape
from ..layers.products import NUMBA, BlockKernel, PackedKernel
from ..layers.quantized_weights import WeightForm
from ..layers.states.ops import StateOps
from ..layers.states.selection import select_gpu_states, select_states
from ..layers.states.torch_states import TORCH_STATES
from ..model_config import GatedDeltaTraits, Mamba2Traits, ModelConfig, ShortConvTraits
from .cuda_graph import CudaRecorder, Recorder
from .module_standins import SizedOps

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class DeviceBackends:
    """Implementations that fit one device."""

    ops: Ops
    attention: Callable[[KVPool, Sequence[AttentionSpec]], AttentionBackend]
    recorder: Callable[[], Recorder] | None
    """None: no graphs."""
    any_tokens: bool = False
    """True if a graph depends on the number of tokens only, and takes little time and memory to make."""
    logits: LogitsProduct | None = None
    """None: the head's product is one of the others, and rounds to the model's dtype."""
    products: BlockKernel | None = None
    """None: no product has the form "numba"."""
    packed: PackedKernel | None = None
    """Multiplies by weights in few bits; None: they become floats when they are loaded."""
    sized_ops: SizedOps | None = None
    """Kernels for a model that transformers computes; None: torch."""
    sparsity: Sparsity | None = None
    """None: every decode is attended in full."""
    score_labels: ScoreLabels | None = None
    """For sparse decodes; None: torch."""
    states: StateOps = TORCH_STATES
    """Of layers with recurrent states."""

    def open_attention(self, pool: KVPool, specs: Sequence[AttentionSpec]) -> AttentionBackend:
        """The attention of a model over a pool."""
        if isinstance(pool, WindowedKVPool):
            return open_windowed(lambda some: self.attention(pool, some), specs, pool.window_layers)
        made = self.attention(pool, specs)
        if self.sparsity is not None:
            return DoubleSparseBackend(pool, made, self.sparsity, self.score_labels)
        return LatentBackend(pool, made) if any(spec.values_in_keys for spec in specs) else made


SMALL_WIDTH = 256
"""Heads × head_dim. In narrower models everything between the matrix products takes microseconds with any
implementation, and they start sooner without Numba."""

TORCH_BACKENDS = DeviceBackends(ops=TORCH_OPS, attention=lambda pool, specs: TorchNativeBackend(pool), recorder=None)
"""These run on every device."""


def choose_backends(
    args: ModelArgs,
    config: ModelConfig | None,
    specs: Sequence[AttentionSpec],
    *,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    packed_forms: Sequence[WeightForm] = (),
    kv_dtype: torch.dtype | None = None,
) -> DeviceBackends:
    """config: of a model that `Ops` compute; None for one that computes all but attention by itself. specs: its
    attention layers. packed_forms: forms that weights which stay packed may have, in few bits or in 16. kv_dtype: of
    the KV pool; None: ``dtype``, as always on a GPU. Raises ModelLoadError if a backend asked for by name cannot be
    used."""
    if device.type != "cuda":
        if args.attention_backend == "flashinfer":
            raise ModelLoadError(f"--attention-backend flashinfer needs a CUDA device, not {device}; use auto")
        where = {"page_size": page_size, "dtype": dtype, "device": device, "kv_dtype": kv_dtype or dtype}
        return _on_a_cpu(args, config, specs, packed_forms=packed_forms, **where)
    if args.attention_backend == "numba":
        raise ModelLoadError("--attention-backend numba is for a CPU; use auto")
    if args.linear_backend not in ("auto", "torch"):
        raise ModelLoadError(f"--linear-backend {args.linear_backend} is for a CPU; a GPU's products are torch's")
    if packed_forms:
        logger.warning("weights in few bits become floats: there are no kernels for them on a GPU")
    ops, states = TORCH_OPS, TORCH_STATES
    if config is not None:
        ops, states = select_ops(device, dtype, OpShape.of(config)), select_gpu_states(config, dtype, device)
    attention = TORCH_BACKENDS.attention
    if args.attention_backend != "torch_native" and specs:
        from ...attention.flashinfer.library import FlashInferUnavailable, load_attention

        try:
            attention = load_attention(specs, page_size=page_size, dtype=dtype, device=device)
        except FlashInferUnavailable as error:
            if args.attention_backend == "flashinfer":
                raise ModelLoadError(f"--attention-backend flashinfer: {error}") from error
            logger.warning("attention runs on torch's own kernels, without CUDA graphs: %s", error)
            return DeviceBackends(ops, attention, None, states=states)
    captures = bool(specs) and args.attention_backend != "torch_native" and not args.disable_cuda_graph
    if captures and config is not None and config.traits.experts is not None:
        logger.info("no CUDA graphs: the host reads in each layer how many rows each expert has")
        captures = False
    return DeviceBackends(ops, attention, CudaRecorder if captures else None, states=states)


def _on_a_cpu(
    args: ModelArgs,
    config: ModelConfig | None,
    specs: Sequence[AttentionSpec],
    *,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    packed_forms: Sequence[WeightForm],
    kv_dtype: torch.dtype,
) -> DeviceBackends:
    wanted = args.attention_backend
    is_small = max([*map(_width, specs), _state_width(config)]) < SMALL_WIDTH
    without = TORCH_BACKENDS
    if config is not None:
        without = replace(without, logits=_logits(config, dtype, is_small))
    if args.linear_backend == NUMBA:
        without = replace(without, products=_products(dtype, is_wanted=True))
    if args.linear_backend not in ("auto", NUMBA):
        packed_forms = ()
    if packed_forms:
        without = replace(without, packed=_packed_products(packed_forms))
    if wanted == "torch_native" or (config is None and not specs) or (wanted == "auto" and is_small):
        return without
    from ...attention.numba_paged.library import NumbaUnavailable, load_attention

    try:
        team = Team()
        attention = without.attention
        if specs:
            where = {"page_size": page_size, "dtype": dtype, "device": device, "kv_dtype": kv_dtype}
            attention = load_attention(specs, team=team, **where)
    except (NumbaUnavailable, NoTeamError) as error:
        if wanted == "numba":
            raise ModelLoadError(f"--attention-backend numba: {error}") from error
        logger.warning("attention runs on torch's own kernels, which take several times as long: %s", error)
        return without
    if packed_forms:
        without = replace(without, packed=_packed_products(packed_forms, team))
    if args.enable_double_sparsity:
        without = replace(without, score_labels=_label_scores(team, specs, args.ds_heavy_channel_num, dtype, kv_dtype))
    is_tried = args.linear_backend == "auto" and processor.multiplies(dtype)
    products = _products(dtype, team) if is_tried or args.linear_backend == NUMBA else None
    if config is None:
        return replace(without, attention=attention, products=products, sized_ops=_sized_ops(team, dtype))
    ops = select_ops(device, dtype, OpShape.of(config), team, kv_dtype)
    states, recorder = select_states(config, dtype, team), None
    if specs and args.linear_backend in ("auto", NUMBA) and not args.disable_cuda_graph:
        from ...attention.numba_paged.recording import TeamRecorder

        recorder = partial(TeamRecorder, team)
    found = replace(without, ops=ops, attention=attention, products=products, states=states)
    return replace(found, recorder=recorder, any_tokens=True)


def _sized_ops(team: Team, dtype: torch.dtype) -> SizedOps | None:
    from ..layers.numba_ops import operations  # here: for a CPU only

    try:
        return operations.SizedOps(team, dtype)
    except TypeError:
        return None


def _label_scores(
    team: Team,
    specs: Sequence[AttentionSpec],
    channels: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> ScoreLabels | None:
    """The kernel for sparse decodes; None if it cannot be used."""
    from ...attention.numba_paged.label_scores import LabelScores  # here: for a CPU only

    scores = LabelScores(team)
    try:
        for spec in specs:
            if is_sparse_layer(spec) and not spec.values_in_keys and channels <= spec.head_dim:
                scores.probe(spec, channels, dtype, kv_dtype)
    except Exception as error:  # compiled code may raise anything
        logger.warning("torch scores the labels of sparse decodes: %s", describe_error(error))
        return None
    return scores


def _logits(config: ModelConfig, dtype: torch.dtype, is_small: bool) -> LogitsProduct | None:
    """The head's product that does not round logits to the model's dtype; None if there is none."""
    if is_small and dtype != torch.float32:
        return widened_product
    if dtype != torch.bfloat16:  # float32 is not rounded; float16 has 11 bits, and no kernel
        return None
    try:
        from ..layers.numba_ops.logits import ExactLogits  # here: for a CPU only

        return ExactLogits(config.hidden_size)
    except Exception as error:  # compiled code may raise anything
        logger.warning("logits are rounded to bfloat16: %s", describe_error(error))
        return None


def _products(dtype: torch.dtype, team: Team | None = None, *, is_wanted: bool = False) -> BlockKernel | None:
    """The kernel of the form "numba"; None if it cannot be used. is_wanted: it was asked for by name, and failure
    raises ModelLoadError."""
    if dtype == torch.float16:
        trouble = "there is no kernel for float16"
    else:
        try:
            from ..layers.numba_ops.blocks import BlockProducts  # here: for a CPU only

            return BlockProducts(team or Team(), dtype)
        except NumbaMissingError as error:
            trouble = str(error)
        except Exception as error:  # compiled code may raise anything
            trouble = describe_error(error)
    if is_wanted:
        raise ModelLoadError(f"--linear-backend numba: {trouble}; or use auto")
    if dtype != torch.float16:
        logger.warning("matrix products are oneDNN's own: %s", trouble)
    return None


def _packed_products(forms: Sequence[WeightForm], team: Team | None = None) -> PackedKernel | None:
    """The kernel for weights in few bits or in 16; None if it cannot be used."""
    try:
        from ..layers.numba_ops.packed_products import PackedProducts  # here: for a CPU only

        return PackedProducts.probed(team or Team(), forms)
    except Exception as error:  # compiled code may raise anything
        logger.warning("weights in few bits or in 16 become floats of the model's dtype: %s", describe_error(error))
        return None


def _width(spec: AttentionSpec) -> int:
    return spec.num_heads * spec.head_dim


def _state_width(config: ModelConfig | None) -> int:
    """Numbers of a token that a layer with states mixes; 0 if there are none."""
    traits = None if config is None else config.traits.recurrent
    if isinstance(traits, GatedDeltaTraits):
        return traits.value_heads * traits.value_size
    if isinstance(traits, Mamba2Traits):
        return traits.heads * traits.head_size
    return config.hidden_size if config is not None and isinstance(traits, ShortConvTraits) else 0
