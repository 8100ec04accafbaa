"""Which tokens of an answer the next turn goes on from: whole characters, and no more than the client saw."""

from __future__ import annotations

import pytest

from baton.entrypoints.chat.chats import kept_tokens
from baton.runtime.text.token_bytes import TokenBytes
from baton.runtime.text.tokenizer import Tokenizer
from tests.doubles.byte_tokenizer import EOS_ID, write_byte_tokenizer


@pytest.fixture(scope="module")
def token_bytes(tmp_path_factory: pytest.TempPathFactory) -> TokenBytes:
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("model"))).token_bytes


SPECIAL = [*b"a", EOS_ID, *b"b"]


@pytest.mark.parametrize(
    ("ids", "visible", "kept", "text"),
    [
        ([], None, 0, ""),
        ([*b"abc"], None, 3, "abc"),
        ([*"aé".encode()], None, 3, "aé"),
        ([*"aé".encode()[:-1]], None, 1, "a"),
        ([*"a🙂".encode()[:-1]], None, 1, "a"),
        ([*"🙂".encode()[:2]], None, 0, ""),
        ([*b"abcSTOP"], "abc", 3, "abc"),
        ([*b"abcSTOP"], "", 0, ""),
        ([*"aéSTOP".encode()], "aé", 3, "aé"),
        ([*b"abc"], "abc", 3, "abc"),
        (SPECIAL, None, 3, "a<eos>b"),
        (SPECIAL, "ab", 3, "a<eos>b"),
        (SPECIAL, "a", 2, "a<eos>"),
    ],
)
def test_kept_tokens(token_bytes: TokenBytes, ids: list[int], visible: str | None, kept: int, text: str) -> None:
    assert kept_tokens(token_bytes, ids, visible, True) == (ids[:kept], text)


def test_visible_special_tokens_are_kept(token_bytes: TokenBytes) -> None:
    assert kept_tokens(token_bytes, SPECIAL, "a<eos>", False) == (SPECIAL[:2], "a<eos>")
