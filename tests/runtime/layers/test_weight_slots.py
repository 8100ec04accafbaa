"""Linear layers, embeddings and heads with weights that stay in few bits."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from baton.runtime.layers.embedding import Embedding, LMHead
from baton.runtime.layers.linear import Linear
from baton.runtime.layers.norm import RMSNorm
from baton.runtime.layers.ops import TORCH_OPS
from baton.runtime.layers.quantize import quantize
from baton.runtime.layers.quantized_weights import INT4, INT8, Float8Weight, QuantForm, QuantizedWeight
from baton.runtime.layers.weight_slots import ExpertsSlot, UnreadSlot, WeightSlot, pick_outputs, widened

CPU = torch.device("cpu")


def some_weight(out: int, into: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(out, into, generator=torch.Generator().manual_seed(seed))


class Twin:
    """Stands for the kernels: multiplies by the numbers that packed weights stand for."""

    def __init__(self, *, knows: tuple[int, ...] = (4, 8)) -> None:
        """knows: bits of weights that it multiplies; 16 for floats."""
        self._knows = knows
        self.packed: list[torch.Tensor | QuantizedWeight] = []

    def pack(self, weights):
        if any(_bits(weight) not in self._knows for weight in weights):
            raise ValueError("no kernel")
        self.packed += weights
        return weights

    def prepare(self, packed, bias, dtype):
        whole = torch.cat([widened(weight, torch.float32) for weight in packed])
        return lambda x: torch.nn.functional.linear(x, whole, bias).to(dtype)

    def look_up(self, packed, dtype):
        return lambda ids: packed[0].dequantized()[ids].to(dtype)


def _bits(weight: torch.Tensor | QuantizedWeight | Float8Weight) -> int:
    """-8: of 8-bit floats."""
    if isinstance(weight, Float8Weight):
        return -8
    return 8 * weight.dtype.itemsize if isinstance(weight, torch.Tensor) else weight.form.bits


def loaded(
    weights: Mapping[str, torch.Tensor | QuantizedWeight | Float8Weight],
    form: QuantForm | None,
    dtype: torch.dtype = torch.float32,
    **options,
) -> Linear:
    parts = {name: weight.shape[0] for name, weight in weights.items()}
    linear = Linear(64, parts, dtype=dtype, device=CPU, **options)
    linear.keep_packed(form)
    for name, view in linear.checkpoint_views("at").items():
        assert isinstance(view, WeightSlot) or name.endswith("bias")
        if isinstance(view, WeightSlot):
            view.store(weights[name.removeprefix("at.").removesuffix(".weight")])
    if linear.bias is not None:
        linear.bias.copy_(torch.arange(len(linear.bias)))
    return linear


def test_float_weights_become_few_bits() -> None:
    weights = {"q": some_weight(40), "k": some_weight(24, seed=1)}
    linear, twin = loaded(weights, INT8, bias=True), Twin()
    linear.pack(twin)
    forms = [weight.form for weight in twin.packed if isinstance(weight, QuantizedWeight)]
    assert forms == [INT8, INT8] and linear.weight is None
    x = some_weight(3, seed=2)
    whole = torch.cat([quantize(weight, INT8).dequantized() for weight in weights.values()])
    torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, whole, linear.bias))
    assert linear.is_recordable(1)


def test_packed_weights_stay_as_the_checkpoint_has_them() -> None:
    weight = quantize(some_weight(32), INT4)
    linear, twin = loaded({"o": weight}, INT8, bias=False), Twin()
    linear.pack(twin)
    assert twin.packed[0] is weight


def test_floats_of_16_bits_stay_so_in_a_layer_of_float32() -> None:
    weights = {"q": some_weight(32).bfloat16(), "k": quantize(some_weight(32, seed=1), INT8)}
    linear, twin = loaded(weights, None, bias=True, multiple=48), Twin(knows=(8, 16))
    assert linear.pack(twin) == []
    assert [_bits(weight) for weight in twin.packed] == [16, 8, 8] and linear.is_recordable(1)
    assert torch.equal(torch.as_tensor(twin.packed[0]), weights["q"])
    whole = torch.cat([widened(weight, torch.float32) for weight in weights.values()])
    x, bias = some_weight(3, seed=2), torch.arange(64.0)
    found = linear(x)
    torch.testing.assert_close(found[:, :64], torch.nn.functional.linear(x, whole, bias))
    assert (found[:, 64:] == torch.arange(64.0, 96.0)).all() and found.shape == (3, 96)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("form", [None, INT8])
def test_experts_in_one_tensor_go_to_their_slots(is_transposed: bool, form: QuantForm | None) -> None:
    experts = torch.stack([some_weight(32, seed=number).bfloat16() for number in range(3)])
    slots = [[WeightSlot(8, 64, form), WeightSlot(24, 64, form)] for _ in range(3)]
    together = ExpertsSlot(slots, is_transposed=is_transposed)
    stored = experts.transpose(1, 2).contiguous() if is_transposed else experts
    assert together.shape == tuple(stored.shape)
    together.store(stored)
    for expert, pair in zip(experts, slots):
        for part, slot in zip(expert.split([8, 24]), pair):
            expected = part.float() if form is None else quantize(part, form).dequantized()
            assert torch.equal(widened(slot.weight, torch.float32), expected)
            if isinstance(slot.weight, torch.Tensor):
                assert slot.weight.is_contiguous() and slot.weight.dtype == torch.bfloat16
    assert together.nbytes == sum(slot.nbytes for pair in slots for slot in pair)


def test_additional_outputs_of_8_bit_floats_are_zeros() -> None:
    weight = Float8Weight(some_weight(32).to(torch.float8_e4m3fn), torch.full((32, 1), 0.5), 0)
    linear, twin = loaded({"o": weight}, None, bias=False, multiple=48), Twin(knows=(-8,))
    assert linear.pack(twin) == [] and [_bits(each) for each in twin.packed] == [-8, -8]
    x = some_weight(3, seed=2)
    found = linear(x)
    torch.testing.assert_close(found[:, :32], x @ weight.dequantized().t())
    assert found.shape == (3, 48) and not found[:, 32:].any()


def test_floats_are_rounded_to_the_dtype_of_a_narrow_layer() -> None:
    """Or a float32 checkpoint that is served with --dtype bfloat16 would keep four bytes a number."""
    weight = some_weight(32)
    linear, twin = loaded({"o": weight}, None, bias=False, dtype=torch.bfloat16), Twin(knows=(16,))
    linear.pack(twin)
    assert torch.equal(torch.as_tensor(twin.packed[0]), weight.bfloat16())


@pytest.mark.parametrize(
    "other",
    [
        some_weight(32, seed=1),
        Float8Weight(some_weight(32, seed=1).to(torch.float8_e4m3fn), torch.full((32, 1), 0.5), 0),
        quantize(some_weight(32, seed=1), INT8),
    ],
    ids=["float", "fp8", "a form without a kernel"],
)
def test_layers_without_a_kernel_for_all_their_weights_become_floats(other) -> None:
    weights = {"q": quantize(some_weight(32), INT4), "k": other}
    linear, twin = loaded(weights, None, bias=False), Twin(knows=(4,))
    widened_forms = linear.pack(twin)
    assert linear.packed is None and not twin.packed
    assert widened_forms[0] == f"{INT4} × 64 inputs" and len(widened_forms) == 1 + (not isinstance(other, torch.Tensor))
    assert linear.weight is not None and not linear.is_recordable(1)
    assert torch.equal(linear.weight, torch.cat([widened(weight, torch.float32) for weight in weights.values()]))
    x = some_weight(3, seed=2)
    torch.testing.assert_close(linear(x), x @ linear.weight.t())


def test_outputs_are_reordered_across_projections_of_several_forms() -> None:
    weights = {"q": quantize(some_weight(32), INT4), "k": quantize(some_weight(32, seed=1), INT8)}
    order = torch.cat((torch.arange(0, 64, 2), torch.arange(1, 64, 2)))
    linear = loaded(weights, None, bias=True)
    before = linear.bias.clone() if linear.bias is not None else None
    linear.reorder_outputs(order)
    linear.pack(Twin())
    x = some_weight(3, seed=2)
    whole = torch.cat([weight.dequantized() for weight in weights.values()])
    torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, whole, before)[:, order])


def test_additional_outputs_are_zeros() -> None:
    linear = loaded({"in_proj": some_weight(40)}, INT8, bias=False, multiple=64)
    linear.pack(Twin())
    found = linear(some_weight(3, seed=2))
    assert found.shape == (3, 64) and not found[:, 40:].any() and found[:, :40].all()


def test_runs_of_outputs_keep_their_weights() -> None:
    weights = [some_weight(4), quantize(some_weight(4, seed=1), INT8)]
    found = pick_outputs(weights, torch.tensor([0, 1, 7, 6, 2]))
    assert [each.shape[0] for each in found] == [2, 2, 1]
    whole = torch.cat([widened(weight, torch.float32) for weight in weights])
    assert torch.equal(torch.cat([widened(each, torch.float32) for each in found]), whole[[0, 1, 7, 6, 2]])


def test_slots_copy_tensors_that_may_be_mapped() -> None:
    slot, weight = WeightSlot(8, 64, None), some_weight(8)
    slot.store(weight)
    weight.zero_()
    assert isinstance(slot.weight, torch.Tensor) and slot.weight.any()
    assert slot.nbytes == 8 * 64 * 4


def test_embedding_left_in_its_file_is_looked_up_on_the_model_s_device() -> None:
    embedding = Embedding(8, 64, TORCH_OPS, dtype=torch.float32, device=torch.device("meta"))
    embedding.keep_packed(INT8, is_read=False)
    (slot,) = embedding.checkpoint_views("at").values()
    assert isinstance(slot, UnreadSlot)
    slot.store(some_weight(8))
    assert embedding.pack(None, some_weight(8)) is embedding.weight
    assert embedding.weight.device.type == "meta" and embedding.weight.shape == (8, 64)


@pytest.mark.parametrize("kernel", [Twin(), None], ids=["kernel", "floats"])
@pytest.mark.parametrize("has_rows", [True, False])
def test_tied_head_is_quantised_and_tokens_are_looked_up_in_its_matrix(kernel: Twin | None, has_rows: bool) -> None:
    rows, settings = some_weight(8), {"dtype": torch.float32, "device": CPU}
    embedding = Embedding(8, 64, TORCH_OPS, **settings)
    head = LMHead(8, 64, tied_to=embedding, **settings)
    embedding.keep_packed(INT8, is_read=True)
    (slot,) = embedding.checkpoint_views("at").values()
    assert isinstance(slot, WeightSlot)
    slot.store(rows)
    head.pack(kernel, embedding.pack(kernel, rows if has_rows else None))
    rounded = quantize(rows, INT8).dequantized()
    ids = torch.tensor([3, 1, 7])
    assert torch.equal(embedding(ids), rounded[ids])
    hidden, norm = some_weight(3, seed=2), RMSNorm(64, 0.0, TORCH_OPS, **settings)
    norm.weight.fill_(1.0)
    torch.testing.assert_close(head(hidden, norm), norm(hidden) @ rounded.t())
