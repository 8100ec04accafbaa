"""Steps over KV that is still on its way from the host compute what they would have computed anyway.

The copy of a layer begins when the model asks for that layer: a model that does not ask reads NaN.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.radix.tiers.host_tier import TierCopy
from baton.runtime.config import ModelArgs
from baton.runtime.kv_transfer.thread_transfer import ThreadTransfers
from baton.runtime.kv_transfer.transfer import TransferError
from baton.runtime.models.decoder import Decoder
from baton.runtime.runner.model_runner import ModelRunner
from baton.scheduler.batch import KVCopies
from tests.doubles.cpu_graphs import count_replays, graph_backends
from tests.doubles.held_pool import HeldPool
from tests.doubles.model_driver import DrivenSequence, ModelDriver

LAYERS, PREFIX = 3, 32
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
}


class AskedFor(ThreadTransfers):
    """Copies a layer when it is asked for, and notes that."""

    def __init__(self, pool: HeldPool) -> None:
        super().__init__(pool, lambda: None)
        self.held = pool
        self.asked: list[int] = []
        self.permitted = 0

    def wait_layer(self, layer: int) -> None:
        self.asked.append(layer)
        if layer >= self.permitted:
            self.held.permit(layer + 1 - self.permitted)
            self.permitted = layer + 1
        super().wait_layer(layer)


class Scene:
    """A runner with a prefix of 32 tokens that only the host has, and copies that wait for permits."""

    def __init__(self, folder: Path, page_size: int, **options: Any) -> None:
        self.runner = ModelRunner(
            ModelArgs(model_path=str(folder), load_format="dummy", device="cpu"),
            context_length=0,
            num_rows=4,
            page_size=page_size,
            max_total_tokens=512,
            backends=options.pop("backends", None),
        )
        self.driver = ModelDriver(self.runner, page_size=page_size)
        self.pool = HeldPool(self.runner.kv_pool, 64, **options)
        self.transfers = AskedFor(self.pool)
        self.prefix = self.driver.open(np.arange(PREFIX) % 50)
        self.driver.step([(self.prefix, PREFIX)])
        self.device_slots = self.driver.pool.rows[self.prefix.row, :PREFIX].copy()
        self.host_slots = np.arange(page_size, page_size + PREFIX, dtype=np.int32)
        self.pool.store(self.device_slots, self.host_slots)

    @torch.inference_mode()
    def lose(self) -> None:
        """Overwrite the prefix on the device, and bring it back layer by layer, as the model asks."""
        for layer in (*self.runner.kv_pool.k, *self.runner.kv_pool.v):
            layer[torch.from_numpy(self.device_slots).long()] = torch.nan
        self.pool.hold()
        self.runner.transfers = self.transfers
        self.transfers.order_copies([TierCopy(1, False, self.device_slots, self.host_slots)])

    def follow(self, ids: list[int]) -> DrivenSequence:
        """A sequence that goes on behind the prefix, which it shares."""
        sequence = self.driver.open([*self.prefix.ids.tolist(), *ids])
        self.driver.pool.write(sequence.row, 0, self.device_slots)
        sequence.computed = PREFIX
        return sequence


@pytest.fixture
def make_scene(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    scenes: list[Scene] = []

    def make(page_size: int = 1, **options: Any) -> Scene:
        scenes.append(Scene(tmp_path, page_size, **options))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.pool.let_go()
        assert scene.transfers.close(60)


@pytest.mark.parametrize("page_size", [1, 16])
def test_each_layer_waits_for_its_own_load(make_scene: Callable[..., Scene], page_size: int) -> None:
    scene = make_scene(page_size)
    expected = scene.driver.step([(scene.follow([3, 1, 4]), 3)]).logits
    scene.lose()
    found = scene.driver.step([(scene.follow([3, 1, 4]), 3)]).logits
    assert torch.equal(found, expected) and scene.transfers.asked == list(range(LAYERS))
    assert not scene.transfers.loading
    assert torch.equal(scene.driver.step([(scene.follow([3, 1, 4]), 3)]).logits, expected)
    assert scene.transfers.asked == list(range(LAYERS)), "no layer is waited for without a load"


def test_only_the_requested_layers_must_be_loaded(make_scene: Callable[..., Scene]) -> None:
    """While layer 1 is computed, layer 2 is on its way; what comes before attention waits for nothing."""
    scene = make_scene()
    scene.lose()
    seen: list[int] = []
    assert isinstance(scene.runner._model, Decoder)
    for layer in scene.runner._model.layers:
        attention: Any = layer.self_attn

        def watch(x: torch.Tensor, project: Callable = attention.qkv_proj) -> torch.Tensor:
            seen.append(len(scene.transfers.asked))
            return project(x)

        attention.qkv_proj = watch
    scene.driver.step([(scene.follow([3]), 1)])
    assert seen == list(range(LAYERS))


def test_device_copies_wait_for_all_layers(make_scene: Callable[..., Scene]) -> None:
    """A fork takes its tokens from slots that are being loaded."""
    scene = make_scene()
    expected = scene.driver.step([(scene.follow([3, 1]), 2)]).logits
    scene.lose()
    child, own = scene.follow([3, 1]), scene.device_slots.copy()
    own[-1] = 500
    scene.driver.pool.write(child.row, 0, own)
    copies = KVCopies(source=scene.device_slots[-1:], target=own[-1:])
    assert torch.equal(scene.driver.step([(child, 2)], copies=[copies]).logits, expected)


def test_graphs_are_not_replayed_during_loads(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(backends=graph_backends())
    replays = count_replays(scene.runner)
    expected = scene.driver.step([(scene.follow([3]), 1)]).logits
    assert replays.total() == 1
    scene.lose()
    torch.testing.assert_close(scene.driver.step([(scene.follow([3]), 1)]).logits, expected)
    assert replays.total() == 1 and not scene.transfers.loading
    scene.driver.step([(scene.follow([3]), 1)])
    assert replays.total() == 2


def test_failed_load_fails_its_step_but_not_the_next(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    expected = scene.driver.step([(scene.follow([3]), 1)]).logits
    scene.pool.errors["load", 1, 1] = RuntimeError("a broken line")
    scene.lose()
    with pytest.raises(TransferError, match="a broken line"):
        scene.driver.step([(scene.follow([3]), 1)])
    assert [copy.ok for copy in scene.transfers.poll()] == [False]
    other = scene.driver.open([*scene.prefix.ids.tolist(), 3])
    torch.testing.assert_close(scene.driver.step([(other, PREFIX + 1)]).logits, expected)
