"""What the tests of this folder share."""

from __future__ import annotations

import pytest

from baton.runtime.text.tokenizer import Tokenizer
from tests.doubles.byte_tokenizer import write_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("model")))
