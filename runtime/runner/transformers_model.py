"""Any decoder of transformers, computed by its own code; only attention is Baton's.

    transformers' layers ──q, k, v──▶ attend: K and V to the pool's slots ─▶ AttentionBackend ──▶ transformers' layers

transformers lets a caller register an attention function (its `AttentionInterface`), and most of its models send their
attention through it. The function registered here finds K and V of earlier tokens in the pool, so that pages, chunks,
continuations, forks, beams and tiers work as with a native model. A step is one row of tokens of all sequences, with
their positions, as in native models. Layers that keep recurrent states are in `transformers_states`.

What the layers attend to is found out by a *trace*: one token runs through the model, and each call of the attention
function is noted, with the mask that transformers would have used. A mask that is neither causal nor a sliding window
is refused, as are models that do not use the interface, or that keep anything else than K, V and states. The idea of
running transformers' modelling on a server's KV cache is vLLM's and SGLang's "transformers backend".
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ...attention.backend import AttentionBackend, AttentionBatch, AttentionSpec, kv_shapes
from ...attention.error_text import describe_error
from ...attention.torch_native import TorchNativeBackend
from ...memory_pool.kv_pool import KVPool, MHAKVPool
from ...memory_pool.kv_rows import store_rows
from ...memory_pool.state_pool import StatePool, StateShape
from ...scheduler.batch import StateRows
from ..checkpoint.hf_config import label_activation, load_generation_config
from ..checkpoint.model_files import ModelLoadError, UnsupportedModelError
from ..checkpoint.pooling_files import read_embedding_config
from ..checkpoint.tensor_names import text_tensor_name
from ..layers.linear import Linear
from ..layers.low_rank import Target, module_targets
from ..layers.product_trials import LateTrials, UnusableFormError, choose_products
from ..layers.products import TORCH, BlockKernel
from ..layers.states.state_batch import StateBatch, plan_states
from ..layers.step_inputs import StepInputs
from ..model_config import ServedConfig
from .module_standins import (
    EmbeddingStandin,
    GatedMLPStandin,
    LinearStandin,
    NormStandin,
    SizedOps,
    gated_mlp_standin,
    norm_standin,
)
from .transformers_states import StateLayer, find_mixers, trace_states

logger = logging.getLogger(__name__)

Standin = TypeVar("Standin", GatedMLPStandin, NormStandin)

SERVING, TRACING = "baton", "baton-trace"
"""Names of the registered functions. No mask is registered for the first, so that transformers makes none."""

LARGEST_MASK = 1 << 20
"""Positions up to which a mask is compared with its rule."""


CHECKED_CHUNKS = (6, 6, 1)
CHECKED_TOKENS = sum(CHECKED_CHUNKS)
"""Length of the sequence that is computed in both ways at start: whole, and in these chunks. Code that keeps states has
a way of its own for one token."""
MEAN_DIFFERENCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.2}
"""Largest mean difference of its logits, as a share of their mean size. Experts may be chosen differently after
rounding."""


@dataclass(frozen=True, slots=True)
class MaskRule:
    """The mask of one layer: causal, over the last ``window`` tokens, or all (None)."""

    window: int | None


OTHER_MASK = "neither causal nor a sliding window"
"""Stands for a mask that no backend computes. Some models make one for layers that they do not have."""


@dataclass(slots=True)
class _Layer:
    """One call of the attention function in a step."""

    spec: AttentionSpec
    sinks: torch.Tensor | None
    stores: bool
    """False where K and V are those of an earlier call (Gemma 3n), which has stored them."""


class _Attention:
    """What the attention function works on; each of the model's modules has a reference to it."""

    def __init__(self) -> None:
        self.layers: list[_Layer] = []
        self.inputs: StepInputs | None = None
        self.kv_pool: KVPool | None = None
        self.backend: AttentionBackend | None = None
        self.calls = 0
        """Calls in this step."""
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Keys and values of the calls of a trace, kept so that no memory is used twice."""


class TransformersModel:
    """See `served_model.ServedModel`. One step at a time."""

    @torch.no_grad()
    def __init__(self, model: Any, config: ServedConfig, dtype: torch.dtype) -> None:
        """model: of transformers, with its weights, made for the attention function `TRACING`. Raises
        UnsupportedModelError if it cannot be served."""
        self.config = config
        self.dtype = dtype
        self._attention = _Attention()
        self._model = model.eval()
        for module in model.modules():
            module.baton_attention = self._attention
        self._state_layers: list[StateLayer] = []
        name, kind = self._trace()
        ids = torch.arange(CHECKED_TOKENS, device=model.device) * 7 % config.vocab_size
        expected = self._reference_logits(ids, name)
        model.set_attn_implementation(SERVING)
        # The model's forward computes the logits of what its base returns: the base is taken out, and hidden states
        # that a step has computed are put in.
        self._base = model.get_submodule(name)
        self._given = _Given(kind, self._base)
        self._base_name = name
        model.set_submodule(name, self._given)
        for layer in self._state_layers:
            layer.take_over(self._states_of_step)
        self._check(ids, expected)
        self._linears: dict[str, Linear] = {}
        """By name in the whole model, without the name of a part."""
        self._of_all_tokens: set[str] = set()
        """Names of layers that compute a row for each token of a step, unlike experts."""
        self._replace_layers(ids, expected)
        self._checked = ids, expected
        self._tied: _Tied | None = None
        """As long as the head may still repack the matrix."""

    @property
    def specs(self) -> list[AttentionSpec]:
        return [layer.spec for layer in self._attention.layers]

    @property
    def state_shapes(self) -> list[StateShape]:
        """See ServedModel.state_shapes."""
        return [layer.shape for layer in self._state_layers]

    @property
    def weight_bytes(self) -> int:
        """See ServedModel.weight_bytes. To be asked before `choose_products`, which may drop weights."""
        tensors = [*self._base.parameters(), *self._base.buffers(), *self._model.parameters()]
        for linear in self._linears.values():
            tensors += [tensor for tensor in (linear.weight, linear.bias) if tensor is not None]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    def choose_products(
        self, form: str, kernel: BlockKernel | None = None, stored: Callable[[str], torch.Tensor | None] | None = None
    ) -> LateTrials | None:
        """Choose the form of the matrix products; see `product_trials.choose_products`. To be called once.

        stored: the tensor of the checkpoint with a name, mapped from its file, so that a tied head may repack its
        matrix while tokens are looked up there. Raises UnusableFormError, also for a model with products that cannot be
        exchanged, if another form than torch's is asked for."""
        ids, expected = self._checked
        self._checked = ids[:0], expected[:0]
        linears = list(self._linears.values())
        if not linears:
            if form not in ("auto", TORCH):
                raise UnusableFormError(
                    f"--linear-backend {form}: the modelling of {self.config.architecture} computes its products "
                    "itself; use auto"
                )
            return None
        others = [tensor.data_ptr() for part in (self._base, self._model) for tensor in part.parameters()]
        uses = Counter([*others, *(linear.weight.data_ptr() for linear in linears if linear.weight is not None)])
        tied = None if stored is None else self._find_tied(stored)
        if tied is not None:
            assert tied.linear.weight is not None
            uses[tied.linear.weight.data_ptr()] -= 1
        kept = [linear for linear in linears if linear.weight is not None and uses[linear.weight.data_ptr()] > 1]
        late = choose_products(linears, form, kept, kernel)
        self._tied = tied
        self.drop_tied_matrix()
        self._check(ids, expected)
        return late

    def drop_tied_matrix(self) -> bool:
        """See ServedModel.drop_tied_matrix."""
        tied = self._tied
        if tied is None or tied.linear.weight is not None:
            return False
        self._base.set_submodule(tied.name, EmbeddingStandin(tied.rows, self.dtype))
        self._tied = None
        return True

    def __call__(self, inputs: StepInputs, kv_pool: KVPool, attention: AttentionBackend) -> torch.Tensor:
        """See ServedModel.__call__."""
        state = self._attention
        state.inputs, state.kv_pool, state.backend, state.calls = inputs, kv_pool, attention, 0
        try:
            found = self._base(
                input_ids=inputs.input_ids[None], position_ids=inputs.positions[None], use_cache=False
            ).last_hidden_state[0]
        finally:
            state.inputs = state.kv_pool = state.backend = None
        if state.calls != len(state.layers):
            raise RuntimeError(f"a step attended in {state.calls} layers, the trace in {len(state.layers)}")
        return found

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ServedModel.compute_logits."""
        if self.config.head == "labels":
            return hidden.new_empty(len(hidden), 0, dtype=torch.float32)
        self._given.hidden = hidden[None]
        logits = self._model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        self._given.hidden = None
        return logits.to(torch.float32).contiguous()

    def final_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ServedModel.final_states: transformers' base has normed them."""
        return hidden.to(torch.float32)

    def compute_labels(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ServedModel.compute_labels. The model's forward would score the last of these tokens alone."""
        return self._model.score(hidden).to(torch.float32)

    def adapter_targets(self) -> dict[str, Target]:
        """See ServedModel.adapter_targets: the linear layers of the base, under transformers' names for them. Those
        that compute some tokens only have no rows by which each token could have its adapter."""
        layers = []
        for name, linear in self._linears.items():
            modules, start = {}, 0
            for part, size in linear.parts.items():
                full = ".".join(filter(None, (name, part)))
                text_name = text_tensor_name(f"{full}.weight")
                if text_name is not None and full in self._of_all_tokens and full.startswith(f"{self._base_name}."):
                    modules[text_name.removesuffix(".weight")] = start, size
                start += size
            if modules:
                layers.append((modules, linear.in_features, None, linear.attach_updates))
        return module_targets(layers)

    def is_recordable(self, tokens: int) -> bool:
        """See ServedModel.is_recordable: transformers computes with torch."""
        return False

    def use_kernels(self, ops: SizedOps) -> None:
        """Compute norms and gates with the kernels of a device. To be called before `choose_products`."""
        for module in self._base.modules():
            if isinstance(module, GatedMLPStandin | NormStandin):
                try:
                    module.use_kernels(ops)
                except Exception as error:  # compiled code may raise anything
                    logger.warning("norms and gates are computed by torch: %s", describe_error(error))
                    return

    def _replace_layers(self, ids: torch.Tensor, expected: torch.Tensor) -> None:
        """Put stand-ins in the place of layers, each kind only if the model then still computes the same."""
        linears = self._replace_linears()
        rows = {name: set[int]() for names in linears.values() for name in names}
        hooks = [standin.register_forward_pre_hook(_notes_rows(rows[names[0]])) for standin, names in linears.items()]
        mixers = tuple(f"{self._base_name}.{name}." for name in find_mixers(self._base))
        error = self._difference(ids, expected)
        read = {standin: names for standin, names in linears.items() if standin.is_read}
        in_mixers = {standin: names for standin, names in linears.items() if names[0].startswith(mixers)}
        reason = "the modelling reads their weights"
        for doubtful in (read, in_mixers, linears):
            if doubtful is not read:
                if error is None:
                    break
                reason = describe_error(error)
            if doubtful:
                logger.info("%d matrix products are torch's: %s", len(doubtful), reason)
                self._restore_linears(doubtful)
                linears = {standin: names for standin, names in linears.items() if standin not in doubtful}
                error = self._difference(ids, expected)
        for hook in hooks:
            hook.remove()
        # The tokens of a mixer are in another order than those of the step.
        self._of_all_tokens = {
            name for name, seen in rows.items() if seen == set(CHECKED_CHUNKS) and not name.startswith(mixers)
        }
        for standin in linears:
            standin.originals.clear()
        self._linears = {names[0]: standin.linear for standin, names in linears.items()}
        for name, standin in self._replace_by(gated_mlp_standin, "MLPs", ids, expected).items():
            for part in standin.linear.parts:
                self._linears.pop(f"{self._base_name}.{name}.{part}", None)
            self._linears[f"{self._base_name}.{name}"] = standin.linear
        self._replace_by(norm_standin, "norms", ids, expected)

    def _difference(self, ids: torch.Tensor, expected: torch.Tensor) -> Exception | None:
        """What `_check` raises; None if the same comes out."""
        try:
            self._check(ids, expected)
        except Exception as error:  # modelling may do anything with the layers that it expects
            return error
        return None

    def _replace_by(
        self, make: Callable[[torch.nn.Module], Standin | None], what: str, ids: torch.Tensor, expected: torch.Tensor
    ) -> dict[str, Standin]:
        """Put what ``make`` makes in the place of the base's modules. Returns it by name in the base; nothing, if the
        model would compute something else. what: their kind, for the log."""
        all_names = _names_of_modules(self._base)
        made = {module: standin for module in all_names if (standin := make(module)) is not None}
        for module, standin in made.items():
            for name in all_names[module]:
                self._base.set_submodule(name, standin)
        try:
            self._check(ids, expected)
        except Exception as error:  # some modelling reads the weights of its layers itself
            logger.info("%s are transformers' own: %s", what, describe_error(error))
            for module in made:
                for name in all_names[module]:
                    self._base.set_submodule(name, module)
            return {}
        return {all_names[module][0]: standin for module, standin in made.items()}

    def _replace_linears(self) -> dict[LinearStandin, list[str]]:
        """Put stand-ins in the place of torch's linear layers, except those that the model keeps in another dtype:
        products and adapters have one. Returns all names of each stand-in in the whole model."""
        found: dict[LinearStandin, list[str]] = {}
        for prefix, part in ((f"{self._base_name}.", self._base), ("", self._model)):
            for module, names in _names_of_modules(part).items():
                if type(module) is torch.nn.Linear and module.weight.dtype == self.dtype:
                    standin = LinearStandin(module)
                    found[standin] = [prefix + name for name in names]
                    for name in names:
                        part.set_submodule(name, standin)
        return found

    def _find_tied(self, stored: Callable[[str], torch.Tensor | None]) -> _Tied | None:
        """The embedding that shares its matrix with one linear layer, if it does nothing but look rows up, and the
        checkpoint has the same rows."""
        for name, module in self._base.named_modules():
            if type(module) is not torch.nn.Embedding or module.max_norm is not None:
                continue
            weight = module.weight
            sharing = [
                linear
                for linear in self._linears.values()
                if linear.weight is not None and linear.weight.data_ptr() == weight.data_ptr()
            ]
            stored_name = text_tensor_name(f"{self._base_name}.{name}.weight")
            if len(sharing) != 1 or weight.device.type != "cpu" or stored_name is None:
                continue
            rows = stored(stored_name)
            if rows is not None and rows.shape == weight.shape and torch.equal(rows.to(weight.dtype), weight):
                return _Tied(name, sharing[0], rows)
        return None

    def _restore_linears(self, linears: dict[LinearStandin, list[str]]) -> None:
        for full, standin in [(name, standin) for standin, names in linears.items() for name in names]:
            inside = full.startswith(f"{self._base_name}.")
            part, name = (self._base, full[len(self._base_name) + 1 :]) if inside else (self._model, full)
            part.set_submodule(name, standin.originals[0])

    def _reference_logits(self, ids: torch.Tensor, base: str) -> torch.Tensor:
        """float32 [tokens, vocab], or [tokens, labels]: the logits of one sequence by transformers' own attention.
        base: name of the module that turns ids into hidden states."""
        self._model.set_attn_implementation("eager")
        if self.config.head == "labels":
            states = self._model.get_submodule(base)(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            return self.compute_labels(states)
        return self._model(input_ids=ids[None], use_cache=False).logits[0].float()

    def _check(self, ids: torch.Tensor, expected: torch.Tensor) -> None:
        """Compute the same sequence in chunks on small pools. Raises UnsupportedModelError if other logits come out:
        the model keeps something between its tokens that is no K or V, and no state."""
        device, tokens, found = ids.device, len(ids), []
        states = StatePool(2, self.state_shapes, device) if self._state_layers else None
        pool = MHAKVPool(num_tokens=tokens, page_size=1, shapes=kv_shapes(self.specs), dtype=self.dtype, device=device)
        backend = TorchNativeBackend(pool)
        compute = self.compute_labels if self.config.head == "labels" else self.compute_logits
        slots = torch.arange(1, tokens + 1, device=device)
        for number, (stop, new) in enumerate(zip(np.cumsum(CHECKED_CHUNKS).tolist(), CHECKED_CHUNKS, strict=True)):
            start = stop - new
            backend.plan(
                AttentionBatch(
                    req_to_token=torch.stack((slots, torch.zeros_like(slots))).int(),
                    host_rows=np.zeros(1, dtype=np.int32),
                    prefix_lens=np.full(1, start, dtype=np.int32),
                    extend_lens=np.full(1, stop - start, dtype=np.int32),
                    pad_row=1,
                )
            )
            inputs = StepInputs(ids[start:stop], torch.arange(start, stop, device=device), slots[start:stop])
            if states is not None:
                rows = StateRows(*(np.full(1, value, dtype=np.int32) for value in (number, 0, new, min(number + 1, 2))))
                inputs.states = plan_states(states, rows, rows.ends)
            found.append(compute(self(inputs, pool, backend)))
        difference = (torch.cat(found) - expected).abs().mean() / expected.abs().mean().clamp(min=1e-6)
        allowed = MEAN_DIFFERENCE[self.dtype]
        if not difference <= allowed:  # NaN is not
            raise UnsupportedModelError(
                f"{self.config.architecture}: on Baton's KV cache its logits differ from transformers' by "
                f"{float(difference):.2g} of their size on average ({allowed} is allowed): it keeps more than K and V"
            )

    def _states_of_step(self) -> StateBatch:
        inputs = self._attention.inputs
        assert inputs is not None and inputs.states is not None, "a step without states"
        return inputs.states

    def _trace(self) -> tuple[str, type[Any]]:
        """Run one token. Returns the name of the base, which turns ids into hidden states, and the type of what it
        returns."""
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self._model.device)
        found: list[tuple[str, type[Any]]] = []

        def note(name: str) -> Callable[[Any, Any, Any], None]:
            return lambda module, inputs, output: (
                found.append((name, type(output))) if hasattr(output, "last_hidden_state") else None
            )

        hooks = [module.register_forward_hook(note(name)) for name, module in self._model.named_modules() if name]
        architecture = self.config.architecture
        try:
            self._state_layers = trace_states(
                self._model, lambda: self._model(input_ids=ids, position_ids=ids, use_cache=False)
            )
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{architecture}: {error}") from error
        except Exception as error:
            raise UnsupportedModelError(
                f"{architecture}: transformers' code for it does not run with another attention function "
                f"({type(error).__name__}: {error})"
            ) from error
        finally:
            self._attention.seen.clear()
            for hook in hooks:
                hook.remove()
        text: Any = self._model.config.get_text_config(decoder=True)
        keeping = [kind for kind in getattr(text, "layer_types", None) or () if kind in STATE_LAYERS]
        least = len(keeping) or int(getattr(self._model, "_is_stateful", False))
        if len(self._state_layers) < least:
            raise UnsupportedModelError(f"{architecture} keeps recurrent states outside of transformers' cache")
        if not found or not (self._attention.layers or self._state_layers):
            raise UnsupportedModelError(f"{architecture}: transformers' code for it has attention of its own")
        return found[-1]  # the outermost, as it ends last


def _notes_rows(seen: set[int]) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
    """A hook that adds the number of rows of each call."""
    return lambda _, inputs: seen.add(inputs[0].shape[:-1].numel())


def _names_of_modules(root: torch.nn.Module) -> dict[torch.nn.Module, list[str]]:
    """All modules inside of this one, and the names of each: layers may share modules."""
    found: dict[torch.nn.Module, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        if name:
            found.setdefault(module, []).append(name)
    return found


@dataclass(frozen=True, slots=True)
class _Tied:
    """An embedding and the head that has the same matrix."""

    name: str
    """Of the embedding, in the base."""
    linear: Linear
    rows: torch.Tensor
    """[vocab, size], mapped from the checkpoint."""


class _Given(torch.nn.Module):
    """Stands for a model's base: returns the hidden states that it is given. Heads may read numbers of the base."""

    hidden: torch.Tensor | None = None
    """[1, rows, hidden]"""

    def __init__(self, kind: type[Any], base: torch.nn.Module) -> None:
        super().__init__()
        self._kind, self._numbers = kind, {name: value for name, value in vars(base).items() if _is_number(value)}

    def __getattr__(self, name: str) -> Any:
        numbers = vars(self).get("_numbers", {})
        return numbers[name] if name in numbers else super().__getattr__(name)

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._kind(last_hidden_state=self.hidden)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of a step. query: [1, heads, tokens, size]; key, value: of KV heads. Returns
    [1, tokens, heads, size of values]."""
    state: _Attention = module.baton_attention
    inputs, pool, backend = state.inputs, state.kv_pool, state.backend
    assert inputs is not None and pool is not None and backend is not None, "attention outside of a step"
    layer = state.layers[state.calls]
    state.calls += 1
    number = layer.spec.layer_id
    if layer.stores:
        if inputs.arrivals is not None:
            inputs.arrivals.wait_layer(number)
        slots = inputs.slots_for(layer.spec)
        store_rows(pool.k[number], slots, key[0].transpose(0, 1))
        store_rows(pool.v[number], slots, value[0].transpose(0, 1))
    q = query[0].transpose(0, 1)
    if q.stride()[1:] != (layer.spec.head_dim, 1):
        q = q.contiguous()
    return backend.run(layer.spec, q, layer.sinks)[None], None


def attend_traced(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of a trace: notes what a layer does. A single token attends to itself alone."""
    state: _Attention = module.baton_attention
    name = type(module).__name__
    if position_bias is not None or is_causal is False or not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"{name} has a position bias or is not causal")
    if isinstance(attention_mask, str):
        raise UnsupportedModelError(f"the attention mask of {name} is {attention_mask} (chunked attention?)")
    if attention_mask is not None and not isinstance(attention_mask, MaskRule):
        raise UnsupportedModelError(f"{name} makes a mask of its own")
    window = attention_mask.window if isinstance(attention_mask, MaskRule) else sliding_window
    heads, kv_heads = query.shape[1], key.shape[1]
    same = [number for number, seen in enumerate(state.seen) if _is_same(seen[0], key) and _is_same(seen[1], value)]
    state.seen.append((key, value))
    stores = not same
    number = state.layers[same[0]].spec.layer_id if same else sum(layer.stores for layer in state.layers)
    spec = AttentionSpec(
        layer_id=number,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=key.shape[3],
        scale=float(query.shape[3] ** -0.5 if scaling is None else scaling),
        sliding_window=window,
        value_dim=0 if value.shape[3] == key.shape[3] else value.shape[3],
        logit_cap=float(softcap) if softcap else None,
        has_sinks=s_aux is not None,
    )
    sinks = None if s_aux is None else s_aux.detach().float().reshape(-1)
    state.layers.append(_Layer(spec, sinks, stores))
    return value.transpose(1, 2).repeat_interleave(heads // kv_heads, dim=2), None


def _is_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()


def trace_mask(
    *, mask_function: Callable[..., torch.Tensor], config: Any = None, local_size: int | None = None, **_: Any
) -> MaskRule | str:
    """The mask function of a trace: the rule that transformers' mask follows, or `OTHER_MASK`. local_size: its window
    or chunk, if transformers says so."""
    windows = {local_size, *(getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))}
    zero = torch.tensor(0)

    def seen(position: int) -> torch.Tensor:
        keys = torch.arange(position + 2)
        return mask_function(zero, zero, torch.tensor(position), keys).expand(len(keys))

    def follows(window: int | None, position: int) -> bool:
        keys = torch.arange(position + 2)
        expected = keys <= position
        if window is not None:
            expected &= keys > position - window
        return bool((seen(position) == expected).all())

    sizes = sorted(int(window) for window in windows if window)
    edges = {0, 1, 2, 100} | {edge for size in sizes for edge in (size - 1, size, size + 1, 2 * size, 3 * size + 1)}
    positions = [edge for edge in sorted(edges) if 0 <= edge <= LARGEST_MASK]
    for window in (None, *sizes):
        if all(follows(window, position) for position in positions):
            return MaskRule(window)
    return OTHER_MASK


def load_transformers_model(
    folder: Path,
    *,
    context_length: int,
    dtype: Callable[[ServedConfig], torch.dtype],
    device: torch.device,
    load_format: str,
    trust_remote_code: bool,
) -> TransformersModel:
    """Load a folder with transformers, straight from its safetensors. context_length: 0 takes the model's. dtype:
    chooses the type of weights and KV.

    Raises UnsupportedModelError if transformers does not know the model or it cannot be served, ModelLoadError if its
    files are wrong."""
    try:
        import transformers
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise UnsupportedModelError(f"transformers cannot be imported ({error}); pip install transformers") from error
    transformers.AttentionInterface.register(SERVING, attend)
    transformers.AttentionInterface.register(TRACING, attend_traced)
    AttentionMaskInterface.register(TRACING, trace_mask)
    if trust_remote_code and any(folder.glob("*.py")):
        logger.warning("--trust-remote-code: running Python code that came with the model in %s", folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of code that is not ours
            raw = transformers.AutoConfig.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
    except Exception as error:
        raise UnsupportedModelError(f"transformers {transformers.__version__} cannot read it: {error}") from error
    config = read_config(raw, folder, context_length)
    kind = _model_class(raw, config.architecture, trust_remote_code)
    layer_types = set(getattr(raw.get_text_config(decoder=True), "layer_types", None) or ())
    if sparse := sorted(layer_types & SPARSE_LAYERS):
        raise UnsupportedModelError(
            f"{config.architecture} has sparse attention ({', '.join(sparse)}): its layers choose the tokens that they "
            "attend to, and keep more than K and V for that, which is not served yet"
        )
    if getattr(raw, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{config.architecture} has an encoder; decoder-only models are served")
    chosen = dtype(config)
    options: dict[str, Any] = {"attn_implementation": TRACING, "dtype": chosen}
    info: dict[str, Any] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of code that is not ours
            if load_format == "dummy":
                torch.manual_seed(0)
                model = kind._from_config(raw, **options)
            else:
                found: Any = kind.from_pretrained(
                    folder, config=raw, local_files_only=True, use_safetensors=True, output_loading_info=True, **options
                )
                model, info = found
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, KeyError) and TRACING in str(error):  # from the model's own table of attention classes
            raise UnsupportedModelError(
                f"{config.architecture}: transformers' code for it has attention of its own"
            ) from error
        raise UnsupportedModelError(f"transformers cannot load it: {describe_error(error)}") from error
    wrong = {name: sorted(map(str, info.get(f"{name}_keys") or ())) for name in ("missing", "mismatched")}
    if any(wrong.values()):
        problems = "; ".join(f"{len(keys)} {name}: {', '.join(keys[:8])}" for name, keys in wrong.items() if keys)
        raise ModelLoadError(f"the weights in {folder} do not fit its config.json: {problems}")
    if surplus := sorted(map(str, info.get("unexpected_keys") or ())):
        logger.warning("%d tensors of the checkpoint are not used: %s", len(surplus), ", ".join(surplus[:8]))
    model.to(device)
    fix_rope(model, config.context_length)
    return TransformersModel(model, config, chosen)


STATE_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""Types of layers that keep states."""

SPARSE_LAYERS = {
    "indexed_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "minimax_m3_sparse",
}
"""Types of layers with an index of their keys (DeepSeek V3.2, GLM 5), or with compressed ones (DeepSeek V4)."""

ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Endings of the names of classes that compute logits of the next token."""

CLASSIFIER = "ForSequenceClassification"
"""Ending of classes with a head of classes, ``score``, behind the base."""


def _model_class(raw: Any, architecture: str, trust_remote_code: bool) -> Any:
    """The class of transformers, or of the model's own code. Raises UnsupportedModelError."""
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    reference = (getattr(raw, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if trust_remote_code and reference:
        return get_class_from_dynamic_module(reference, raw._name_or_path)
    if architecture.endswith(ENDINGS) and (found := getattr(transformers, architecture, None)) is not None:
        return found
    if architecture.endswith(CLASSIFIER):
        found = getattr(transformers, architecture, None)
        if found is None:
            raise UnsupportedModelError(f"transformers {transformers.__version__} has no {architecture}")
        return found
    mapping: Any = transformers.AutoModelForCausalLM._model_mapping
    if (found := mapping.get(type(raw), None)) is None:
        hint = "; its own code runs with --trust-remote-code" if reference else ""
        raise UnsupportedModelError(f"transformers {transformers.__version__} has no {architecture}{hint}")
    return found


def read_config(raw: Any, folder: Path, context_length: int) -> ServedConfig:
    """raw: a configuration of transformers. Raises ModelLoadError."""
    text = raw.get_text_config(decoder=True)
    source = f"{folder / 'config.json'}"
    if getattr(raw, "quantization_config", None):
        raise ModelLoadError(f"{source}: quantised weights are not supported; use the bf16, f16 or f32 checkpoint")
    limit = getattr(text, "max_position_embeddings", None)
    if not limit and not context_length:
        raise ModelLoadError(f"{source} names no longest context; set --context-length")
    limit = int(limit or context_length)
    if not 0 <= context_length <= limit:
        raise ModelLoadError(
            f"--context-length {context_length} is outside 1..{limit}: the model was trained on {limit} positions "
            "(max_position_embeddings); lower it, or pass 0 to take the model's"
        )
    eos = _generation(folder).get("eos_token_id", getattr(raw, "eos_token_id", None) or text.eos_token_id)
    names = raw.architectures or [type(raw).__name__.removesuffix("Config")]
    dtype = str(getattr(text, "dtype", None) or getattr(raw, "dtype", None) or "float32").removeprefix("torch.")
    if dtype not in ("float32", "float16", "bfloat16"):
        raise ModelLoadError(f"{source}: dtype {dtype!r} is not supported; supported are float32, float16, bfloat16")
    return ServedConfig(
        architecture=names[0],
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        dtype=dtype,
        context_length=context_length or limit,
        max_position_embeddings=limit,
        bos_token_id=text.bos_token_id,
        eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
        fingerprint=raw.to_json_string(use_diff=False),
        embedding=read_embedding_config(folder),
        **_head_of(raw, names[0], source),
    )


def _head_of(raw: Any, architecture: str, source: str) -> dict[str, Any]:
    """The fields of a ServedConfig that say what stands on the decoder. raw: a configuration of transformers."""
    if not architecture.endswith(CLASSIFIER):
        return {}
    labels = tuple(str(raw.id2label[label]) for label in range(raw.num_labels))
    return {
        "head": "labels",
        "labels": labels,
        "label_activation": label_activation(raw.to_dict(), len(labels), source),
    }


def _generation(folder: Path) -> dict[str, Any]:
    return {name: value for name, value in load_generation_config(folder).items() if value is not None}


def fix_rope(model: torch.nn.Module, context_length: int) -> None:
    """Rotary embeddings of type dynamic and longrope choose their frequencies by the longest sequence of a step, so
    that a row would depend on its batch. Choose once: those of ``context_length``, as vLLM does. Served with a context
    no longer than the original one, a model computes what it was first trained on."""
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        if not isinstance(types, (str, dict)):
            continue
        fixed = {}
        for layer_type, kind in types.items() if isinstance(types, dict) else [(None, types)]:
            fixed[layer_type] = kind
            if "dynamic" in kind or kind == "longrope":
                parameters: Any = module.config.rope_parameters  # type: ignore[union-attr]
                original = (parameters if layer_type is None else parameters[layer_type]).get(
                    "original_max_position_embeddings"
                ) or getattr(module, "original_max_seq_len", context_length)
                if context_length > original:
                    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

                    device: Any = next(module.buffers()).device
                    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](
                        module.config, device, seq_len=context_length, layer_type=layer_type
                    )
                    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
                    module.register_buffer(name, frequencies, persistent=False)
                fixed[layer_type] = "fixed"
        module.rope_type = fixed if isinstance(types, dict) else fixed[None]  # type: ignore[assignment]
