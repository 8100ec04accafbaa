"""The command that finds heavy channels: its file serves the model, and its errors are one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from baton.entrypoints.ds_channels import main
from baton.runtime.config import ModelArgs
from baton.runtime.double_sparsity import channel_key
from baton.runtime.runner.model_runner import ModelRunner
from baton.runtime.text.tokenizer import Tokenizer
from benchmarks.common.nan_model import write_nan_model

TOY = Path(__file__).parents[2] / "examples" / "toy_model"


@pytest.mark.equality
def test_channels_are_those_with_the_largest_means(tmp_path: Path) -> None:
    text, output = tmp_path / "text", tmp_path / "channels.json"
    text.write_text("The capital of France is Paris. " * 60)
    flags = ["--model-path", str(TOY), "--text", str(text), "--output", str(output), "--dtype", "float32"]
    assert main([*flags, "--num-tokens", "300", "--device", "cpu"]) == 0
    found = json.loads(output.read_text())
    args = ModelArgs(
        model_path=str(TOY),
        device="cpu",
        dtype="float32",
        enable_double_sparsity=True,
        ds_channel_config_path=str(output),
        ds_heavy_channel_num=8,
    )
    runner = ModelRunner(args, context_length=0, num_rows=1, page_size=1, max_total_tokens=300)
    assert runner.sparsity is not None and len(runner.sparsity.orders) * 3 == len(found)
    for layer, order in runner.sparsity.orders.items():
        assert order[:, :8].tolist() == [head[:8] for head in found[channel_key(layer, "qk")]]
        assert all(sorted(head) == list(range(order.shape[1])) for head in found[channel_key(layer, "k")])
    # The keys of the same prompt, as the pool has them without an order.
    plain = ModelRunner(
        ModelArgs(model_path=str(TOY), device="cpu", dtype="float32"),
        context_length=0, num_rows=1, page_size=1, max_total_tokens=300,
    )  # fmt: skip
    ids = Tokenizer.load(TOY).encode(text.read_text())[:300]
    assert plain.find_heavy_channels(ids) == found
    for layer, keys in enumerate(plain.kv_pool.k):
        means = keys[1 : len(ids) + 1].double().abs().mean(0)
        expected = means.argsort(dim=1, descending=True)
        assert torch.equal(torch.tensor(found[channel_key(layer, "k")]), expected)


@pytest.mark.equality
def test_long_texts_are_cut_to_the_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The toy model's is 2048 tokens. Only the beginning of the text is read."""
    text, output = tmp_path / "text", tmp_path / "channels.json"
    text.write_bytes(b"Paris. " * 50_000 + bytes([255]))
    flags = ["--model-path", str(TOY), "--text", str(text), "--output", str(output)]
    assert main(flags) == 0
    assert "from 2048 tokens" in capsys.readouterr().out


@pytest.mark.equality
def test_nan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise the order would be arbitrary."""
    write_nan_model(tmp_path, Tokenizer.load(TOY).encode("x")[0])
    text, output = tmp_path / "text", tmp_path / "channels.json"
    text.write_text("Paris x")
    assert main(["--model-path", str(tmp_path), "--text", str(text), "--output", str(output), "--device", "cpu"]) == 1
    assert "of layer 1 are not finite" in capsys.readouterr().err
    assert not output.exists()


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.write_text("")
    binary = tmp_path / "binary"
    binary.write_bytes(bytes(range(256)))
    out = tmp_path / "out"
    for model, text, output, reason in (
        (TOY, tmp_path / "missing", out, "missing"),
        (TOY, empty, out, "empty is empty"),
        (TOY, binary, out, "binary is not UTF-8"),
        (tmp_path / "nothing", empty, out, "nothing"),
        (tmp_path / "nothing", empty, tmp_path, "--output"),  # before anything takes long
        (tmp_path / "nothing", empty, tmp_path / "no" / "folder", "--output"),
    ):
        assert main(["--model-path", str(model), "--text", str(text), "--output", str(output)]) == 1
        said = capsys.readouterr().err
        assert said.startswith("baton: ") and reason in said and said.count("\n") == 1
    assert not out.exists()
