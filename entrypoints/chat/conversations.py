"""Finds the turn that a chat goes on from, so that it continues it without being asked.

    turn      prompt  …<|im_start|>assistant\\n   said  Paris.          ids  of both, as the model had them
    next      …<|im_start|>assistant\\nParis.<|im_end|>\\n<|im_start|>user\\nAnd …      only this is tokenised ──┘

A chat brings all its messages every time. Where their text begins with what a recorded turn was asked and said, the
ids of that turn are taken as they were and only the rest is tokenised: the model sees exactly what it said, and the
scheduler, which is told the turn's rid, hands its KV over where all of its tokens are the same (`Predecessor`).

A template writes an answer its own way: it strips spaces, or puts a tool call's JSON in another form. Such a turn is
gone on from all the same if the two say the same: same reasoning, same words but for spaces around them, same calls.
A template that drops earlier reasoning says something else: there the shared part ends.

Kept for the last turns only, by number and by size; with one that is forgotten nothing is lost but the tokenising.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from .messages import Conversation
from .rendering import Renderer

MAX_TURNS = 1024
MAX_CHARS = 2**25
"""Of all turns; their ids take about as much again."""

MAX_TEMPLATES_ASKED = 2
"""Prompts of one chat for which the template is asked how it writes the answer: rendering takes milliseconds."""

Key = tuple[str, bytes]
"""Namespace, and the digest of a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """An answer that ended well. ``text``: prompt and answer, as ``ids``, int32 [n], have them; it leaves out the end
    of an answer that no whole token has."""

    rid: str
    index: int
    namespace: str
    num_messages: int
    """Of the prompt: the answer is the message behind them."""
    prompt_chars: int
    """Up to where the answer begins, with what was put there for the model."""
    text: str
    ids: np.ndarray

    @property
    def said(self) -> str:
        return self.text[self.prompt_chars :]


@dataclass(frozen=True, slots=True)
class GoesOn:
    """A chat that goes on from a turn, with this text."""

    turn: Turn
    rest: str


class Conversations:
    """The recorded turns."""

    def __init__(
        self,
        renderer: Renderer,
        says_the_same: Callable[[str, str], bool],
        special_texts: Iterable[str],
        *,
        keeps: bool = True,
    ) -> None:
        """says_the_same: do a template's words for an answer say what the model said? special_texts: of the tokenizer's
        special tokens. keeps: False to record none."""
        self._renderer = renderer
        self._says_the_same = says_the_same
        self._keeps = keeps
        self._special_texts = tuple(text for text in special_texts if text)
        self._turns: OrderedDict[tuple[str, int], tuple[Key, Turn]] = OrderedDict()
        """By rid and index, the latest last."""
        self._by_prompt: dict[Key, list[Turn]] = {}
        self._lengths: Counter[int] = Counter()
        """Bytes of the recorded prompts."""
        self._chars = 0

    def __len__(self) -> int:
        return len(self._turns)

    def record(self, turn: Turn) -> None:
        if not self._keeps:
            return
        prompt = turn.text[: turn.prompt_chars].encode("utf-8", "surrogatepass")
        key = turn.namespace, hashlib.blake2b(prompt, digest_size=16).digest()
        self._forget(turn.rid, turn.index)
        self._turns[turn.rid, turn.index] = key, turn
        self._by_prompt.setdefault(key, []).append(turn)
        self._lengths[len(prompt)] += 1
        self._chars += len(turn.text)
        while len(self._turns) > MAX_TURNS or (self._chars > MAX_CHARS and len(self._turns) > 1):
            self._forget(*next(iter(self._turns)))

    def find(self, conversation: Conversation, text: str, namespace: str) -> GoesOn | None:
        """The longest turn that ``text``, the conversation's prompt, goes on from."""
        templates_asked = 0
        for turns in self._begun_by(text, namespace):
            found = self._word_for_word(turns, text)
            if found is None and templates_asked < MAX_TEMPLATES_ASKED:
                templates_asked += 1
                found = self._in_other_words(turns, conversation, text)
            if found is not None:
                self._turns.move_to_end((found.turn.rid, found.turn.index))
                return found
        return None

    def after(self, turn: Turn, conversation: Conversation, text: str) -> GoesOn | None:
        """``text``, the conversation's prompt, as what goes on from this turn, recorded or not; None if it does not."""
        if not text.startswith(turn.text[: turn.prompt_chars]):
            return None
        return self._word_for_word([turn], text) or self._in_other_words([turn], conversation, text)

    def _begun_by(self, text: str, namespace: str) -> Iterator[list[Turn]]:
        """The turns of each prompt that ``text`` begins with; the longest prompt, and the latest turn, first."""
        data = text.encode("utf-8", "surrogatepass")
        digest, start = hashlib.blake2b(digest_size=16), 0
        found: list[list[Turn]] = []
        for length in sorted(self._lengths):
            if length > len(data):
                break
            digest.update(data[start:length])
            start = length
            if turns := self._by_prompt.get((namespace, digest.digest())):
                found.append(turns)
        for turns in reversed(found):
            if text.startswith(turns[0].text[: turns[0].prompt_chars]):
                yield turns[::-1]

    def _word_for_word(self, turns: list[Turn], text: str) -> GoesOn | None:
        """A turn whose text ``text`` begins with. What follows must be nothing, or begin with a token that merges with
        none: ids on both sides of the border are then those of the whole text."""
        for turn in turns:
            end = len(turn.text)
            if text.startswith(turn.text) and (len(text) == end or text.startswith(self._special_texts, end)):
                return GoesOn(turn, text[end:])
        return None

    def _in_other_words(self, turns: list[Turn], conversation: Conversation, text: str) -> GoesOn | None:
        """A turn that said what the template writes for the answer, in its own way. All have the same prompt."""
        answer, start = turns[0].num_messages, turns[0].prompt_chars
        answered = conversation.first(answer + 1)
        if len(answered.messages) <= answer:
            return None
        written = self._renderer.render(answered)
        end = self._renderer.after_content(answered)
        if not (text.startswith(written) and written.endswith(end) and len(written) >= start + len(end)):
            return None
        words = written[start : len(written) - len(end)]
        said = next((turn for turn in turns if self._says_the_same(words, turn.said)), None)
        return None if said is None else GoesOn(said, end + text[len(written) :])

    def _forget(self, rid: str, index: int) -> None:
        if (known := self._turns.pop((rid, index), None)) is None:
            return
        key, turn = known
        self._chars -= len(turn.text)
        length = len(turn.text[: turn.prompt_chars].encode("utf-8", "surrogatepass"))
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]
        turns = self._by_prompt[key]
        turns.remove(turn)
        if not turns:
            del self._by_prompt[key]
