"""Turns prompts into token ids, all but short texts in a thread, a piece at a time; even so, no continuation overtakes
its parent. A text that can never fit the context is refused before it is tokenised, or as soon as that shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ...scheduler.outcome import ContextOverflow, RequestRefused, context_exceeded
from ..prompt import Prompt, truncated
from .tokenizer import Tokenizer

T = TypeVar("T")

_INLINE_CHARS = 2_000
"""Longer texts are tokenised in a thread, so that the loop keeps serving other calls (the tokenizer drops the GIL)."""

MAX_TOKENS_OF_CALL = 2_000_000
"""Limit for all texts of a call, and for prompts that repeat a part of it: ids take some 36 bytes each here."""

_GENEROUS = 4
"""A tokenizer may drop characters. No text fits that has more than so many times the characters of the longest token
for each token of the context."""


@dataclass(slots=True, frozen=True)
class TokenizedPrompt:
    """ids: the whole prompt; None for a continuation that brings no prompt of its own. suffix_ids: only for a
    continuation."""

    ids: list[int] | None
    suffix_ids: list[int] | None


class PromptTokenizer:
    """Tokenises prompts, for one asyncio loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # One: the model needs the other cores, and later calls wait for pieces, not for whole texts.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._in_progress: dict[str, asyncio.Future[None]] = {}
        """Rids of prompts being tokenised. A future is done when its caller has taken them over, or failed."""

    @property
    def num_in_progress(self) -> int:
        return len(self._in_progress)

    @asynccontextmanager
    async def tokenized(self, prompts: list[Prompt], max_tokens: int) -> AsyncIterator[list[TokenizedPrompt]]:
        """Yield the prompts' tokens, once the callers of all parents already in progress have taken theirs over. The
        ``with`` body takes these over.

        max_tokens: more cannot be served, unless they are truncated to less. Raises RequestRefused for text that is not
        Unicode, or too long.
        """
        parents = {prompt.continuation.parent_rid for prompt in prompts if prompt.continuation is not None}
        before = [self._in_progress[rid] for rid in parents & self._in_progress.keys()]
        taken_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # A rid that two calls use belongs to the first; the second will be refused.
        mine = [p.rid for p in prompts if self._in_progress.setdefault(p.rid, taken_over) is taken_over]
        try:
            tokens = await self._tokenize(prompts, max_tokens)
            if before:
                await asyncio.wait(before)
            yield tokens
        finally:
            taken_over.set_result(None)
            for rid in mine:
                self._in_progress.pop(rid, None)

    async def encode(
        self,
        texts: list[str],
        max_tokens: int,
        *,
        add_special_tokens: bool = True,
        goes_on: bool = False,
        param: str = "text",
    ) -> list[list[int]]:
        """Token ids of each text. goes_on: each continues another text (`Tokenizer.encode_continuation`). Raises
        RequestRefused, blaming ``param``, for text that UTF-8 cannot encode (lone surrogates) and for a text of more
        than ``max_tokens`` tokens."""
        tokenizer = self._tokenizer
        if goes_on:
            one, batch = tokenizer.encode_continuation, tokenizer.encode_continuation_batch
            around = tokenizer.special_ids_around_continuation
            return await self._encode(texts, one, batch, around, max_tokens, param)
        return await self._encode(
            texts,
            lambda text: tokenizer.encode(text, add_special_tokens),
            lambda texts: tokenizer.encode_batch(texts, add_special_tokens),
            tokenizer.special_ids_around if add_special_tokens else ([], []),
            max_tokens,
            param,
        )

    def close(self) -> None:
        """Stop the thread. No call may follow."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _tokenize(self, prompts: list[Prompt], max_tokens: int) -> list[TokenizedPrompt]:
        most = tokens_to_read(max_tokens, is_truncated=any(prompt.truncate_to is not None for prompt in prompts))
        texts = iter(await self.encode([prompt.text for prompt in prompts if prompt.text is not None], most))
        suffixes = [prompt.continuation.suffix_text for prompt in prompts if prompt.continuation is not None]
        suffixes = [text for text in suffixes if text is not None]
        suffix_texts = iter(await self.encode(suffixes, max_tokens, goes_on=True, param="continuation_suffix"))
        tokenized = []
        for prompt in prompts:
            ids = next(texts) if prompt.text is not None else prompt.input_ids
            if ids is not None:
                ids = truncated(prompt, ids, max_tokens)
            suffix_ids = None
            if (came := prompt.continuation) is not None:
                suffix_ids = next(suffix_texts) if came.suffix_text is not None else prompt.suffix_ids or []
            tokenized.append(TokenizedPrompt(ids, suffix_ids))
        return tokenized

    async def _encode(
        self,
        texts: list[str],
        encode: Callable[[str], list[int]],
        encode_batch: Callable[[list[str]], list[list[int]]],
        around: tuple[list[int], list[int]] | None,
        max_tokens: int,
        param: str,
    ) -> list[list[int]]:
        """around: the special tokens before and after each text; None where a text cannot be put together."""
        most_chars = max_tokens * self._tokenizer.longest_token * _GENEROUS
        for text in texts:
            if len(text) > most_chars:
                raise _too_long(f"has {len(text)} characters", max_tokens, param)
        try:
            if sum(map(len, texts)) <= _INLINE_CHARS:
                return [encode(text) for text in texts]
            found: list[list[int]] = []
            total = 0
            for group in _groups(texts):
                if len(group[0]) <= SLICE_CHARS:
                    found += await self._in_thread(lambda group=group: encode_batch(group))
                elif (ids := await self._encode_long(group[0], around, max_tokens)) is not None:
                    found.append(ids)
                else:
                    await self._refuse_many_tokens(group[0], max_tokens)
                    found += await self._in_thread(lambda group=group: encode_batch(group))
                total += sum(map(len, found[-len(group) :]))
                check_tokens_of_call(total, param)
            return found
        except TooManyTokens:
            raise _too_long(f"has more than {max_tokens} tokens", max_tokens, param) from None
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestRefused(f"the text is not valid Unicode: {error}", param=param) from None

    async def _encode_long(
        self, text: str, around: tuple[list[int], list[int]] | None, max_tokens: int
    ) -> list[int] | None:
        """The ids of a text that is longer than a piece; None where it cannot be cut. Every piece is a turn in the
        thread. Raises TooManyTokens."""
        if around is None:
            return None
        steps = encode_slices(text, max_tokens)
        piece = next(steps)
        try:
            while True:
                piece = steps.send(await self._in_thread(lambda piece=piece: self._tokenizer.encode_piece(piece)))
        except StopIteration as end:
            return [*around[0], *end.value, *around[1]]
        except CannotBeCut:
            return None

    async def _refuse_many_tokens(self, text: str, max_tokens: int) -> None:
        """Raises TooManyTokens for a text that has far too many, wherever it is cut."""
        seen = 0
        for start in range(0, len(text), SLICE_CHARS):
            piece = text[start : start + SLICE_CHARS]
            seen += len((await self._in_thread(lambda piece=piece: self._tokenizer.encode_piece(piece))).ids)
            if seen > 2 * max_tokens:
                raise TooManyTokens

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _groups(texts: list[str]) -> list[list[str]]:
    """Group neighbouring texts for one turn in the thread; a text that is longer than a piece is a group of its own."""
    groups: list[list[str]] = []
    size = SLICE_CHARS
    for text in texts:
        if size + len(text) > SLICE_CHARS:
            groups.append([])
            size = 0
        groups[-1].append(text)
        size += len(text)
    return groups


def check_tokens_of_call(total: int, param: str) -> None:
    """Raises RequestRefused if all prompts of a call have more than `MAX_TOKENS_OF_CALL` together."""
    if total > MAX_TOKENS_OF_CALL:
        raise RequestRefused(
            f"the prompts have more than {MAX_TOKENS_OF_CALL} tokens together; send fewer at a time", param=param
        )


def tokens_to_read(context_length: int, *, is_truncated: bool) -> int:
    """The longest text to tokenise, in tokens: a text that is truncated afterwards may exceed the context by far."""
    return max(context_length, MAX_TOKENS_OF_CALL) if is_truncated else context_length


def _too_long(what: str, max_tokens: int, param: str) -> RequestRefused:
    if max_tokens >= MAX_TOKENS_OF_CALL:
        return RequestRefused(
            f"the prompt {what}; no more than {max_tokens} tokens are read. Shorten it",
            code="context_length_exceeded",
            param=param,
        )
    return context_exceeded(ContextOverflow(max_tokens, max_tokens + 1, at_least=True), param)


# -- long texts, piece by piece ----------------------------------------------------------------------------------------
#
# The library takes some 150 bytes per byte of a text while it works on it, and holds up other calls for as long. So a
# long text is cut where a word of the pre-tokenizer ends, far enough from the end of the piece: the rest is tokenised
# as if nothing stood before it. Each cut is verified: the next piece must begin with the tokens that the piece before
# it had after the cut.

SLICE_CHARS = 65_536


class Encoding(Protocol):
    """The used part of the library's class: each token's id, word (None for none) and place in characters."""

    @property
    def ids(self) -> list[int]: ...

    @property
    def word_ids(self) -> list[int | None]: ...

    @property
    def offsets(self) -> list[tuple[int, int]]: ...


class TooManyTokens(Exception):
    """The text has more tokens than allowed."""


class CannotBeCut(Exception):
    """The tokens of this text depend on what stands far before them, or its words are longer than a piece."""


def encode_slices(text: str, max_tokens: int, slice_chars: int = SLICE_CHARS) -> Generator[str, Encoding, list[int]]:
    """Yields pieces to be encoded, takes their encodings, returns the ids of ``text``, without special tokens.

    Raises TooManyTokens as soon as there are more than ``max_tokens``, and CannotBeCut.
    """
    ids: list[int] = []
    start = 0
    expected: list[int] = []
    while True:
        piece = text[start : start + slice_chars]
        encoding = yield piece
        found = encoding.ids
        if found[: len(expected)] != expected:
            raise CannotBeCut
        if start + len(piece) == len(text):
            return ids + found
        num_tokens, num_chars = _cut(encoding, len(piece))
        ids += found[:num_tokens]
        start += num_chars
        if len(ids) > max_tokens:
            raise TooManyTokens
        expected = found[num_tokens : _reliable(encoding, len(piece))]
        if not expected:
            raise CannotBeCut


def _reliable(encoding: Encoding, num_chars: int) -> int:
    """How many tokens stand before the last eighth of the piece, where special tokens and words may be halves."""
    places = encoding.offsets
    return next((i + 1 for i in range(len(places) - 1, -1, -1) if places[i][1] <= num_chars * 7 // 8), 0)


def _cut(encoding: Encoding, num_chars: int) -> tuple[int, int]:
    """The last place in the middle half of the piece where a word ends: tokens and characters before it."""
    words, places = encoding.word_ids, encoding.offsets
    for i in range(len(words) - 1, 0, -1):
        here, before = places[i], places[i - 1]
        is_new_word = words[i] != words[i - 1] and words[i] is not None
        if is_new_word and here[0] == before[1] and num_chars // 4 <= here[0] <= num_chars * 3 // 4:
            return i, here[0]
    raise CannotBeCut
