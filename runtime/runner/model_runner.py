"""Runs a model on a device: loads it, owns its pools and the device mirror of req_to_token, computes steps.

    ScheduleBatch ─▶ find a graph ─▶ build_forward_batch ─▶ KV copies ─▶ attention.plan ─▶ decoder ─▶ ForwardOutput
                                     (row changes, upload)               └── or the graph's replay ──┘

Knows nothing of requests, sampling or text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...attention import processor
from ...attention.backend import AttentionBackend, AttentionBatch, GraphBackend, kv_shapes
from ...attention.double_sparse import DoubleSparseBackend
from ...attention.latent import LatentBackend
from ...attention.trial_results import TrialResults
from ...attention.windowed import WindowedBackend, window_layers
from ...memory_pool.kv_pool import (
    KVPool,
    KVShape,
    WindowedKVPool,
    are_disjoint,
    kv_bytes_per_token,
    make_kv_pool,
    untouched_zeros,
)
from ...memory_pool.state_pool import StatePool, state_bytes
from ...scheduler.batch import ScheduleBatch, StateRows
from ...scheduler.config import DEFAULT_CHUNK
from ..checkpoint.hf_config import load_model_config
from ..checkpoint.model_files import ModelLoadError, UnsupportedModelError, resolve_model_folder
from ..checkpoint.weights import fill_dummy, load_weights, mapped_tensor, packed_kinds
from ..config import ModelArgs
from ..double_sparsity import ChannelMeter, load_sparsity
from ..kv_transfer.transfer import Transfers
from ..layers.dtype_trial import cpu_dtype, narrow_dtype
from ..layers.low_rank import Target
from ..layers.product_trials import (
    BUSY_OTHERS,
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    SMALL_MODEL_BYTES,
    LateTrials,
    UnusableFormError,
)
from ..layers.products import NUMBA
from ..layers.quantized_weights import FLOAT8, INT4, INT8, QUANTIZATIONS, WeightForm
from ..layers.states.state_batch import StatePlanner, plan_states
from ..layers.step_inputs import StepInputs
from ..lora.adapter_weights import AdapterWeights
from ..model_config import ModelConfig, ServedConfig
from ..models.decoder import EMBEDDING, Decoder, attention_specs
from ..models.served_model import ServedModel
from ..settled_memory import return_free_memory
from .cpu_threads import OtherProcesses
from .cuda_graph import GraphCatalog, GraphRunner
from .device_backends import DeviceBackends, choose_backends
from .forward_batch import attention_batch, build_forward_batch
from .kv_dtype import describe_kv_dtype, resolve_kv_dtype
from .largest_step import SMALLEST_CHUNK, chunk_trial, run_largest_step
from .memory_plan import SET_ASIDE, MemoryPlan, MemorySettings, plan_memory
from .memory_sizing import available_memory, estimate_graph_bytes, explain_out_of_memory, profiled_bytes
from .step_profile import StepProfiler
from .transformers_model import TransformersModel, load_transformers_model

logger = logging.getLogger(__name__)

CHUNK_TRIAL = "prompt step"
"""Kind of trial, see TrialResults."""

MAX_RECORDED = 48
"""Tokens of the largest step that is recorded on a CPU: in larger ones the products take nearly all the time."""


@dataclass(slots=True)
class ForwardOutput:
    """The results of a step."""

    logits: torch.Tensor
    """float32 [sampled tokens, vocab_size]: for the batch rows where batch.samples is true, in order; several for a row
    that verifies guesses (batch.sampled_counts)."""
    logprob_hidden: torch.Tensor | None
    """[n, hidden_size]: hidden states of the new tokens at or after their row's logprob_start, concatenated in row
    order; `ModelRunner.compute_logits` turns them into logits. None if no row asks for them."""
    pooled_hidden: torch.Tensor | None = None
    """[n, hidden_size]: hidden states of the tokens of batch.pooled, span after span, as `compute_logits` takes them.
    None if the batch has no spans."""


class ModelRunner:
    """Runs forward steps of one model on one device. Not thread-safe: one step at a time.

    transfers: the copies of KV from the host, set by the owner where there is a host tier; steps wait for them.
    state_pool: the recurrent states of a model that keeps some (``max_states`` of them); else None, and 0.
    window, window_tokens: tokens that layers with a sliding window see at most, and slots of their pool; 0 and 0 where
    they have none of their own.
    """

    transfers: Transfers | None = None

    def __init__(
        self,
        args: ModelArgs,
        *,
        context_length: int,
        num_rows: int,
        page_size: int,
        max_total_tokens: int,
        max_states: int = 0,
        max_running_requests: int = 0,
        chunked_prefill_size: int = 2048,
        max_sampled_tokens: int = 0,
        window_ratio: float | None = None,
        backends: DeviceBackends | None = None,
        report_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        """context_length: 0 takes the model's. num_rows: rows of req_to_token. max_total_tokens, max_states: 0 sizes
        the pool from memory. max_running_requests: sequences of the largest step; 0: num_rows. chunked_prefill_size:
        its new tokens; 0: `DEFAULT_CHUNK`, or on a CPU what an earlier trial found best. max_sampled_tokens: those that
        it samples, if they are more than sequences. window_ratio: tokens of a pool for layers with a sliding window, by
        those of the KV pool; 0: as many as are needed; None: they have none of their own. backends: None chooses those
        that fit the device. report_phase: called when a phase that takes time begins.

        Raises ModelLoadError (a ValueError) with what to change."""
        self.device = _device(args.device)
        self.profiler = StepProfiler(self.device)
        folder = resolve_model_folder(args.model_path)
        available = available_memory(self.device)
        opened = _open_model(args, folder, context_length, self.device)
        foreign = opened if isinstance(opened, TransformersModel) else None
        self.config: ServedConfig = opened.config if isinstance(opened, TransformersModel) else opened
        is_packed, kinds = args.quantization != "auto", set[str]()
        if foreign is not None:
            self.dtype = foreign.dtype
        else:
            kinds = packed_kinds(folder) if args.load_format != "dummy" else set()
            is_packed |= bool(kinds)
            self.dtype = _dtype(args.dtype, self.config, self.device, is_packed=is_packed)
        packed_forms: Sequence[WeightForm] = (
            _packed_forms(args.quantization, kinds)
            if is_packed
            else _narrow_forms(args, opened, self.dtype, self.device)
        )
        max_running = max_running_requests or num_rows
        self._max_sampled = max(max_running, max_sampled_tokens)
        self._settings = MemorySettings(
            mem_fraction_static=args.mem_fraction_static,
            context_length=self.config.context_length,
            max_total_tokens=max_total_tokens,
            max_states=max_states,
            num_rows=num_rows,
            page_size=page_size,
            chunked_prefill_size=chunked_prefill_size,
            max_running_requests=max_running,
            cuda_graph_max_bs=args.cuda_graph_max_bs,
            window_ratio=window_ratio or 0.0,
        )
        with torch.inference_mode():
            specs = opened.specs if isinstance(opened, TransformersModel) else attention_specs(opened)
            self._kv_shapes = kv_shapes(specs)
            self.kv_dtype = resolve_kv_dtype(
                args.kv_cache_dtype, specs, self.dtype, self.device, has_few_bits=is_packed
            )
            self.window, self._window_layers = window_layers(specs)
            has_windows = self.window > 0
            if window_ratio is None or any(spec.values_in_keys for spec in specs):
                self.window, self._window_layers = 0, frozenset()
            self._group = max((spec.group for spec in specs), default=1)
            report_phase("compiling or loading kernels")
            backends = backends or choose_backends(
                args,
                None if isinstance(opened, TransformersModel) else opened,
                specs,
                page_size=page_size,
                dtype=self.dtype,
                device=self.device,
                packed_forms=packed_forms,
                kv_dtype=self.kv_dtype,
            )
            rounds = ", inputs rounded" if backends.packed is not None else ""
            self.few_bits = f"{args.quantization}{rounds}" if is_packed else ""
            """How products with weights in few bits are computed; empty if the model has none."""
            self.sparsity = load_sparsity(args, specs, self.device) if args.enable_double_sparsity else None
            if self.sparsity is not None:
                logger.info("double sparsity: %s", self.sparsity.describe())
                backends = replace(backends, sparsity=self.sparsity, recorder=None)
            self._results = TrialResults()
            self._others = OtherProcesses()
            self._late_trials: LateTrials | None = None
            self._tries_chunk = False
            if isinstance(opened, TransformersModel):
                self._model: ServedModel = opened
                self._weight_bytes = opened.weight_bytes
                targets = opened.adapter_targets()
                if backends.sized_ops is not None:
                    opened.use_kernels(backends.sized_ops)
                try:
                    stored = None if args.load_format == "dummy" else partial(mapped_tensor, folder)
                    self._late_trials = opened.choose_products(args.linear_backend, backends.products, stored)
                except UnusableFormError as error:
                    raise ModelLoadError(str(error)) from error
            else:
                report_phase("loading weights")
                self._model, targets = self._load(args, opened, folder, backends, is_packed=bool(packed_forms))
                if backends.packed is not None and isinstance(packed_forms[0], torch.dtype):
                    kind = str(packed_forms[0]).removeprefix("torch.")
                    logger.info(
                        "weights stay in %s, and a kernel widens them: the processor does not multiply it", kind
                    )
            if self._model.state_shapes:
                self.window, self._window_layers = 0, frozenset()
            self.adapters = AdapterWeights(targets, dtype=self.dtype, device=self.device)
            self.chunked_prefill_size = chunked_prefill_size or self._choose_chunk(backends)
            self._settings = replace(self._settings, chunked_prefill_size=self.chunked_prefill_size)
            shapes = self._graph_catalog(args, max_running, backends)
            # The last row is padding: all its entries are slot 0.
            self._mirror = untouched_zeros((num_rows + 1, self.config.context_length), torch.int32, self.device)
            plan = self._plan_memory(backends, None if backends.any_tokens else shapes, available)
            self.max_total_tokens, self.max_states = plan.kv_tokens, plan.num_states
            self.window_tokens = plan.window_tokens
            if not plan.window_tokens:
                self.window, self._window_layers = 0, frozenset()
            self.shares_windows = has_windows and not self.window
            """True if layers with a sliding window have no pool of their own."""
            self._window_mirror = untouched_zeros(self._mirror.shape, torch.int32, self.device) if self.window else None
            self.transfer_kv = backends.ops.transfer_kv
            try:
                self.kv_pool: KVPool = self._make_pool(backends, plan.kv_tokens, plan.window_tokens)
                self.state_pool = self._make_state_pool(plan.num_states)
                self._state_planner = StatePlanner(self.state_pool) if self.state_pool is not None else None
            except torch.OutOfMemoryError as error:
                raise explain_out_of_memory(error, "pool", self._settings) from error
            self.attention: AttentionBackend = backends.open_attention(self.kv_pool, specs)
            if shapes is not None:
                report_phase("recording steps" if backends.any_tokens else "capturing CUDA graphs")
            self._graphs = self._capture(backends, shapes) if shapes is not None else None
        self._capture_again = partial(self._capture_anew, args, max_running, backends)
        has_late_graphs = self._graphs is not None and backends.any_tokens
        is_complete = self._late_trials is None and not self._tries_chunk and not has_late_graphs
        self._late_work = None if is_complete else self._all_late_work(backends)
        logger.info(
            "%s (%s) on %s, %s, attention %s; %s",
            self.config.architecture,
            "Baton's code" if foreign is None else "transformers' code",
            self.device,
            str(self.dtype).removeprefix("torch."),
            self.attention_name,
            plan.describe(),
        )
        if self.kv_dtype != self.dtype:
            logger.info("%s", describe_kv_dtype(self._kv_shapes, self.kv_dtype, self.dtype))

    @property
    def req_to_token(self) -> torch.Tensor:
        """The device mirror, int32 [num_rows, context_length]."""
        return self._mirror[:-1]

    @property
    def attention_name(self) -> str:
        """As --attention-backend names it."""
        attention = self.attention
        is_outer = isinstance(attention, (LatentBackend, DoubleSparseBackend, WindowedBackend))
        return (attention.inner if is_outer else attention).name

    @property
    def model_impl(self) -> str:
        """The code that computes the model, as --model-impl names it."""
        return "transformers" if isinstance(self._model, TransformersModel) else "baton"

    @property
    def has_graphs(self) -> bool:
        """True if some steps run as CUDA graphs."""
        return self._graphs is not None

    @torch.inference_mode()
    def forward(
        self,
        batch: ScheduleBatch,
        previous_ids: torch.Tensor | None = None,
        prepared: Callable[[], None] = lambda: None,
        adapters: Sequence[str] = (),
    ) -> ForwardOutput:
        """Compute one step: write the K and V of the new tokens to the pool and return logits.

        previous_ids: device int64 [rows of the previous step], the tokens it sampled, for input ids that stand for
        them. prepared: called before the layers are computed. adapters: the key of each row's adapter, "" for none;
        empty if no row has one. Such a step runs as no graph. Raises torch.OutOfMemoryError, naming the flag to change.
        """
        if adapters:
            self.adapters.begin_step(adapters, batch.extend_lens)
        try:
            return self._forward(batch, previous_ids, prepared, may_replay=not adapters)
        except torch.OutOfMemoryError as error:
            raise explain_out_of_memory(error, "step", self._settings) from error
        finally:
            self.adapters.end_step()

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, hidden_size] of a ForwardOutput -> float32 [n, vocab_size]."""
        return self._model.compute_logits(hidden)

    @torch.inference_mode()
    def final_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, hidden_size] of a ForwardOutput -> the model's final ones, float32, the same shape."""
        return self._model.final_states(hidden)

    @torch.inference_mode()
    def compute_labels(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, hidden_size] of a ForwardOutput -> logits of the classification head, float32
        [n, labels]. Only for models that have one."""
        return self._model.compute_labels(hidden)

    @torch.inference_mode()
    def find_heavy_channels(self, ids: Sequence[int]) -> dict[str, list[list[int]]]:
        """The content of a file for --ds-channel-config-path, from one prompt. Overwrites the pool: not while requests
        are served. Raises ModelLoadError for a model that cannot be sparse, ValueError for a prompt that does not fit
        in pool and context."""
        if len(ids) > min(self.config.context_length, self.max_total_tokens):
            most = min(self.config.context_length, self.max_total_tokens)
            raise ValueError(f"the text has {len(ids)} tokens; at most {most} fit, see --num-tokens")
        meter = ChannelMeter(self.kv_pool, self.attention, self._model.specs)
        slots = torch.arange(len(ids), device=self.device) + self.kv_pool.page_size
        table = torch.stack((slots, torch.zeros_like(slots))).int()
        prompt = torch.tensor(ids, device=self.device)
        for start in range(0, len(ids), self.chunked_prefill_size):
            end = min(start + self.chunked_prefill_size, len(ids))
            inputs = StepInputs.zeros(end - start, self.device)
            inputs.input_ids.copy_(prompt[start:end])
            inputs.positions.copy_(torch.arange(start, end))
            inputs.out_cache_loc.copy_(slots[start:end])
            if self.state_pool is not None:
                inputs.states = plan_states(self.state_pool, *_only_row(1 if start else 0, end - start))
            meter.plan(
                AttentionBatch(
                    req_to_token=table,
                    host_rows=np.zeros(1, dtype=np.int32),
                    prefix_lens=np.full(1, start, dtype=np.int32),
                    extend_lens=np.full(1, end - start, dtype=np.int32),
                    pad_row=1,
                )
            )
            self._layers(inputs, meter)
        return meter.channels()

    @property
    def has_late_work(self) -> bool:
        """True if some trials, or recordings of steps, wait until nothing is to be computed."""
        return self._late_work is not None

    @torch.inference_mode()
    def run_late_work(self) -> float | None:
        """Do a small piece of that work. Call it only while no request is open, as results may be rounded
        differently afterwards. Returns the seconds until the next piece, 0 unless other processes are busy; None once
        all are done."""
        if self._late_work is None:
            return None
        threads = torch.get_num_threads()
        torch.set_num_threads(self._results.threads)  # fewer may be left from when the processor was crowded
        try:
            wait = next(self._late_work, None)
        finally:
            torch.set_num_threads(threads)
        if wait is None:
            self._late_work = None
            return_free_memory()
        return wait

    def _all_late_work(self, backends: DeviceBackends) -> Generator[float, None, None]:
        """Yields seconds until the next piece."""
        late = self._late_trials
        if late is not None:
            late.others = self._others.busy_cores
            try:
                while (wait := late.try_next_product()) is not None:
                    yield wait
            except Exception as error:  # packing may lack memory; layers keep the forms that they have
                logger.warning("matrix products are not tried any further: %s: %s", type(error).__name__, error)
            self._late_trials = None
            if self._model.drop_tied_matrix() or late.has_switched:
                self._capture_again()
        while self._graphs is not None and self._graphs.capture_next():
            yield 0.0
        if self._tries_chunk:
            try:
                yield from self._try_chunk(backends)
            except Exception as error:  # its pool may lack memory
                logger.warning("sizes of prompt steps are not tried: %s: %s", type(error).__name__, error)

    def sound_tokens(self, batch: ScheduleBatch, rows: Sequence[int]) -> dict[int, int]:
        """For these rows of a step that has been computed: how many first tokens come before the first with K or V that
        is not finite; 0 if all are finite, or if the row started from a state that is not. Waits for the device."""
        lengths = batch.seq_lens
        slots = {row: self._mirror[int(batch.req_pool_indices[row]), : int(lengths[row])] for row in rows}
        found = {row: self.kv_pool.first_not_finite(of_row) for row, of_row in slots.items()}
        if self._window_mirror is not None:
            found = {row: self._with_window(batch, row, position) for row, position in found.items()}
        return {row: 0 if self._started_spoiled(batch, row) else position or 0 for row, position in found.items()}

    def _with_window(self, batch: ScheduleBatch, row: int, position: int | None) -> int | None:
        """``position``, the first token of a row with K or V that is not finite in some layer that sees all tokens, or
        the first in one with a window if that comes before. It may come before all that the row still has there."""
        assert self._window_mirror is not None and isinstance(self.kv_pool, WindowedKVPool)
        first = max(0, int(batch.prefix_lens[row]) - self.window + 1)
        slots = self._window_mirror[int(batch.req_pool_indices[row]), first : int(batch.seq_lens[row])]
        found = self.kv_pool.windows.first_not_finite(slots)
        if found is None:
            return position
        if position is None:
            return first + found if found else 0
        return min(position, first + found)

    def _started_spoiled(self, batch: ScheduleBatch, row: int) -> bool:
        """True if the row started from a state that is not finite, and that the step has not written over."""
        if self.state_pool is None or batch.states is None:
            return False
        source = batch.states.sources[row : row + 1]
        if source[0] == 0 or source[0] in batch.states.slots:
            return False
        return bool(self.state_pool.find_not_finite(torch.from_numpy(source).to(self.device).long())[0])

    def _forward(
        self,
        batch: ScheduleBatch,
        previous_ids: torch.Tensor | None,
        prepared: Callable[[], None],
        *,
        may_replay: bool,
    ) -> ForwardOutput:
        arrivals = self.transfers if self.transfers is not None and self.transfers.loading else None
        attention = attention_batch(batch, self._mirror, self._window_mirror)
        may_replay = may_replay and arrivals is None
        shape = self._graphs.find_shape(attention) if self._graphs is not None and may_replay else None
        step = build_forward_batch(batch, attention, previous_ids, shape)
        step.inputs.arrivals = arrivals
        if self._state_planner is not None:
            assert batch.states is not None, "a step of a model with recurrent states must say where they are"
            if arrivals is not None:
                arrivals.wait_states()
            step.inputs.states = self._state_planner.plan_states(batch.states, batch.extend_lens)
        if step.copies is not None:
            if arrivals is not None:  # what is copied may have to come first
                arrivals.wait_layer(len(self._kv_shapes) - 1)
            disjoint = are_disjoint(batch.copies.source, batch.copies.target)
            self.kv_pool.copy(*step.copies, disjoint=disjoint)
        if step.window_copies is not None and isinstance(self.kv_pool, WindowedKVPool):
            self.kv_pool.windows.copy(*step.window_copies)
        if self._graphs is not None and shape is not None:
            self._graphs.plan_replay(shape, step)
            self.profiler.lap("plan")
            prepared()
            hidden = self._graphs.replay(shape)
        else:
            self.attention.plan(step.attention)
            self.profiler.lap("plan")
            prepared()
            hidden = self._layers(step.inputs, self.attention)
        wanted, pooled = step.logprob_indices, step.pooled_indices
        return ForwardOutput(
            logits=self._model.compute_logits(hidden.index_select(0, step.sample_indices)),
            logprob_hidden=None if wanted is None else hidden.index_select(0, wanted),
            pooled_hidden=None if pooled is None else hidden.index_select(0, pooled),
        )

    def _layers(self, inputs: StepInputs, attention: AttentionBackend) -> torch.Tensor:
        return self._model(inputs, self.kv_pool, attention)

    # -- start ---------------------------------------------------------------------------------------------------------

    def _graph_catalog(self, args: ModelArgs, max_running: int, backends: DeviceBackends) -> GraphCatalog | None:
        if backends.recorder is None:
            return None
        if self._model.state_shapes and not backends.any_tokens:
            logger.info("steps with recurrent states do not run as CUDA graphs")
            return None
        if backends.any_tokens:
            sizes = range(1, min(args.cuda_graph_max_bs, MAX_RECORDED) + 1)
            return GraphCatalog.of_tokens([size for size in sizes if self._model.is_recordable(size)])
        return GraphCatalog(
            max_sequences=min(args.cuda_graph_max_bs, max_running),
            # All padding of an extend may be one sequence, which must not be longer than the context.
            max_tokens=min(args.cuda_graph_max_tokens, self.config.context_length),
            group=self._group,
        )

    def _load(
        self, args: ModelArgs, config: ModelConfig, folder: Path, backends: DeviceBackends, *, is_packed: bool
    ) -> tuple[Decoder, dict[str, Target]]:
        """The model, and the layers that adapters may update. is_packed: some weights stay in few bits, or in 16."""
        try:
            model = Decoder(config, backends.ops, backends.states, dtype=self.dtype, device=self.device)
            rows = mapped_tensor(folder, f"{EMBEDDING}.weight") if args.load_format != "dummy" else None
            if is_packed:
                model.keep_packed(QUANTIZATIONS[args.quantization], has_stored_rows=rows is not None)
            if args.load_format == "dummy":
                fill_dummy(model.checkpoint_views())
            else:
                load_weights(model.checkpoint_views(), folder)
            self._weight_bytes = model.weight_bytes
            if args.load_format != "dummy":
                model.finish_loading()
            targets = model.adapter_targets()
            model.pack(backends.packed, rows)
            self._late_trials = model.choose_products(args.linear_backend, rows, backends.logits, backends.products)
        except UnusableFormError as error:
            raise ModelLoadError(str(error)) from error
        except torch.OutOfMemoryError as error:
            raise explain_out_of_memory(error, "load", self._settings) from error
        return model, targets

    def _choose_chunk(self, backends: DeviceBackends) -> int:
        """Default prompt tokens per step: those that a trial at an earlier start found, else few."""
        largest = self._largest_chunk
        if self.device.type != "cpu" or self._weight_bytes < SMALL_MODEL_BYTES or largest < SMALLEST_CHUNK:
            return DEFAULT_CHUNK
        found = self._results.find(CHUNK_TRIAL, self._chunk_key(), lambda size: _is_chunk(size, largest))
        self._tries_chunk = found is None
        return found or SMALLEST_CHUNK

    @property
    def _largest_chunk(self) -> int:
        return min(DEFAULT_CHUNK, self.config.context_length)

    def _chunk_key(self) -> dict[str, Any]:
        """What the best number of prompt tokens depends on."""
        return {
            "architecture": self.config.architecture,
            "code": self.model_impl,
            "dtype": str(self.dtype).removeprefix("torch."),
            "weight_bytes": self._weight_bytes,
            "kv": sorted({str(shape) for shape in self._kv_shapes}),
            "kv_dtype": str(self.kv_dtype).removeprefix("torch."),
            "layers": len(self._kv_shapes),
            "page_size": self._settings.page_size,
            "largest": self._largest_chunk,
        }

    def _try_chunk(self, backends: DeviceBackends) -> Generator[float, None, None]:
        """Find the best number of prompt tokens for later starts: this one's scheduler has been built for another."""
        wait = FIRST_WAIT_S
        while True:
            self._others.busy_cores()
            size, tried = yield from self._time_steps(backends)
            if self._others.busy_cores() <= BUSY_OTHERS:
                break
            yield wait
            wait = min(2 * wait, LONGEST_WAIT_S)
        rates = ", ".join(f"{tokens}: {tokens / seconds:.0f}" for tokens, seconds in tried.items())
        logger.info(
            "from the next start on, steps compute %d prompt tokens at most, now %d; tokens/s by size: %s",
            size,
            self.chunked_prefill_size,
            rates,
        )
        self._results.keep(CHUNK_TRIAL, self._chunk_key(), size)

    def _time_steps(self, backends: DeviceBackends) -> Generator[float, None, tuple[int, dict[int, float]]]:
        """`chunk_trial`, over a pool of its own; yields after each step."""
        page = self._settings.page_size
        tokens = -(-self._largest_chunk // page) * page
        pool = self._make_pool(backends, tokens, tokens)
        run = partial(run_largest_step, self._model, backends, pool, states=self._make_state_pool(1))

        def compute(tokens: int) -> None:
            run(vocab_size=self.config.vocab_size, tokens=tokens, rows=1, shapes=())

        trial = chunk_trial(compute, self._largest_chunk)
        while True:
            try:
                next(trial)
            except StopIteration as end:
                return end.value
            yield 0.0

    def _plan_memory(self, backends: DeviceBackends, shapes: GraphCatalog | None, available: int) -> MemoryPlan:
        """shapes: the graphs that will be captured; None for none."""
        settings = self._settings
        graphs = shapes.largest_first if shapes is not None else []
        tokens = min(settings.chunked_prefill_size, self.config.context_length)
        pool_tokens = -(-tokens // settings.page_size) * settings.page_size
        per_token, per_state = kv_bytes_per_token(self._kv_shapes, self.kv_dtype), state_bytes(self._model.state_shapes)

        def largest_step() -> None:
            pool = self._make_pool(backends, pool_tokens, pool_tokens)
            largest = shapes.largest_of_each_kind if shapes is not None else []
            run_largest_step(
                self._model,
                backends,
                pool,
                vocab_size=self.config.vocab_size,
                tokens=tokens,
                rows=self._max_sampled,
                shapes=largest,
                states=self._make_state_pool(1),
            )

        try:
            taken = profiled_bytes(self.device, largest_step)
        except torch.OutOfMemoryError as error:
            raise explain_out_of_memory(error, "profile", settings) from error
        pools = (pool_tokens + settings.page_size) * per_token + (1 + SET_ASIDE) * per_state
        activations = max(0, taken - pools)
        if self.device.type == "cuda":
            activations += self._mirror.nbytes * (2 if self.window else 1)
        per_window_token = kv_bytes_per_token(self._shapes_of(windows=True), self.kv_dtype)
        return plan_memory(
            settings,
            available=available,
            weight_bytes=self._weight_bytes,
            bytes_per_token=per_token - per_window_token,
            bytes_per_state=per_state,
            bytes_per_window_token=per_window_token,
            window=self.window,
            is_cpu=self.device.type == "cpu",
            activation_bytes=activations,
            graph_bytes=estimate_graph_bytes(
                num_graphs=len(graphs),
                max_tokens=graphs[0].tokens if graphs else 0,
                activation_bytes=activations,
                profiled_tokens=tokens,
            ),
        )

    def _make_pool(self, backends: DeviceBackends, tokens: int, window_tokens: int) -> KVPool:
        """window_tokens: of the layers with a window, where they have a pool of their own."""
        make = partial(
            make_kv_pool,
            page_size=self._settings.page_size,
            dtype=self.kv_dtype,
            model_dtype=self.dtype,
            device=self.device,
            copy_disjoint=backends.ops.copy_kv,
        )
        if not self.window:
            return make(num_tokens=tokens, shapes=self._kv_shapes)
        full = make(num_tokens=tokens, shapes=self._shapes_of(windows=False))
        windows = make(num_tokens=window_tokens, shapes=self._shapes_of(windows=True))
        return WindowedKVPool(full, windows, self._window_layers)

    def _shapes_of(self, *, windows: bool) -> list[KVShape]:
        """Of the layers with a window that have a pool of their own, or of all others."""
        shapes = enumerate(self._kv_shapes)
        return [shape for layer, shape in shapes if (layer in self._window_layers) == windows]

    def _make_state_pool(self, num_states: int) -> StatePool | None:
        """None for a model without recurrent states."""
        shapes = self._model.state_shapes
        return StatePool(num_states, shapes, self.device) if shapes else None

    def _capture_anew(self, args: ModelArgs, max_running: int, backends: DeviceBackends) -> None:
        """Capture the graphs again after products have changed their form."""
        self._graphs = None
        shapes = self._graph_catalog(args, max_running, backends)
        self._graphs = self._capture(backends, shapes) if shapes is not None else None

    def _capture(self, backends: DeviceBackends, shapes: GraphCatalog) -> GraphRunner | None:
        assert backends.recorder is not None
        if not isinstance(self.attention, GraphBackend):
            return None
        if not shapes.largest_first:
            if backends.any_tokens:
                logger.info(
                    "steps are not recorded: some of their products are not Numba's, or --cuda-graph-max-bs is 0"
                )
            return None
        before, recorder = available_memory(self.device), backends.recorder()
        try:
            graphs = GraphRunner(
                self._layers,
                self.attention,
                shapes,
                recorder,
                self._mirror,
                self.state_pool,
                windows=self.window > 0,
                late=backends.any_tokens,
            )
            if backends.any_tokens:
                graphs.check_graphs(self._layers, self.attention, self._mirror)
        except torch.OutOfMemoryError as error:
            raise explain_out_of_memory(error, "capture", self._settings) from error
        except Exception as error:  # kernels that work one by one may fail in a graph on some cards
            logger.warning("no %s; each kernel is launched separately: %s", recorder.name, error, exc_info=error)
            return None
        taken = max(0, before - available_memory(self.device)) / 2**30  # other processes may have freed some meanwhile
        left = len(shapes.largest_first) - graphs.num_captured
        later = f"; {left} more follow while the server is idle, or when they are wanted" if left else ""
        logger.info("captured %d %s in %.2f GiB%s", graphs.num_captured, recorder.name, taken, later)
        return graphs


def _is_chunk(size: Any, largest: int) -> bool:
    return type(size) is int and SMALLEST_CHUNK <= size <= largest


def _only_row(source: int, tokens: int) -> tuple[StateRows, np.ndarray]:
    """The states of a step with one row, which writes slot 1, and its extend_lens."""
    sources, lens = np.full(1, source, dtype=np.int32), np.full(1, tokens, dtype=np.int32)
    return StateRows(sources, np.zeros(1, dtype=np.int32), lens, np.ones(1, dtype=np.int32)), lens


_NO_QUANTIZATION = "--quantization {} is for models that Baton's own code computes (docs/models.md); leave it out"


def _open_model(
    args: ModelArgs, folder: Path, context_length: int, device: torch.device
) -> ModelConfig | TransformersModel:
    """The configuration of a model that Baton's own code computes, or the loaded model of transformers. Raises
    ModelLoadError."""
    reason = ""
    if args.quantization != "auto" and args.model_impl == "transformers":
        raise ModelLoadError(_NO_QUANTIZATION.format(args.quantization))
    if args.model_impl != "transformers":
        try:
            return load_model_config(folder, context_length=context_length)
        except UnsupportedModelError as error:
            if args.model_impl == "baton":
                raise
            if args.quantization != "auto":
                raise ModelLoadError(f"{error}; {_NO_QUANTIZATION.format(args.quantization)}") from error
            reason = f"{error}; "
    try:
        return load_transformers_model(
            folder,
            context_length=context_length,
            dtype=lambda config: _dtype(args.dtype, config, device),
            device=device,
            load_format=args.load_format,
            trust_remote_code=args.trust_remote_code,
        )
    except UnsupportedModelError as error:
        raise ModelLoadError(
            f"{reason}transformers' code cannot be used either: {error}" if reason else str(error)
        ) from error


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError("--device cuda, but this torch sees no CUDA device; use --device cpu")
    return torch.device(name)


def _packed_forms(quantization: str, kinds: set[str]) -> list[WeightForm]:
    """Forms with which the kernels that the model needs are tried out. kinds: by `packed_kinds`."""
    has_float8 = quantization == "fp8" or "float8" in kinds
    has_integers = quantization != "auto" or "integers" in kinds  # with fp8, embedding and head
    return [*((INT8, INT4) if has_integers else ()), *((FLOAT8,) if has_float8 else ())]


def _narrow_forms(
    args: ModelArgs, opened: ModelConfig | TransformersModel, dtype: torch.dtype, device: torch.device
) -> tuple[torch.dtype, ...]:
    """The 16-bit floats that weights stay, if a kernel is to widen them as it reads."""
    is_read = args.load_format != "dummy" and args.linear_backend in ("auto", NUMBA)
    if device.type != "cpu" or isinstance(opened, TransformersModel) or not is_read:
        return ()
    narrow = narrow_dtype(opened, dtype)
    return () if narrow is None else (narrow,)


def _dtype(name: str, config: ServedConfig, device: torch.device, *, is_packed: bool = False) -> torch.dtype:
    """is_packed: products are of integers, which another dtype does not make faster."""
    if name == "auto" and device.type == "cpu" and is_packed:
        return torch.float32
    if name == "auto" and device.type == "cpu":
        if isinstance(config, ModelConfig):
            return cpu_dtype(config)
        is_fast = config.dtype == "bfloat16" and processor.multiplies(torch.bfloat16)
        return torch.bfloat16 if is_fast else torch.float32
    return getattr(torch, config.dtype if name == "auto" else name)
