from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from baton.runtime.layers.experts import Experts, Router
from baton.runtime.layers.linear import Linear
from baton.runtime.layers.products import NUMBA, ONEDNN, ProductChoice
from baton.runtime.model_config import Choice, DecoderTraits, ExpertNames, ExpertTraits, ModelConfig

CPU, FLOAT32 = torch.device("cpu"), torch.float32
TRAITS = ExpertTraits(is_sparse=(True,), num_experts=8, top_k=2, intermediate_size=12)
CONFIG = ModelConfig(
    architecture="",
    vocab_size=8,
    hidden_size=6,
    intermediate_size=12,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=6,
    rms_norm_eps=1e-6,
    activation="silu",
    ropes=(None,),
    traits=DecoderTraits(layer_windows=(None,), experts=TRAITS),
    tie_word_embeddings=False,
    dtype="float32",
    context_length=8,
    max_position_embeddings=8,
    bos_token_id=None,
    eos_token_ids=(),
)


def route(logits: list[float], correction: list[float] | None = None, **traits: Any) -> dict[int, float]:
    """Expert -> weight of a token with these logits."""
    names = ExpertNames(correction="correction" if correction is not None else None)
    router = Router(
        dataclasses.replace(TRAITS, num_experts=len(logits), names=names, **traits), 1, dtype=FLOAT32, device=CPU
    )
    router.weight.copy_(torch.tensor(logits)[:, None])
    if correction is not None and router.correction is not None:
        router.correction.copy_(torch.tensor(correction))
    experts, weights = router(torch.ones(1, 1))
    return dict(zip(experts[0].tolist(), weights[0].tolist(), strict=True))


def weight_of(linear: Linear) -> torch.Tensor:
    assert linear.weight is not None
    return linear.weight


def make_experts(traits: ExpertTraits = TRAITS) -> Experts:
    experts = Experts(CONFIG, traits, dtype=FLOAT32, device=CPU)
    generator = torch.Generator().manual_seed(0)
    for linear in (*experts.gate_up, *experts.down):
        weight_of(linear).normal_(generator=generator)
        if linear.bias is not None:
            linear.bias.normal_(generator=generator)
    return experts


def test_softmax_weights_of_the_chosen_experts():
    exponents = torch.tensor([0.0, 2.0, 1.0]).exp()
    plain = route([0.0, 2.0, 1.0], renormalises=False)
    assert plain == pytest.approx({1: float(exponents[1] / exponents.sum()), 2: float(exponents[2] / exponents.sum())})
    renormalised = route([0.0, 2.0, 1.0])
    assert renormalised == pytest.approx(route([0.0, 2.0, 1.0], choice=Choice.LOGITS)) and sum(
        renormalised.values()
    ) == pytest.approx(1)


def test_a_correction_changes_the_choice_and_not_the_weights():
    found = route([0.0, 2.0, 1.0], correction=[5.0, 0.0, 0.0], choice=Choice.SIGMOID, renormalises=False)
    assert found == pytest.approx({0: 0.5, 1: float(torch.tensor(2.0).sigmoid())})


def test_experts_come_from_the_best_groups():
    """The best expert is in a group whose two best are worse together than those of the other groups."""
    logits = [9.0, -9.0, 2.0, 2.5, 3.0, 1.0]
    assert set(route(logits, choice=Choice.SIGMOID, num_groups=3, top_groups=2)) == {3, 4}
    assert set(route(logits, choice=Choice.SIGMOID)) == {0, 4}


def test_the_best_group_may_be_that_of_the_best_expert():
    """DeepSeek-V2: the same logits, by the largest score of a group."""
    logits = [9.0, -9.0, 2.0, 2.5, 3.0, 1.0]
    assert set(route(logits, num_groups=3, top_groups=2, group_best=1)) == {0, 4}
    assert set(route(logits, num_groups=3, top_groups=1, group_best=1)) == {0, 1}


def test_gates_are_sigmoids_of_the_largest_logits():
    """Also where the sigmoids of two are equal in float32, and the logits are not."""
    assert route([0.0, 2.0, 1.0], choice=Choice.GATES) == pytest.approx(
        {1: float(torch.tensor(2.0).sigmoid()), 2: float(torch.tensor(1.0).sigmoid())}
    )
    assert set(route([40.0, 41.0, 42.0], choice=Choice.GATES)) == {1, 2}


