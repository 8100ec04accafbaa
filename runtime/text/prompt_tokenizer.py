"""Turns prompts into token ids, long texts in a thread; even so, no continuation overtakes its parent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ...scheduler.outcome import RequestRefused
from ..prompt import Prompt
from .tokenizer import Tokenizer

_INLINE_CHARS = 20_000
"""Longer texts are tokenised in a thread, so that the loop goes on serving the others (the tokenizer drops the GIL)."""


@dataclass(slots=True, frozen=True)
class TokenizedPrompt:
    """ids: the whole prompt; None for a continuation that brings no prompt of its own. suffix_ids: only for a
    continuation."""

    ids: list[int] | None
    suffix_ids: list[int] | None


class PromptTokenizer:
    """Lives on one asyncio loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._in_progress: dict[str, asyncio.Future[None]] = {}
        """Rids whose prompts are being tokenised. A future is done when its caller has taken them over, or failed."""

    @property
    def num_in_progress(self) -> int:
        return len(self._in_progress)

    @asynccontextmanager
    async def tokenized(self, prompts: list[Prompt]) -> AsyncIterator[list[TokenizedPrompt]]:
        """Yield the prompts' tokens, once the callers of all parents already in progress have taken theirs over. The
        ``with`` body takes these over. Raises RequestRefused for text that is not Unicode."""
        parents = {prompt.continuation.parent_rid for prompt in prompts if prompt.continuation is not None}
        before = [self._in_progress[rid] for rid in parents & self._in_progress.keys()]
        taken_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # A rid that two calls use belongs to the first; the second will be refused.
        mine = [p.rid for p in prompts if self._in_progress.setdefault(p.rid, taken_over) is taken_over]
        try:
            tokens = await self._tokenize(prompts)
            if before:
                await asyncio.wait(before)
            yield tokens
        finally:
            taken_over.set_result(None)
            for rid in mine:
                self._in_progress.pop(rid, None)

    async def encode(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text. Raises RequestRefused for text that UTF-8 cannot encode (lone surrogates)."""
        tokenizer = self._tokenizer
        return await _encode(
            texts,
            lambda text: tokenizer.encode(text, add_special_tokens),
            lambda texts: tokenizer.encode_batch(texts, add_special_tokens),
            param="text",
        )

    async def _tokenize(self, prompts: list[Prompt]) -> list[TokenizedPrompt]:
        texts = iter(await self.encode([prompt.text for prompt in prompts if prompt.text is not None]))
        suffixes = [prompt.continuation.suffix_text for prompt in prompts if prompt.continuation is not None]
        suffixes = [text for text in suffixes if text is not None]
        one, batch = self._tokenizer.encode_continuation, self._tokenizer.encode_continuation_batch
        suffix_texts = iter(await _encode(suffixes, one, batch, param="continuation_suffix"))
        tokenized = []
        for prompt in prompts:
            ids = next(texts) if prompt.text is not None else prompt.input_ids
            suffix_ids = None
            if (came := prompt.continuation) is not None:
                suffix_ids = next(suffix_texts) if came.suffix_text is not None else prompt.suffix_ids or []
            tokenized.append(TokenizedPrompt(ids, suffix_ids))
        return tokenized


async def _encode(
    texts: list[str],
    encode: Callable[[str], list[int]],
    encode_batch: Callable[[list[str]], list[list[int]]],
    *,
    param: str,
) -> list[list[int]]:
    """Encode them one by one, or in a thread if they are long. Raises RequestRefused, blaming ``param``, for text that
    is not Unicode."""
    try:
        if sum(map(len, texts)) > _INLINE_CHARS:
            return await asyncio.to_thread(encode_batch, texts)
        return [encode(text) for text in texts]
    except (UnicodeEncodeError, TypeError) as error:
        raise RequestRefused(f"the text is not valid Unicode: {error}", param=param) from None
