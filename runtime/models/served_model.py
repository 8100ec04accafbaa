"""What the model runner needs of a model, whatever computes it."""

from __future__ import annotations

from typing import Protocol

import torch

from ...attention.backend import AttentionBackend, AttentionSpec
from ...memory_pool.kv_pool import KVPool
from ...memory_pool.state_pool import StateShape
from ..layers.low_rank import Target
from ..layers.step_inputs import StepInputs


class ServedModel(Protocol):
    """A decoder with its weights: `models.decoder.Decoder`, or transformers' own (`runner.transformers_model`)."""

    @property
    def specs(self) -> list[AttentionSpec]:
        """The attention layers, in the order in which a step computes them."""
        ...

    @property
    def state_shapes(self) -> list[StateShape]:
        """What each layer with a recurrent state keeps of a sequence, in the order in which a step computes them; empty
        for models whose layers keep K and V alone."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        ...

    def __call__(self, inputs: StepInputs, kv_pool: KVPool, attention: AttentionBackend) -> torch.Tensor:
        """Compute a step, which ``attention`` has planned: write K and V of its tokens to kv_pool and return hidden
        states [tokens, hidden], as `compute_logits` takes them. ``attention`` reads the same kv_pool. A layer whose K
        and V are still on their way waits for them (`StepInputs.arrivals`). Layers with states find them in
        `StepInputs.states`, which is set if there are such layers."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of some tokens [rows, hidden] -> float32 [rows, vocab_size]."""
        ...

    def final_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of some tokens [rows, hidden], as a step returns them -> float32, the same shape: the states
        that the head reads, transformers' ``last_hidden_state``."""
        ...

    def compute_labels(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of some tokens [rows, hidden] -> float32 [rows, labels]: logits of the classification head, of
        a model that has one."""
        ...

    def adapter_targets(self) -> dict[str, Target]:
        """The linear layers that adapters may update, by module name in a checkpoint. To be asked once the weights are
        loaded, and before they are repacked."""
        ...

    def is_recordable(self, tokens: int) -> bool:
        """True if a step of so many tokens consists of calls that attention's team can record on a CPU."""
        ...

    def drop_tied_matrix(self) -> bool:
        """To be called after late trials of products. If a tied head has repacked the matrix that it shares with the
        embedding, look tokens up in the checkpoint's file from now on, so that no matrix is kept twice. Returns True if
        they were looked up elsewhere until now."""
        ...
