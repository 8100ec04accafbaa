"""What is tried when a model is loaded, and which form is taken. Time is the test's own."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from baton.runtime.layers import product_trials
from baton.runtime.layers.linear import Linear
from baton.runtime.layers.product_trials import (
    LateTrials,
    UnusableFormError,
    best_choice,
    choose_products,
    try_products,
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


def linear(out: int, into: int) -> Linear:
    layer = Linear(into, {"proj": out}, bias=False, dtype=torch.float32, device=CPU)
    assert layer.weight is not None
    layer.weight.normal_(generator=torch.Generator().manual_seed(out))
    return layer


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
    def test_fastest_form_is_chosen_for_each_shape(self, fast: Callable, winner: str, caplog) -> None:
        layers = [linear(64, 32), linear(128, 32), linear(64, 32)]
        with caplog.at_level(logging.INFO):
            choices, late = try_products(layers, kernel=kernel(torch.float32), timer=fast(winner))
        assert late is None
        choice = ProductChoice.of(winner)
        if winner == TRANSPOSED:
            choice = ProductChoice((TORCH, TRANSPOSED, TRANSPOSED, TORCH))
        assert choices == dict.fromkeys([(64, 32), (128, 32)], choice)
        (line,) = [record.message for record in caplog.records if "matrix products" in record.message]
        assert f"128×32 {choice}" in line and f"64×32 {choice}" in line

    def test_busy_cpu_defers_product_trials(self, monkeypatch, caplog) -> None:
        """The largest shape is tried all the same; the others have its form until the server is idle."""
        monkeypatch.setattr(product_trials, "LIMIT_S", -1.0)
        layers, counted = [linear(48, 32), linear(64, 32), linear(64, 32)], []

        def timer(call: Callable[[], object]) -> float:
            counted.append(call)
            return 1.0

        choices, late = try_products(layers, timer=timer)
        assert late is not None and [late.includes_layer(layer) for layer in layers] == [True, False, False]
        assert choices == {(64, 32): PLAIN, (48, 32): PLAIN}
        (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert "1 of 2 shapes are tried when the server is idle, because the processor is busy" in warning
        before = len(counted)
        assert late.try_next_product() and len(counted) <= before + 1, "one product at a time"

    @pytest.mark.parametrize("winner", [TORCH, TRANSPOSED, ONEDNN, NUMBA])
    @pytest.mark.parametrize("guess", [TORCH, ONEDNN, NUMBA])
    def test_late_trial_switches_to_fastest_form(
        self, fast: Callable, guess: str, winner: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        layers, x, made = [linear(64, 32), linear(64, 32)], torch.randn(3, 32), kernel(torch.float32)
        expected = [layer(x) for layer in layers]
        for layer in layers:
            layer.use_product(ProductChoice.of(guess), made, for_now=True)
            assert layer.weight is not None, "it may have to be repacked"
        late = LateTrials([layers], [TORCH, TRANSPOSED, ONEDNN, NUMBA], kernel=made, timer=fast(winner))
        with caplog.at_level(logging.INFO):
            while late.try_next_product():
                pass
        choice = ProductChoice((TORCH, TRANSPOSED, TRANSPOSED, TORCH)) if winner == TRANSPOSED else None
        choice = choice or ProductChoice.of(winner)
        assert {layer.choice for layer in layers} == {choice} and late.has_switched is (winner != guess)
        assert all((layer.weight is None) is not choice.keeps_weight for layer in layers)
        for layer, of_layer in zip(layers, expected):
            torch.testing.assert_close(layer(x), of_layer, atol=1e-5, rtol=1e-5)
        assert f"tried while the server was idle: 64×32 {choice}" in caplog.text
        assert not late.try_next_product(), "and nothing is left"

    def test_late_trial_does_not_repack_shared_weight(self, fast: Callable) -> None:
        layer = linear(64, 32)
        late = LateTrials([[layer]], [TORCH, ONEDNN], kept=[layer], timer=fast(ONEDNN))
        while late.try_next_product():
            pass
        assert layer.choice == PLAIN and layer.weight is not None

    def test_untried_shapes_use_form_of_largest_shape(self, fast: Callable, monkeypatch) -> None:
        monkeypatch.setattr(product_trials, "LIMIT_S", -1.0)
        layers = [linear(48, 32), linear(64, 32), linear(80, 32)]
        choices, late = try_products(layers, kept=layers[:1], timer=fast(ONEDNN))
        packed = ProductChoice.of(ONEDNN)
        assert late is not None and choices == {(80, 32): packed, (64, 32): packed, (48, 32): PLAIN}

    def test_slow_forms_are_timed_less_often(self, monkeypatch) -> None:
        calls: list[int] = []
        monkeypatch.setattr(product_trials, "TRIAL_S", -1.0)
        try_products([linear(64, 32)], timer=lambda call: (calls.append(1), 1.0)[1])
        assert len(calls) == product_trials.ROUNDS.start * (2 * len(ROW_COUNTS) + 2), "transposed for two row counts"

    def test_shared_weight_is_not_repacked(self, fast: Callable) -> None:
        layers = [linear(64, 32), linear(48, 32)]
        choices, _ = try_products(layers, kept=layers[:1], timer=fast(ONEDNN))
        assert choices == {(48, 32): ProductChoice.of(ONEDNN), (64, 32): PLAIN}

    def test_failing_or_wrong_forms_are_skipped_with_warning(self, monkeypatch, caplog) -> None:
        def fail(source):
            raise RuntimeError("not built with oneDNN")

        monkeypatch.setitem(FORMS, ONEDNN, fail)
        monkeypatch.setitem(FORMS, TRANSPOSED, lambda source: lambda x: x @ source.weight.t())  # no bias
        choices, _ = try_products([linear(64, 32)], timer=lambda call: 1.0)
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
        assert NUMBA not in try_products([layer], kernel=Wrong(), timer=lambda call: 1.0)[0][64, 32].forms
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
        monkeypatch.setattr(product_trials, "try_products", lambda *args: pytest.fail("tried"))
        layer = linear(64, 32)
        choose_products([layer], "auto")
        assert layer.weight is not None

    def test_large_models_run_product_trials(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(product_trials, "SMALL_MODEL_BYTES", 1000)
        monkeypatch.setattr(product_trials, "try_products", lambda *args: ({(64, 32): ProductChoice.of(ONEDNN)}, None))
        layer, x = linear(64, 32), torch.randn(3, 32)
        expected = layer(x)
        choose_products([layer], "auto")
        assert layer.weight is None
        torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)
