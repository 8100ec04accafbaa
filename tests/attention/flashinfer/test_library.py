"""What happens where FlashInfer, its compiler or the right card is missing, or computes nonsense."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest
import torch

from baton.attention.backend import AttentionSpec
from baton.attention.flashinfer import kernel, library
from baton.attention.flashinfer.library import (
    FlashInferUnavailable,
    check_compiler,
    check_supported,
    choose_kv_indices,
    import_library,
    load_attention,
    log_end,
)
from baton.attention.probe import BEAMS, DECODE, EXTEND, LONG, TOLERANCE, ProbeScene, ProbeStep, probe_backend
from baton.attention.torch_native import TorchNativeBackend
from tests.doubles.fake_flashinfer import FakeFlashInfer

CPU = torch.device("cpu")
SPEC = AttentionSpec(0, 4, 2, 64, 0.125)
STEPS = (DECODE, EXTEND, LONG, BEAMS)


@pytest.fixture
def fake(monkeypatch) -> FakeFlashInfer:
    """A library that can be imported, on a machine with a compiler and a Hopper card."""
    fake = FakeFlashInfer()
    package, decode = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.decode")
    attributes = {
        "__version__": library.VERSION,
        "BatchPrefillWithPagedKVCacheWrapper": fake.library.prefill,
        "BatchDecodeWithPagedKVCacheWrapper": fake.library.decode,
        "merge_state_in_place": fake.library.merge_state_in_place,
    }
    package.__dict__.update(attributes)
    decode.__dict__["fast_decode_plan"] = fake.library.fast_decode_plan
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", decode)
    monkeypatch.setattr(library.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernel, "WORKSPACE_BYTES", 1 << 10)
    return fake


def load(**changes):
    arguments = {"specs": [SPEC], "page_size": 16, "dtype": torch.bfloat16, "device": CPU}
    arguments |= changes
    return load_attention(arguments.pop("specs"), **arguments)


def test_working_library_is_loaded_and_probed(fake):
    attention = load(specs=[SPEC, dataclasses.replace(SPEC, layer_id=1, sliding_window=600)])
    assert {"fa2", "fa3"} == {call[2]["backend"] for call in fake.calls if "__init__" in call[0]}
    assert fake.used("merge_state_in_place") == 2
    assert callable(attention)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torch_backend_passes_probe(page_size, dtype):
    probe_backend(
        lambda pool, specs: TorchNativeBackend(pool),
        [dataclasses.replace(SPEC, sliding_window=50), SPEC],
        STEPS,
        page_size=page_size,
        dtype=dtype,
        device=CPU,
    )


def test_a_library_that_computes_wrong_is_not_used(fake, monkeypatch):
    attend = fake.library.decode.attend
    monkeypatch.setattr(fake.library.decode, "attend", lambda self, q, k, v: (attend(self, q, k, v)[0] * 1.1, 0))
    with pytest.raises(FlashInferUnavailable, match=r"fails on this device: AssertionError: decode: differs by up to"):
        load()


def test_failed_compilation_reports_end_of_log(fake, monkeypatch):
    log = "\n".join(["Ninja build failed. Ninja output:", *(f"line {i}" for i in range(400)), "error: no such file"])

    def fail(*_, **__):
        raise RuntimeError(log)

    monkeypatch.setattr(fake.library.prefill, "plan", fail)
    with pytest.raises(FlashInferUnavailable) as caught:
        load()
    message = str(caught.value)
    assert message.endswith("error: no such file") and "line 399" in message and "line 300" not in message


def test_long_prefills_use_fa2_when_fa3_fails(fake, monkeypatch, caplog):
    init = fake.library.prefill.__init__

    def no_fa3(self, *args, backend, **kwargs):
        if backend == "fa3":
            raise RuntimeError("no kernel image is available")
        init(self, *args, backend=backend, **kwargs)

    monkeypatch.setattr(fake.library.prefill, "__init__", no_fa3)
    load()
    assert "FA3 fails here: RuntimeError: no kernel image is available" in caplog.text


def test_fa3_is_not_used_on_ampere(fake, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    load()
    assert {"fa2"} == {call[2]["backend"] for call in fake.calls if "__init__" in call[0]}


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": torch.float32}, "half precision, not float32; use --dtype bfloat16"),
        ({"specs": [SPEC, dataclasses.replace(SPEC, layer_id=1, has_sinks=True)]}, "layers with sinks by torch"),
        ({"specs": [dataclasses.replace(SPEC, chunk=32)]}, r"attends in chunks \(Llama 4\) by torch"),
        ({"specs": [dataclasses.replace(SPEC, value_dim=32)]}, "values of 32 numbers beside keys of"),
        ({"specs": [dataclasses.replace(SPEC, head_dim=96)]}, "heads of 64, 128, 256, this model's have 96"),
    ],
)
def test_models_without_flashinfer_kernels_are_refused(fake, changes, reason):
    with pytest.raises(FlashInferUnavailable, match=reason):
        load(**changes)


def test_gpus_before_ampere_are_refused():
    with pytest.raises(FlashInferUnavailable, match=r"8\.0 \(Ampere\) or newer, not 7\.5"):
        check_supported(SPEC, torch.float16, (7, 5))


def test_missing_flashinfer_error_names_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(FlashInferUnavailable, match=r"pip install 'baton-serve\[cuda\]'"):
        import_library(has_fa3=False)


def test_flashinfer_without_required_function_is_refused(fake, monkeypatch, caplog):
    monkeypatch.delattr(sys.modules["flashinfer"], "merge_state_in_place")
    monkeypatch.setattr(sys.modules["flashinfer"], "__version__", "9.9")
    with pytest.raises(FlashInferUnavailable, match=r"merge_state_in_place.*pip install flashinfer-python==0\.6\.12"):
        load()
    assert "FlashInfer 9.9 is not the version" in caplog.text


def test_missing_nvcc_or_ninja_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(library.Path, "exists", lambda self: False)
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    with pytest.raises(FlashInferUnavailable, match="there is no nvcc; install the CUDA toolkit"):
        check_compiler()
    monkeypatch.setattr(library.shutil, "which", lambda name: "/bin/nvcc" if name == "nvcc" else None)
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FlashInferUnavailable, match="there is no ninja; pip install ninja"):
        check_compiler()


def test_precompiled_kernels_need_no_compiler(monkeypatch):
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: object())
    check_compiler()


def test_kv_indices_fall_back_to_torch_without_triton(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "baton.attention.flashinfer.triton_kv_indices", None)
    monkeypatch.delattr("baton.attention.flashinfer.triton_kv_indices", raising=False)
    assert choose_kv_indices(CPU) is library.build_kv_indices
    assert "page numbers are gathered by torch" in caplog.text


def test_short_errors_are_shown_whole():
    assert log_end(ValueError("one line")) == "ValueError: one line"


# Every data type, head size and use of windows is a module of its own to compile: 26 s for FA2, 68 s for FA3.
CASES = [
    *((torch.bfloat16, 32, 8, 128, window, page_size, True) for window in (None, 100) for page_size in (1, 16, 64)),
    (torch.bfloat16, 8, 8, 64, None, 16, False),
    (torch.float16, 32, 8, 128, None, 16, False),
]
LONG_WINDOW = ProbeStep("long extend, 512 seen", ((1500, 600), (0, 700)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, heads, kv_heads, head_dim, window, page_size, fa3", CASES, ids=str)
def test_parity_on_the_device(dtype, heads, kv_heads, head_dim, window, page_size, fa3, parity, monkeypatch):
    device = torch.device("cuda")
    if not fa3:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    spec = AttentionSpec(0, heads, kv_heads, head_dim, head_dim**-0.5, window)
    attention = load_attention([spec], page_size=page_size, dtype=dtype, device=device)
    for step in (*STEPS, *([LONG_WINDOW] if window else [])):
        own = dataclasses.replace(spec, sliding_window=512) if step is LONG_WINDOW else spec
        scene = ProbeScene(step, own, page_size=page_size, dtype=dtype, device=device)
        backend = attention(scene.pool, [own])
        backend.plan(scene.batch)
        name = f"{step.name}, page {page_size}, {heads}/{kv_heads} × {head_dim}, window {window}, {dtype}"
        tolerance = TOLERANCE[dtype]
        parity(name, backend.run(own, scene.q), scene.expected(), atol=tolerance, rtol=tolerance)
