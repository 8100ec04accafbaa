"""Finds the recorded turn that a chat continues, so that every chat continues its KV by itself.

    turn      prompt  …<|im_start|>assistant\\n   said  Paris.          ids  of both, as the model had them
    next      …<|im_start|>assistant\\nParis.<|im_end|>\\n<|im_start|>user\\nAnd …      only this is tokenised ──┘

A chat brings all its messages every time. Where their text begins with the prompt and answer of a recorded turn, the
ids of that turn are reused and only the rest is tokenised: the model sees exactly the tokens that it wrote, and the
scheduler, which is told the turn's rid, hands its KV over where all of its tokens are the same (`Predecessor`).

A template writes an answer its own way: it strips spaces, or formats a tool call's JSON differently. The chat continues
such a turn if the two mean the same: same reasoning, same words but for surrounding spaces, same calls. A template that
drops earlier reasoning changes the meaning: there the shared part ends.

Kept for the last turns only, by number and by size, the client that has most of them losing its oldest first; with one
that is forgotten nothing is lost but the tokenising.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from ...scheduler.client_shares import ClientShares
from .message_digests import ChatDigests, Recognition
from .messages import Conversation
from .rendering import Renderer

MAX_TURNS = 1024
MAX_CHARS = 2**25
"""Limit for the texts of all turns; their ids take about as much again."""

MAX_TEMPLATES_ASKED = 2
"""Most prompts of one chat with answers that are rendered for comparison: rendering takes milliseconds."""

MAX_TURNS_READ = 8
"""Latest answers to one prompt that are compared with the template's words."""

MAX_EQUALS = 64
"""Conversations that began alike of which an edited chat's is found, the last continued ones."""

_OTHERWISE, _FEW_CHARS = 16, 1000
"""A template's words for an answer are no more than so many times longer, and some: escapes, spaces and marks."""

Key = tuple[str, bytes]
"""Scope, and the digest of a prompt."""


class Owner(NamedTuple):
    """The owner of a turn, as far as its request says; see `Turn`. Texts of a turn are shown to its owner only."""

    scope: str
    user: str
    conversation: str | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """An answer that ended well. ``text``: prompt and answer, as ``ids``, int32 [n], have them; it leaves out the end
    of an answer that no whole token has."""

    rid: str
    index: int
    scope: str
    """Its client and namespace (`Client.scope`): only chats of the same scope continue it."""
    user: str = ""
    """The client's user (`RequestSpec.client`)."""
    num_messages: int
    """Messages of the prompt; the answer is the message behind them."""
    given: int = 0
    """Messages that its conversation came with. Those of the assistant among them are examples, not answers."""
    prompt_chars: int
    """Up to where the answer begins, with what was put there for the model."""
    text: str
    ids: np.ndarray
    job_id: str | None = None
    """The job of this turn and of the turns that continue it."""
    conversation: str | None = None
    """The name that its request gave the conversation, a job's or a shared one; None if it gave none."""
    hides_special: bool = False
    """The model spelled a special token in letters somewhere in it. The same text in a prompt means the token, which
    ends a message; so only a request that names the turn continues it."""
    digests: ChatDigests | None = None
    """Digests of its messages; None where chats are not compared."""

    is_prepared: bool = False
    """It is the beginning of the prompt that follows the turn of its rid (next_turn.py): ``said`` is empty."""

    @property
    def said(self) -> str:
        return self.text[self.prompt_chars :]

    @property
    def owner(self) -> Owner:
        return Owner(self.scope, self.user, self.conversation)

    @property
    def name(self) -> tuple[str, str, int]:
        return self.scope, self.rid, -1 - self.index if self.is_prepared else self.index


@dataclass(frozen=True, slots=True)
class GoesOn:
    """A chat that continues a turn, with the rest of its text. again: another chat has continued that turn before."""

    turn: Turn
    rest: str
    again: bool = False


