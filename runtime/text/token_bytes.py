"""Maps each token id to its bytes.

The decoders of language-model tokenizers come in two families, and in both a token is a fixed run of bytes:

    ByteLevel (GPT-2, Llama 3, Qwen)         every character of the token names one byte
    ▁ and <0x0A> (Llama 2, Mistral, Gemma)   ▁ is a space, <0x..> is one byte, the rest is the text itself

So the text of a sequence is the UTF-8 decoding of its tokens' bytes, laid end to end, and can be built one token at a
time in constant work. A half character is then a known state (bytes pending), not a guess from U+FFFD in the text.
"""

from __future__ import annotations

import codecs
import json
import re

import tokenizers

REPLACE_EACH_BYTE = "baton-replace-each-byte"
"""Codec error handler: one U+FFFD for each undecodable byte, as byte-fallback decoders do."""

codecs.register_error(REPLACE_EACH_BYTE, lambda error: ("\ufffd" * (error.end - error.start), error.end))  # type: ignore[attr-defined]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedDecoder(ValueError):
    """tokenizer.json uses a decoder that maps tokens to no fixed runs of bytes."""


def _byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE: printable ones for themselves, others from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet.values())
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()


class TokenBytes:
    """Token id -> bytes, each computed at its first use (a whole vocabulary would cost start-up time).

    Raises UnsupportedDecoder for decoders of other kinds (WordPiece, CTC, BPEDecoder).
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._cache: dict[int, bytes] = {}
        self._byte_level = False
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        decoder = json.loads(backend.to_str())["decoder"] if backend.decoder is not None else None
        if decoder is None:
            raise UnsupportedDecoder(
                "tokenizer.json has no decoder; one of ByteLevel, Metaspace or ByteFallback is needed"
            )
        for step in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
            self._add_step(step)
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        """Ids that ``skip_special_tokens`` leaves out of the text."""

    def _add_step(self, step: dict) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._byte_level = True
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Metaspace", "replacement": mark}:
                self._replacements.append((mark, " "))
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                self._replacements.append((old, new))
            case {"type": "Fuse"} | {"type": "Strip", "stop": 0}:
                pass  # Strip takes the space off the start of a text; output continues one, so it keeps its space
            case _:
                raise UnsupportedDecoder(
                    f"the decoder {json.dumps(step, ensure_ascii=False)} of tokenizer.json is not supported; "
                    "supported: ByteLevel, Metaspace, ByteFallback, Fuse, and Replace and Strip of plain strings"
                )

    @property
    def errors(self) -> str:
        """Codec error handler that replaces invalid bytes the way this tokenizer's own decoder does."""
        return REPLACE_EACH_BYTE if self._byte_fallback else "replace"

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes; empty for an id that the tokenizer does not know."""
        piece = self._cache.get(token_id)
        if piece is None:
            piece = self._cache[token_id] = self._compute(token_id)
        return piece

    def _compute(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            values = [_BYTE_LEVEL.get(char) for char in token]
            # An added token may hold characters outside the alphabet; it then stands for its own text.
            return token.encode() if None in values else bytes(values)  # type: ignore[arg-type]
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()
