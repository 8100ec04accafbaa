"""flash-linear-attention on a GPU: every operation of every family works, and gives torch's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.runtime.checkpoint.hf_config import load_model_config
from baton.runtime.layers.states import fla_states
from baton.runtime.layers.states.selection import find_trouble
from tests.doubles.tiny_models import save_reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "granite_hybrid", "falcon_h1", "mamba2"])
def test_all_that_a_model_needs_works(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("fla")
    save_reference(name, tmp_path)
    config = load_model_config(tmp_path, context_length=0)
    assert find_trouble(fla_states.load(), config, dtype, torch.device("cuda", 0)) == {}