class Conversations:
    """The recorded turns. Long chats are looked up in threads while others are recorded, and each is counted on as it
    was then."""

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
        self._turns: dict[tuple[str, str, int], tuple[Key, Turn]] = {}
        """By name."""
        self._shares: ClientShares[tuple[str, str, int]] = ClientShares()
        """Names of the turns; their sizes are characters."""
        self._continued: set[tuple[str, str, int]] = set()
        """Names of the turns that were found."""
        self._by_prompt: dict[Key, list[Turn]] = {}
        self._lengths: Counter[int] = Counter()
        """Bytes of the recorded prompts."""
        self._by_job: dict[tuple[Owner, str], Turn] = {}
        """The latest turn of each job."""
        self._by_message: dict[tuple[Owner, bytes], Turn] = {}
        """The latest turn with each message, by the message's key."""
        self._chars = 0
        self._lock = threading.Lock()
        """Guards all records; never held while a template is rendered or an answer parsed."""

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def keeps(self) -> bool:
        """False if no turn is recorded."""
        return self._keeps

    def get_turn(self, scope: str, rid: str) -> Turn | None:
        """The first answer of this request, if it is recorded."""
        _, turn = self._turns.get((scope, rid, 0), (None, None))
        return turn

    def new_job(self, rid: str) -> str | None:
        """The job of a chat that continues no turn and names no job; None where turns are not recorded."""
        return f"chat-{rid}" if self._keeps else None

    def record(self, turn: Turn, client: str = "") -> None:
        """client: the name of the client that the turn belongs to."""
        if not self._keeps or turn.hides_special:
            return
        prompt = turn.text[: turn.prompt_chars].encode("utf-8", "surrogatepass")
        key = turn.scope, hashlib.blake2b(prompt, digest_size=16).digest()
        with self._lock:
            self._forget(turn.name)
            self._turns[turn.name] = key, turn
            self._by_prompt.setdefault(key, []).append(turn)
            self._lengths[len(prompt)] += 1
            if turn.job_id is not None and not turn.is_prepared:
                self._by_job[turn.owner, turn.job_id] = turn
            for message in turn.digests.keys if turn.digests is not None else ():
                self._by_message[turn.owner, message] = turn
            self._chars += len(turn.text)
            self._shares.put_key(client, turn.name, len(turn.text))
            while len(self._turns) > MAX_TURNS or (self._chars > MAX_CHARS and len(self._turns) > 1):
                self._forget(next(self._shares.in_order_of_forgetting(by_size=len(self._turns) <= MAX_TURNS)))

    def find_turn(self, conversation: Conversation, text: str, scope: str, name: str | None = None) -> GoesOn | None:
        """The longest turn of a scope that ``text``, the conversation's prompt, continues. Conversations may begin with
        the same words: of equal turns it is one of the same ``name`` (`Turn.conversation`) that none has continued, if
        there is one."""
        templates_asked = 0
        for turns in self._begun_by(text, scope):
            turns.sort(key=lambda turn: turn.conversation != name)
            found = self._word_for_word(turns, text)
            answers = [turn for turn in turns if not turn.is_prepared]
            if found is None and answers and templates_asked < MAX_TEMPLATES_ASKED:
                templates_asked += 1
                found = self._in_other_words(answers, conversation, text)
            if found is not None:
                return replace(found, again=self._use(found.turn))
        return None

    def last_turn(self, owner: Owner, known_by: Recognition) -> Turn | None:
        """The latest turn of the conversation that a chat belongs to, also where the chat does not continue it. An
        answer that stands where that conversation has examples is one of them."""
        with self._lock:
            found = zip((self._by_message.get((owner, key)) for key in known_by.keys), known_by.places, strict=True)
            return next((turn for turn, place in found if turn is not None and place >= turn.given - 1), None)

    def last_of_job(self, owner: Owner, job_id: str | None) -> Turn | None:
        """The latest turn of a job."""
        with self._lock:
            return None if job_id is None else self._by_job.get((owner, job_id))

    def last_of_equals(self, turn: Turn, owner: Owner) -> list[Turn]:
        """The latest turns of the conversations of this owner that have an equal turn, the last continued first;
        `MAX_EQUALS` at most. Conversations that none of their chats have continued are not among them."""
        with self._lock:
            key, _ = self._turns.get(turn.name, (None, None))
            equals = (each for each in self._by_prompt.get(key, ()) if each.said == turn.said) if key else ()
            jobs = (each.job_id for each in equals if each.name in self._continued and each.owner == owner)
            last = (self._by_job.get((owner, job_id)) for job_id in islice(jobs, MAX_EQUALS) if job_id is not None)
            return [each for each in last if each is not None]

    def match_turn(self, turn: Turn, conversation: Conversation, text: str) -> GoesOn | None:
        """``text``, the conversation's prompt, as a continuation of this turn, recorded or not; None if it is none."""
        if not text.startswith(turn.text[: turn.prompt_chars]):
            return None
        return self._word_for_word([turn], text) or self._in_other_words([turn], conversation, text)

    def _begun_by(self, text: str, scope: str) -> list[list[Turn]]:
        """The turns of each prompt that ``text`` begins with; the longest prompt, and the latest turn, first, but for
        turns that were continued before: they come last."""
        data = text.encode("utf-8", "surrogatepass")
        with self._lock:
            lengths = sorted(self._lengths)
        digest, start = hashlib.blake2b(digest_size=16), 0
        keys: list[Key] = []
        for length in lengths:
            if length > len(data):
                break
            digest.update(data[start:length])
            start = length
            keys.append((scope, digest.digest()))
        with self._lock:
            found = [turns[::-1] for key in reversed(keys) if (turns := self._by_prompt.get(key))]
        return [turns for turns in found if text.startswith(turns[0].text[: turns[0].prompt_chars])]

    def _word_for_word(self, turns: list[Turn], text: str) -> GoesOn | None:
        """A turn of which ``text`` begins with the text. The rest must be empty, or begin with a token that merges with
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
        near = [turn for turn in turns[:MAX_TURNS_READ] if len(words) <= _OTHERWISE * len(turn.said) + _FEW_CHARS]
        said = next((turn for turn in near if self._says_the_same(words, turn.said)), None)
        return None if said is None else GoesOn(said, end + text[len(written) :])

    def _use(self, turn: Turn) -> bool:
        """Note that a chat continues this turn. True if one had continued it before."""
        with self._lock:
            key, recorded = self._turns.get(turn.name, (None, None))
            if key is None:
                return False
            self._shares.renew_key(turn.name)
            if recorded is not turn:
                return False
            again = turn.name in self._continued
            self._continued.add(turn.name)
            self._by_prompt[key].remove(turn)
            self._by_prompt[key].insert(0, turn)
            return again

    def _forget(self, name: tuple[str, str, int]) -> None:
        """The lock is held."""
        if (known := self._turns.pop(name, None)) is None:
            return
        key, turn = known
        self._shares.remove_key(name)
        self._continued.discard(name)
        self._chars -= len(turn.text)
        length = len(turn.text[: turn.prompt_chars].encode("utf-8", "surrogatepass"))
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]
        turns = self._by_prompt[key]
        turns.remove(turn)
        if not turns:
            del self._by_prompt[key]
        owner = turn.owner
        if turn.job_id is not None and self._by_job.get((owner, turn.job_id)) is turn:
            del self._by_job[owner, turn.job_id]
        for message in turn.digests.keys if turn.digests is not None else ():
            if self._by_message.get((owner, message)) is turn:
                del self._by_message[owner, message]