def test_gated_experts_read_a_scaled_input():
    plain, gated = make_experts(), make_experts(dataclasses.replace(TRAITS, choice=Choice.GATES))
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    chosen, weights = torch.tensor([[0, 7], [3, 1]]), torch.tensor([[0.5, 0.25], [0.1, 0.9]])
    parts = [plain(x * weights[:, [place]], chosen[:, [place]], torch.ones(2, 1)) for place in range(chosen.shape[1])]
    torch.testing.assert_close(gated(x, chosen, weights), parts[0] + parts[1], atol=1e-4, rtol=1e-4)


def test_weights_are_scaled_after_they_are_renormalised():
    assert sum(route([1.0, 2.0, 3.0], choice=Choice.SIGMOID, weight_scale=2.5).values()) == pytest.approx(2.5)


@pytest.mark.parametrize("has_bias", [False, True])
def test_outputs_are_those_of_each_expert_by_itself(has_bias):
    experts = make_experts(dataclasses.replace(TRAITS, has_bias=has_bias))
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    chosen = torch.tensor([[0, 7], [7, 0], [3, 3], [1, 2], [7, 6]])
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(2))
    expected = torch.zeros(5, 6)
    for token in range(5):
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            first, second = experts.gate_up[expert], experts.down[expert]
            inner = weight_of(first) @ x[token] + (0 if first.bias is None else first.bias)
            out = weight_of(second) @ (torch.nn.functional.silu(inner[:12]) * inner[12:])
            out = out + (0 if second.bias is None else second.bias)
            expected[token] += weight * out
    torch.testing.assert_close(experts(x, chosen, weights), expected, atol=1e-4, rtol=1e-4)


def test_a_step_without_tokens():
    nothing = make_experts()(torch.empty(0, 6), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    assert nothing.shape == (0, 6)


def test_clamped_gates_alternate_with_their_partners():
    experts = make_experts(dataclasses.replace(TRAITS, clamp=(1.7, 0.5)))
    x = torch.randn(1, 6, generator=torch.Generator().manual_seed(3)) * 3
    inner = weight_of(experts.gate_up[4]) @ x[0]
    gate, up = inner[::2].clamp(max=0.5), inner[1::2].clamp(-0.5, 0.5)
    expected = weight_of(experts.down[4]) @ ((up + 1) * gate * torch.sigmoid(1.7 * gate))
    found = experts(x, torch.tensor([[4, 4]]), torch.tensor([[0.25, 0.75]]))
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("choice", [Choice.SOFTMAX, Choice.GATES])
def test_experts_at_once_give_the_numbers_of_each_alone(choice: Choice, has_bias: bool) -> None:
    """Few rows take one call of the kernel for all experts, many rows a call for each."""
    pytest.importorskip("numba")
    from tests.doubles.block_kernel import kernel

    traits = dataclasses.replace(TRAITS, intermediate_size=64, choice=choice, has_bias=has_bias)
    config = dataclasses.replace(CONFIG, hidden_size=128, intermediate_size=64)
    experts = Experts(config, traits, dtype=FLOAT32, device=CPU)
    generator = torch.Generator().manual_seed(1)
    for linear in (*experts.gate_up, *experts.down):
        weight_of(linear).normal_(generator=generator)
        if linear.bias is not None:
            linear.bias.normal_(generator=generator)
        linear.use_product(ProductChoice.of(NUMBA), kernel(FLOAT32))
    for rows in (1, 2, 9, 40):
        x = torch.randn(rows, 128, generator=generator)
        chosen = torch.rand(rows, 8, generator=generator).topk(2).indices
        weights = torch.rand(rows, 2, generator=generator)
        experts.use_kernel(None)
        alone = experts(x, chosen, weights)
        experts.use_kernel(kernel(FLOAT32))
        assert experts._grouped_products(rows) is not None
        assert torch.equal(experts(x, chosen, weights), alone)


def test_experts_follow_their_layers_to_another_product() -> None:
    """A late trial may change the form of all layers of one shape."""
    pytest.importorskip("numba")
    from tests.doubles.block_kernel import kernel

    traits = dataclasses.replace(TRAITS, intermediate_size=64)
    experts = Experts(dataclasses.replace(CONFIG, hidden_size=128), traits, dtype=FLOAT32, device=CPU)
    for linear in (*experts.gate_up, *experts.down):
        weight_of(linear).normal_()
    experts.use_kernel(kernel(FLOAT32))
    assert experts._grouped_products(1) is None, "torch's products"
    mixed = ProductChoice((NUMBA, NUMBA, ONEDNN, ONEDNN))
    for linear in (*experts.gate_up, *experts.down):
        linear.use_product(mixed, kernel(FLOAT32))
    assert experts._grouped_products(8) is not None and experts._grouped_products(40) is None
