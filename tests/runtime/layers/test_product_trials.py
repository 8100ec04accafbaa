"""What is tried, when, and which form is taken. Time is the test's own."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from baton.attention.cache_folder import cache_folder
from baton.attention.trial_results import TrialResults
from baton.runtime.layers import product_trials
from baton.runtime.layers.linear import Linear
from baton.runtime.layers.product_trials import (
    FIRST_WAIT_S,
    Group,
    LateTrials,
    UnusableFormError,
    best_choice,
    choose_products,
    first_choices,
)
from baton.runtime.layers.products import (
    FORMS,
    NUMBA,
    ONEDNN,
    PACKED,
    PLAIN,
    ROW_COUNTS,
    TORCH,
    TRANSPOSED,
    WIDENED,
    ProductChoice,
)
from tests.doubles.block_kernel import kernel
from tests.doubles.lowered_processor import lower_to_avx2

CPU = torch.device("cpu")
TRIED = [form for form in FORMS if form != WIDENED]


def linear(out: int, into: int, *, bias: bool = False) -> Linear:
    layer = Linear(into, {"proj": out}, bias=bias, dtype=torch.float32, device=CPU)
    assert layer.weight is not None
    for tensor in (layer.weight, layer.bias):
        if tensor is not None:
            tensor.normal_(generator=torch.Generator().manual_seed(out))
    return layer


def run_trials(late: LateTrials | None) -> None:
    assert late is not None
    while late.try_next_product() is not None:
        pass


def times(torch_s: float, transposed: float, onednn: float | None) -> dict[str, float]:
    found = {TORCH: torch_s, TRANSPOSED: transposed}
    return found if onednn is None else {**found, ONEDNN: onednn}


class TestBestChoice:
    def test_each_row_count_has_its_own_plain_form(self) -> None:
        by_rows = [times(2.0, 1.0, 3.0), times(2.0, 3.0, 3.0), times(2.0, 1.97, 3.0), times(2.0, 1.0, 3.0)]
        choice = best_choice(dict(zip(ROW_COUNTS, by_rows)))
        assert choice.forms == (TRANSPOSED, TORCH, TORCH, TRANSPOSED), "3 % are not worth it"

    @pytest.mark.parametrize("one_row, taken", [(1.04, True), (1.06, False)])
    def test_onednn_is_chosen_for_all_rows_if_it_never_loses(self, one_row: float, taken: bool) -> None:
        by_rows = [times(1.0, 1.0, one_row), times(1.0, 1.0, 0.5), times(1.0, 1.0, 0.5), times(9.0, 9.0, 9.3)]
        assert (best_choice(dict(zip(ROW_COUNTS, by_rows))) == ProductChoice.of(ONEDNN)) is taken

    def test_onednn_gain_for_prompts_alone_is_not_enough(self) -> None:
        by_rows = [times(1.0, 1.0, 1.3), times(1.0, 1.0, 1.3), times(1.0, 1.0, 1.3), times(100.0, 100.0, 50.0)]
        assert best_choice(dict(zip(ROW_COUNTS, by_rows))) == PLAIN

    def test_onednn_must_beat_the_best_other_form(self) -> None:
        by_rows = [times(1.0, 0.5, 0.6)] * len(ROW_COUNTS)
        assert best_choice(dict(zip(ROW_COUNTS, by_rows))) == ProductChoice.of(TRANSPOSED)

    def test_packed_forms_may_differ_by_row_count(self) -> None:
        by_rows = [times(1.0, 1.0, 0.8) | {NUMBA: seconds} for seconds in (0.7, 0.9, 0.82, 0.85)]
        forms = best_choice(dict(zip(ROW_COUNTS, by_rows))).forms
        assert forms == (NUMBA, ONEDNN, NUMBA, ONEDNN), "what can be recorded may take 5 % longer"

    def test_best_packed_form_decides_about_packing(self) -> None:
        by_rows = [times(1.0, 1.0, 1.2) | {NUMBA: 0.8}] * len(ROW_COUNTS)
        assert best_choice(dict(zip(ROW_COUNTS, by_rows))) == ProductChoice.of(NUMBA)

    def test_other_forms_are_compared_without_onednn(self) -> None:
        by_rows = [times(1.0, 0.5, None)] * len(ROW_COUNTS)
        assert best_choice(dict(zip(ROW_COUNTS, by_rows))) == ProductChoice.of(TRANSPOSED)


class TestTrials:
    @pytest.fixture
    def fast(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable]:
        """A clock on which one form is fast."""

        def clock(winner: str) -> Callable:
            running: list[str] = []
            for name, prepare in list(FORMS.items()):

                def noted(source, name=name, prepare=prepare):
                    product = prepare(source)
                    return lambda x: (running.append(name), product(x))[1]

                monkeypatch.setitem(FORMS, name, noted)

            def timer(call: Callable[[], object]) -> float:
                running.clear()
                call()
                return sum(0.5 if name == winner else 1.0 for name in running)

            return timer

        return clock

    @pytest.mark.parametrize("winner", TRIED)
    def test_fastest_form_of_each_shape_is_kept_for_the_next_start(self, fast: Callable, winner: str, caplog) -> None:
        layers = [linear(64, 32), linear(128, 32), linear(64, 32)]
        choices, late = first_choices(layers, kernel=kernel(torch.float32), timer=fast(winner))
        assert set(choices.values()) == {ProductChoice((NUMBA, NUMBA, NUMBA, ONEDNN))}, "before there is a trial"
        run_trials(late)
        choice = ProductChoice.of(winner)
        if winner == TRANSPOSED:
            choice = ProductChoice((TORCH, TRANSPOSED, TRANSPOSED, TORCH))
        assert {layer.choice for layer in layers} == {choice}
        with caplog.at_level(logging.INFO):
            again = [linear(64, 32), linear(128, 32), linear(64, 32)]
            choices, late = first_choices(again, kernel=kernel(torch.float32))
        assert late is None and choices == dict.fromkeys([(64, 32), (128, 32)], choice)
        (line,) = [record.message for record in caplog.records if "matrix products" in record.message]
        assert f"64×32 {choice}, 128×32 {choice}; all tried at an earlier start" in line

    def test_results_depend_on_what_is_multiplied(self, fast: Callable) -> None:
        run_trials(first_choices([linear(64, 32)], timer=fast(TORCH))[1])
        assert first_choices([linear(64, 32)])[1] is None
        for others in ([linear(64, 32), linear(64, 32)], [linear(32, 64)], [linear(64, 32, bias=True)]):
            assert first_choices(others)[1] is not None
        assert first_choices([linear(64, 32)], kernel=kernel(torch.float32))[1] is not None, "there is a form more"
        assert first_choices([linear(64, 32)], results=TrialResults(threads=7))[1] is not None

    @pytest.mark.parametrize(
        "damage", [["torch"] * 3, ["torch"] * 3 + ["onednn"], ["numba"] * 4, ["mkl"] * 4, {}, None, 1, [[], [], [], []]]
    )
    def test_results_that_cannot_be_used_are_tried_again(self, fast: Callable, damage: Any, caplog) -> None:
        """There is no kernel for "numba" here, and packed forms are taken for all rows or none."""
        run_trials(first_choices([linear(64, 32)], timer=fast(TORCH))[1])
        (file,) = (cache_folder() / "trials").iterdir()
        file.write_text(json.dumps(json.loads(file.read_text()) | {"value": damage}))
        choices, late = first_choices([linear(64, 32)], timer=fast(TORCH))
        assert choices == {(64, 32): ProductChoice.of(ONEDNN)} and late is not None
        run_trials(late)
        assert first_choices([linear(64, 32)])[0] == {(64, 32): PLAIN}

    def test_trials_beside_busy_processes_are_cut_short_and_repeated(self, fast: Callable, caplog) -> None:
        layer, busy = linear(64, 32), [0.0, 0.9, 0.0, 0.1, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0]
        group = Group([layer], [TORCH, TRANSPOSED, ONEDNN])
        timer = fast(ONEDNN)
        late = LateTrials([group], timer=timer, others=lambda: busy.pop(0))
        waits = []
        while (wait := late.try_next_product()) is not None:
            waits += [wait] if wait else []
            assert busy or not late.has_switched
        assert waits == [FIRST_WAIT_S, 2 * FIRST_WAIT_S] and not busy
        assert layer.choice == ProductChoice.of(ONEDNN)
        assert first_choices([linear(64, 32)])[1] is None

    def test_late_trial_computes_one_product_at_a_time(self) -> None:
        counted: list[Callable] = []
        layers = [linear(48, 32), linear(64, 32), linear(64, 32)]
        _, late = first_choices(layers, timer=lambda call: (counted.append(call), 1.0)[1])
        assert late is not None
        while not counted:
            assert late.try_next_product() == 0.0
        late.try_next_product()
        assert len(counted) == 2

    @pytest.mark.parametrize("winner", [TORCH, TRANSPOSED, ONEDNN, NUMBA])
    @pytest.mark.parametrize("guess", [TORCH, ONEDNN, NUMBA])
    def test_late_trial_switches_to_fastest_form(
        self, fast: Callable, guess: str, winner: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        layers, x, made = [linear(64, 32), linear(64, 32)], torch.randn(3, 32), kernel(torch.float32)
        expected = [layer(x) for layer in layers]
        for layer in layers:
            layer.use_product(ProductChoice.of(guess), made)
        late = LateTrials([Group(layers, [TORCH, TRANSPOSED, ONEDNN, NUMBA])], kernel=made, timer=fast(winner))
        with caplog.at_level(logging.INFO):
            run_trials(late)
        choice = ProductChoice((TORCH, TRANSPOSED, TRANSPOSED, TORCH)) if winner == TRANSPOSED else None
        choice = choice or ProductChoice.of(winner)
        assert {layer.choice for layer in layers} == {choice} and late.has_switched is (winner != guess)
        assert all((layer.weight is None) is not choice.keeps_weight for layer in layers)
        for layer, of_layer in zip(layers, expected):
            torch.testing.assert_close(layer(x), of_layer, atol=1e-5, rtol=1e-5)
        assert f"tried while the server was idle: 64×32 {choice}" in caplog.text
        assert late.try_next_product() is None, "and nothing is left"

    def test_late_trial_does_not_repack_shared_weight(self, fast: Callable) -> None:
        layer = linear(64, 32)
        run_trials(LateTrials([Group([layer], [TORCH, ONEDNN], kept=[layer])], timer=fast(ONEDNN)))
        assert layer.choice == PLAIN and layer.weight is not None

    def test_large_packed_weights_are_tried_in_part(self, fast: Callable, monkeypatch) -> None:
        """There may be no room for a second copy."""
        monkeypatch.setattr(product_trials, "TRIED_BYTES", 4 * 32 * 100)
        layer, x = linear(256, 32), torch.randn(3, 32)
        expected = layer(x)
        layer.use_product(ProductChoice.of(ONEDNN))
        monkeypatch.setattr(torch.Tensor, "to_dense", lambda self: pytest.fail("unpacked"))
        run_trials(LateTrials([Group([layer], [TORCH, ONEDNN])], timer=fast(ONEDNN)))
        torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)

    def test_slow_forms_are_timed_less_often(self, monkeypatch) -> None:
        calls: list[int] = []
        monkeypatch.setattr(product_trials, "TRIAL_S", -1.0)
        run_trials(first_choices([linear(64, 32)], timer=lambda call: (calls.append(1), 1.0)[1])[1])
        assert len(calls) == product_trials.ROUNDS.start * (2 * len(ROW_COUNTS) + 2), "transposed for two row counts"

    def test_shared_weight_is_not_repacked(self, fast: Callable) -> None:
        layers = [linear(64, 32), linear(48, 32)]
        choices, late = first_choices(layers, kept=layers[:1], timer=fast(ONEDNN))
        assert choices == {(48, 32): ProductChoice.of(ONEDNN), (64, 32): PLAIN}
        run_trials(late)
        assert [layer.choice for layer in layers] == [PLAIN, ProductChoice.of(ONEDNN)]

    def test_failing_or_wrong_forms_are_skipped_with_warning(self, monkeypatch, caplog) -> None:
        def fail(source):
            raise RuntimeError("not built with oneDNN")

        monkeypatch.setitem(FORMS, ONEDNN, fail)
        monkeypatch.setitem(FORMS, TRANSPOSED, lambda source: lambda x: x @ source.weight.t())  # no bias
        choices, _ = first_choices([linear(64, 32)])
        assert choices == {(64, 32): PLAIN}
        (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert "onednn failed (RuntimeError: not built with oneDNN)" in warning
        assert "transposed gives wrong numbers" in warning


class TestChoose:
    @pytest.mark.parametrize("form", TRIED)
    def test_a_requested_form_is_used_everywhere(self, form: str) -> None:
        layer, kept, x = linear(64, 32), linear(64, 32), torch.randn(3, 32)
        expected = layer(x)
        choose_products([layer, kept], form, [kept], kernel(torch.float32) if form == NUMBA else None)
        assert (layer.weight is None) is (form in PACKED), "its own copy is enough"
        assert kept.weight is not None
        for one in (layer, kept):
            torch.testing.assert_close(one(x), expected, atol=1e-5, rtol=1e-5)

    def test_shapes_without_kernel_use_onednn(self, caplog: pytest.LogCaptureFixture) -> None:
        fits, odd, x = linear(64, 32), linear(80, 32), torch.randn(3, 32)
        expected = odd(x)
        choose_products([fits, odd], NUMBA, kernel=kernel(torch.float32))
        assert fits.weight is None and odd.weight is None
        assert "there is no kernel for 80×32, which oneDNN multiplies" in caplog.text
        torch.testing.assert_close(odd(x), expected, atol=1e-5, rtol=1e-5)

    def test_kernel_wrong_for_a_shape_is_not_used_for_it(self) -> None:
        """oneDNN may lay out one shape in another way than the next."""

        class Wrong:
            def prepare(self, blocks, size, bias):
                right = kernel(torch.float32).prepare(blocks, size, bias)
                return right if size == (128, 64) else lambda x: right(x) + 1

            prepare_group = kernel(torch.float32).prepare_group

        layer, x = linear(64, 32), torch.randn(3, 32)
        expected = layer(x)
        assert NUMBA not in first_choices([layer], kernel=Wrong())[0][64, 32].forms
        choose_products([layer], NUMBA, kernel=Wrong())
        torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("lost", [0.03, 0.5, 1.0])
    def test_kernel_dropping_inputs_is_detected(self, dtype: torch.dtype, lost: float) -> None:
        """Also of a model whose outputs are small."""
        keeps = (torch.arange(512) >= 512 * lost).to(dtype)

        class Forgets:
            def prepare(self, blocks, size, bias):
                right = kernel(dtype).prepare(blocks, size, bias)
                return right if size == (128, 64) else lambda x: right(x * keeps)

            prepare_group = kernel(dtype).prepare_group

        for one, form in ((Forgets(), ONEDNN), (kernel(dtype), NUMBA)):
            layer = Linear(512, {"proj": 256}, bias=False, dtype=dtype, device=CPU)
            assert layer.weight is not None
            layer.weight.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
            choose_products([layer], NUMBA, kernel=one)
            assert layer.form(1) == form

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_a_dtype_without_arithmetic_is_widened_and_logged_once(
        self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nothing is tried: what is slow there took most of a start."""
        lower_to_avx2(monkeypatch)
        monkeypatch.setattr(product_trials, "SMALL_MODEL_BYTES", 1000)
        monkeypatch.setattr(product_trials, "time_forms", None)
        layer = Linear(32, {"proj": 64}, bias=True, dtype=dtype, device=CPU)
        assert layer.weight is not None and layer.bias is not None
        layer.weight.normal_(generator=torch.Generator().manual_seed(0))
        layer.bias.zero_()
        x = torch.randn(40, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
        with caplog.at_level(logging.INFO):
            choose_products([layer], "auto")
        (line,) = caplog.messages
        assert f"no arithmetic for {str(dtype).removeprefix('torch.')}, so weights are widened to float32" in line
        assert layer.weight is not None and {layer.form(rows) for rows in (1, 8, 600)} == {WIDENED}
        expected = (x.float() @ layer.weight.float().t()).to(dtype)
        torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=torch.finfo(dtype).eps)

    def test_a_form_that_the_processor_lacks_is_refused_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lower_to_avx2(monkeypatch)
        layer = Linear(32, {"proj": 64}, bias=False, dtype=torch.bfloat16, device=CPU)
        with pytest.raises(UnusableFormError, match=r"--linear-backend onednn: .*packs no bfloat16 .*; use auto"):
            choose_products([layer], ONEDNN)
        with pytest.raises(UnusableFormError, match=r"--linear-backend widened: .*float32 is not widened.*; use auto"):
            choose_products([linear(64, 32)], WIDENED)

    def test_numba_form_without_kernels_is_refused(self) -> None:
        with pytest.raises(UnusableFormError, match=r"--linear-backend numba: .*kernels are not in use.*; use auto"):
            choose_products([linear(64, 32)], NUMBA)

    def test_failing_requested_form_is_refused_with_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(source):
            raise RuntimeError("fp16 needs avx512_fp16")

        monkeypatch.setitem(FORMS, ONEDNN, fail)
        with pytest.raises(UnusableFormError, match=r"--linear-backend onednn: .*avx512_fp16.*; use auto"):
            choose_products([linear(64, 32)], ONEDNN)

    def test_small_models_skip_product_trials(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(product_trials, "first_choices", lambda *args, **_: pytest.fail("tried"))
        layer = linear(64, 32)
        choose_products([layer], "auto")
        assert layer.weight is not None

    def test_large_models_run_product_trials(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(product_trials, "SMALL_MODEL_BYTES", 1000)
        found = {(64, 32): ProductChoice.of(ONEDNN)}
        monkeypatch.setattr(product_trials, "first_choices", lambda *args, **_: (found, None))
        layer, x = linear(64, 32), torch.randn(3, 32)
        expected = layer(x)
        choose_products([layer], "auto")
        assert layer.weight is None
        torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)
