"""The tokenizer that benchmarks make for themselves."""

from __future__ import annotations

import random
from pathlib import Path

from baton.runtime.checkpoint.hf_config import load_model_config
from baton.runtime.text.tokenizer import Tokenizer
from benchmarks.common import models


def test_any_token_ids_round_trip_through_text(tmp_path: Path) -> None:
    models.write_dummy_model(tmp_path, models.LLAMA_TINY)
    size = load_model_config(tmp_path).vocab_size
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == size
    for seed in range(20):
        rng = random.Random(seed)
        ids = [rng.randrange(128) if rng.random() < 0.3 else rng.randrange(size) for _ in range(300)]
        assert tokenizer.encode(tokenizer.decode(ids)) == ids, f"seed {seed}"
    assert tokenizer.encode("</think>\n a") == list(b"</think>\n a")
