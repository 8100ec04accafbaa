"""A folder of pickles is refused with a command; the command makes a folder that gives the same outputs."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.entrypoints.convert_weights import main
from baton.runtime.checkpoint.model_files import ModelLoadError
from baton.runtime.config import ModelArgs
from baton.runtime.runner.model_runner import ModelRunner
from tests.doubles.forced_options import FORCED
from tests.doubles.model_driver import ModelDriver
from tests.doubles.tiny_models import make_reference


def make_runner(folder: Path) -> ModelRunner:
    args = ModelArgs(model_path=str(folder), device="cpu", **FORCED)
    return ModelRunner(args, context_length=0, num_rows=2, page_size=1, max_total_tokens=256)


@pytest.mark.equality
@torch.no_grad()
def test_refusal_names_the_command_that_converts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a model"
    reference = make_reference("Llama", {"tie_word_embeddings": True})
    reference.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(reference.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"weights as pickles \(pytorch_model\.bin\)") as refusal:
        make_runner(folder)
    command = shlex.split(str(refusal.value).split("`")[1])
    assert command[:3] == ["python", "-m", "baton.entrypoints.convert_weights"]
    assert main(command[3:]) == 0
    output = tmp_path / "a model-safetensors"
    assert f"--model-path {output}" in capsys.readouterr().out
    ids = np.arange(1, 30, dtype=np.int32)
    driver = ModelDriver(make_runner(output))
    found = driver.step([(driver.open(ids), len(ids))]).logits[0]
    torch.testing.assert_close(found, reference(torch.from_numpy(ids)[None].long()).logits[0, -1], atol=1e-4, rtol=1e-4)


def test_failure_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--output", str(tmp_path / "x")]) == 1
    assert capsys.readouterr().err.startswith(f"baton: {tmp_path} has no weights to convert")
