"""The registry of adapters, and what their weights add in the layers, without peft: adapters are written by hand."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from baton.runtime.layers.linear import Linear
from baton.runtime.layers.low_rank import StepAdapters, module_targets
from baton.runtime.lora.adapter_config import AdapterError
from baton.runtime.lora.adapter_files import read_adapter
from baton.runtime.lora.adapter_names import AdapterNames, check_adapter_name
from baton.runtime.lora.adapter_weights import AdapterWeights
from baton.runtime.lora.adapters import Adapters
from baton.runtime.messages import LoadAdapter
from baton.scheduler.outcome import RequestRefused
from tests.doubles.local_worker import LocalWorker
from tests.doubles.tiny_models import save_reference

IN, PARTS, RANK = 6, {"q_proj": 4, "k_proj": 2}, 3


def write_adapter(folder: Path, seed: int, *, alpha: float = 6.0, **config: Any) -> dict[str, torch.Tensor]:
    """Write an adapter of both parts; returns its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for part, size in PARTS.items():
        stem = f"base_model.model.layer.{part}"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, IN, generator=generator)
        tensors[f"{stem}.lora_B.weight"] = torch.randn(size, RANK, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": alpha, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return tensors


class Rig:
    """One layer of two parts, whose outputs are in another order than in the checkpoint."""

    def __init__(self, order: tuple[int, ...] = (2, 0, 1, 3, 5, 4), **options: Any) -> None:
        torch.manual_seed(1)
        self.layer = Linear(IN, PARTS, bias=False, dtype=torch.float32, device=torch.device("cpu"))
        assert self.layer.weight is not None
        self.layer.weight.normal_()
        self.order = torch.tensor(order)
        self.layer.reorder_outputs(self.order)
        modules, start = {}, 0
        for part, size in PARTS.items():
            modules[f"layer.{part}"] = start, size
            start += size
        targets = module_targets([(modules, IN, self.layer.output_order, self.layer.attach_updates)])
        self.weights = AdapterWeights(targets, dtype=torch.float32, device=torch.device("cpu"))
        self.woken = threading.Event()
        self.adapters = Adapters(self.weights, wake=self.woken.set, **options)

    def outputs(self, x: torch.Tensor, keys: list[str], lens: list[int]) -> torch.Tensor:
        """What the layer computes, in the checkpoint's order."""
        self.weights.begin_step(keys, np.array(lens))
        y = self.layer(x)
        self.weights.end_step()
        return y[:, self.order.argsort()]


def slow_outputs(plain: torch.Tensor, x: torch.Tensor, tensors: dict[str, torch.Tensor], scale: float) -> torch.Tensor:
    """plain + scale B A x, part by part."""
    added = []
    for part in PARTS:
        a, b = (tensors[f"base_model.model.layer.{part}.lora_{factor}.weight"] for factor in "AB")
        added.append((x @ a.T @ b.T) * scale)
    return plain + torch.cat(added, dim=1)


@pytest.mark.parametrize("rows", [["a"], ["a", "a"], ["", "a"], ["a", "", "b", "a"], ["b", "a"], ["", ""]])
@pytest.mark.parametrize("order", [(2, 0, 1, 3, 5, 4), (0, 4, 3, 5, 2, 1), (4, 0, 5, 1, 3, 2)])
def test_each_row_gets_its_adapter(tmp_path: Path, rows: list[str], order: tuple[int, ...]) -> None:
    """Also where the outputs of one part lie between those of another."""
    rig = Rig(order)
    tensors = {name: write_adapter(tmp_path / name, seed) for seed, name in enumerate("ab")}
    lens = [3, 1, 2, 1][: len(rows)]
    x = torch.randn(sum(lens), IN, generator=torch.Generator().manual_seed(3))
    plain = rig.outputs(x, [""] * len(rows), lens)
    for name in "ab":
        rig.adapters.load(name, str(tmp_path / name))
    found = rig.outputs(x, [rig.adapters.key_of(name) for name in rows], lens)
    start = 0
    for name, length in zip(rows, lens, strict=True):
        own = slice(start, start + length)
        expected = slow_outputs(plain[own], x[own], tensors[name], 2.0) if name else plain[own]
        torch.testing.assert_close(found[own], expected)
        start += length
    assert torch.equal(rig.outputs(x, [""] * len(rows), lens), plain), "nothing is left of a step"


def test_step_with_an_adapter_that_is_gone_fails(tmp_path: Path) -> None:
    """Its requests would be computed by the model alone."""
    rig = Rig()
    write_adapter(tmp_path / "a", 0)
    rig.adapters.load("a", str(tmp_path / "a"))
    key = rig.adapters.key_of("a")
    rig.adapters.unload("a")
    rig.adapters.drop_unused({key})
    assert rig.adapters.has_unnamed and rig.weights.keys == {key}, "a live request has it"
    rig.outputs(torch.zeros(1, IN), [key], [1])
    rig.adapters.drop_unused(set())
    assert not rig.adapters.has_unnamed and rig.weights.keys == set()
    with pytest.raises(RuntimeError, match="not installed"):
        rig.weights.begin_step([key], np.array([1]))


def test_names_of_the_same_contents_share_weights(tmp_path: Path) -> None:
    rig = Rig()
    for name in ("a", "b", "other"):
        write_adapter(tmp_path / name, int(name == "other"))
    for name in ("a", "b", "other"):
        rig.adapters.load(name, str(tmp_path / name))
    assert rig.adapters.key_of("a") == rig.adapters.key_of("b") != rig.adapters.key_of("other")
    rig.adapters.unload("a")
    rig.adapters.drop_unused(set())
    assert len(rig.weights.keys) == 2
    with pytest.raises(RequestRefused, match=r"no adapter 'a'; loaded: 'b', 'other'"):
        rig.adapters.key_of("a")


def load(rig: Rig, name: str, path: Path) -> Exception | None:
    """Load while running; returns why it failed."""
    rig.woken.clear()
    rig.adapters.begin_load(LoadAdapter(call_id=1, name=name, path=str(path)))
    assert rig.woken.wait(60)
    ((call, error),) = rig.adapters.take_loaded()
    assert call.name == name
    return error


def test_adapters_are_read_in_a_thread(tmp_path: Path) -> None:
    rig = Rig(max_adapters=1)
    write_adapter(tmp_path / "a", 0)
    assert load(rig, "a", tmp_path / "a") is None
    first = rig.adapters.key_of("a")
    assert load(rig, "a", tmp_path / "a") is None, "it is there already"
    with pytest.raises(AdapterError, match="the maximum"):
        rig.adapters.begin_load(LoadAdapter(call_id=1, name="b", path=str(tmp_path)))
    rig.adapters.unload("a")
    assert isinstance(load(rig, "a", tmp_path / "nowhere"), AdapterError)
    write_adapter(tmp_path / "a", 5)  # other contents in the same folder
    assert load(rig, "a", tmp_path / "a") is None
    assert rig.adapters.key_of("a") != first
    write_adapter(tmp_path / "a", 6)
    error = load(rig, "a", tmp_path / "a")
    assert isinstance(error, AdapterError) and "already" in str(error), "not exchanged behind the name's back"


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({"use_rslora": True}, 6 / 3**0.5),
        ({"alpha_pattern": {"q_proj": 6, "k_proj": 6}, "alpha": 1.0}, 2.0),
        ({"alpha_pattern": {"proj": 9, "layer": 9}}, 2.0),
        ({"alpha_pattern": {r"layer\.[qk]_proj": 3}}, 1.0),
    ],
)
def test_scale(tmp_path: Path, changes: dict[str, Any], scale: float) -> None:
    rig = Rig()
    tensors = write_adapter(tmp_path, 0, **changes)
    x = torch.randn(2, IN, generator=torch.Generator().manual_seed(3))
    plain = rig.outputs(x, [""], [2])
    rig.adapters.load("a", str(tmp_path))
    torch.testing.assert_close(rig.outputs(x, [rig.adapters.key_of("a")], [2]), slow_outputs(plain, x, tensors, scale))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"bias": "all"}, "bias is 'all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "the base model was changed"),
        ({"init_lora_weights": "lora_ga"}, "the base model was changed"),
        ({"kasa_config": {"beta": 1e-4}}, "KaSA leaves out a part of the base model's weights"),
        ({"monteclora_config": {"num_samples": 4}}, "factors are drawn at random"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is {'nblocks': 2}: its factors are block-diagonal"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "no linear layer"),
        ({"fan_in_fan_out": True}, "transposed"),
        ({"trainable_token_indices": [1]}, "rows of the embedding"),
        ({"peft_type": None}, "only LORA"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": True}, "lora_alpha is True"),
        ({"lora_alpha": 1e400}, "lora_alpha is inf"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "alpha_pattern"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'"),
        ({"alpha_pattern": {"(": 1}}, "no pattern"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern"),
        ({"alpha_pattern": 7}, "alpha_pattern is 7"),
    ],
)
def test_settings_that_change_more_are_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    write_adapter(tmp_path, 0, **settings)
    with pytest.raises(AdapterError, match=r"adapter .a.: .*adapter_config\.json") as refused:
        Rig().adapters.load("a", str(tmp_path))
    assert reason in str(refused.value)


def test_targets_are_linear_layers_without_experts(tmp_path: Path) -> None:
    save_reference("glm4_moe", tmp_path)
    worker = LocalWorker(tmp_path)
    targets = worker.adapters._weights._targets
    kinds = {name.split(".", 3)[3] for name in targets}
    attention = {f"self_attn.{part}_proj" for part in "qkvo"}
    dense = {f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    shared = {f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
    assert kinds == attention | dense | shared
    for target in (target for name, target in targets.items() if name.endswith("q_proj")):
        ((_, numbers),) = target.parts
        assert numbers is not None, "rotated outputs are reordered"


def test_names() -> None:
    for name in ("a", "org/sql-lora", "A.b_c@1"):
        check_adapter_name(name)
    for name in ("", ".", "..", "a/..", "../a", "a:b", "a b", "/a", "a/", "a//b", "x" * 300, "\u00e9", "a\n"):
        with pytest.raises(AdapterError):
            check_adapter_name(name)
    names = AdapterNames()
    names.set_adapters([{"name": "a"}, {"name": "b"}])
    names.set_adapters([{"name": "b"}])
    assert "b" in names and "a" not in names and names.was_unloaded("a") and not names.was_unloaded("b")


def test_rows_of_one_adapter_need_no_index() -> None:
    step = StepAdapters()
    step.set_rows(["a", "a"], np.array([2, 3]), torch.device("cpu"))
    assert step.parts == [("a", None)]


def test_numbers_are_checked_in_the_type_that_they_will_have(tmp_path: Path) -> None:
    """Finite in the file, and infinite once they are scaled, or rounded to float16."""
    rig = Rig()
    write_adapter(tmp_path / "scaled", 0, alpha=9e37)
    tensors = {key: tensor * 1e3 for key, tensor in write_adapter(tmp_path / "half", 0, alpha=2e3).items()}
    save_file(tensors, tmp_path / "half" / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"too large for torch\.float32"):
        save_file({key: t * 1e3 for key, t in tensors.items()}, tmp_path / "scaled" / "adapter_model.safetensors")
        rig.adapters.load("a", str(tmp_path / "scaled"))
    rig.adapters.load("a", str(tmp_path / "half"))
    rig.weights._dtype = torch.float16
    with pytest.raises(AdapterError, match=r"too large for torch\.float16"):
        rig.adapters.load("b", str(tmp_path / "half"))


def test_module_that_is_in_a_file_twice_is_refused(tmp_path: Path) -> None:
    """With and without peft's prefix: either could be meant."""
    tensors = write_adapter(tmp_path, 0)
    name = "base_model.model.layer.q_proj.lora_A.weight"
    save_file(
        tensors | {name.removeprefix("base_model.model."): tensors[name].clone()},
        tmp_path / "adapter_model.safetensors",
    )
    with pytest.raises(AdapterError, match=r"holds lora_A of .*q_proj twice"):
        Rig().adapters.load("a", str(tmp_path))


def test_patterns_are_matched_with_the_names_of_the_file(tmp_path: Path) -> None:
    """In an adapter of a multimodal model they are anchored at the name that the text part has there."""
    tensors = write_adapter(tmp_path, 0, alpha_pattern={"^language_model.layer.q_proj": 12.0})
    renamed = {name.replace(".layer.", ".language_model.layer."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "adapter_model.safetensors")
    factors = read_adapter(tmp_path).factors
    for part, scale in (("q_proj", 4.0), ("k_proj", 2.0)):
        (found,) = [factors[module] for module in factors if module.endswith(part)]
        torch.testing.assert_close(found.b, tensors[f"base_model.model.layer.{part}.lora_B.weight"] * scale)


def test_file_that_is_saved_again_meanwhile_changes_nothing(tmp_path: Path) -> None:
    """A mapped file that loses its end kills the process that reads it, so this is another one."""
    tensors = write_adapter(tmp_path, 0)
    expected = sum(float(tensor.sum()) for name, tensor in tensors.items() if "lora_A" in name)
    program = (
        "import os, sys; from baton.runtime.lora.adapter_files import read_adapter; found = read_adapter(sys.argv[1]); "
        "os.truncate(sys.argv[1] + '/adapter_model.safetensors', 0); "
        "print(sum(float(factors.a.sum()) for factors in found.factors.values()))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(expected, abs=1e-4)


def test_file_that_git_has_left_is_named(tmp_path: Path) -> None:
    write_adapter(tmp_path, 0)
    (tmp_path / "adapter_model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(AdapterError, match="is a Git LFS pointer, not the weights"):
        Rig().adapters.load("a", str(tmp_path))


def test_large_config_is_refused_as_such(tmp_path: Path) -> None:
    write_adapter(tmp_path, 0, comment="x" * (1 << 20))
    with pytest.raises(AdapterError, match="larger than"):
        Rig().adapters.load("a", str(tmp_path))


def test_strange_files_are_refused(tmp_path: Path) -> None:
    rig, tensors = Rig(), write_adapter(tmp_path / "f8", 0)
    save_file({key: t.to(torch.float8_e4m3fn) for key, t in tensors.items()}, tmp_path / "f8/adapter_model.safetensors")
    for path, reason in (
        (tmp_path / "f8", "no matrix of floats"),
        ("x" * 5000, "cannot be looked at"),
        ("a\0", "adapter"),
    ):
        with pytest.raises(AdapterError, match=reason):
            rig.adapters.load("a", str(path))
