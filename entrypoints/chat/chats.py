"""Opens chats: renders them, continues a recorded turn, sends them, and records the answer.

last turn ─▶ prefix rules ─▶ Renderer ─▶ Conversations.find_turn ─▶ tokenise the rest ─▶ divergence ─▶
manager.open_answer ─▶ ChatAnswer ─▶ Conversations.record
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from ...runtime.answer import Answer, Output
from ...runtime.clients import Client
from ...runtime.prompt import Prompt
from ...runtime.text.incremental_decode import IncrementalDecoder
from ...runtime.text.prompt_tokenizer import tokens_to_read
from ...runtime.text.token_bytes import TokenBytes
from ...runtime.tokenizer_manager import TokenizerManager
from ...scheduler.outcome import ContextOverflow, RequestRefused, context_exceeded
from ...scheduler.request_spec import Predecessor
from ...scheduler.sampling_params import Grammar
from ..reasoning_parsers.output_parser import OutputParser
from ..tool_parsers.pieces import CallArguments, CallBegins, Piece, Reasoning, Text, joined
from .answer_parsers import AnswerParsers, first_call_only
from .call import ChatCall
from .conversations import Conversations, GoesOn, Owner, Turn
from .divergence import Divergence, Rendered, find_divergence
from .message_digests import (
    ChatDigests,
    Recognition,
    answer_keys,
    answer_message,
    digest_chat,
    recognition_of,
    said_digest,
)
from .messages import Conversation, has_answers
from .named_jobs import NamedJobs, opening_of
from .next_turn import MIN_TOKENS, ReturnHabits, next_history, num_prepared, returned_answer
from .prefix_rules import PrefixRule, RuleHints, normalized
from .rendering import Renderer, beside_others, size_of

logger = logging.getLogger(__name__)

_MAX_PREPARING = 16
"""Answers at a time for which the next prompt is rendered; others are not prepared for."""

_GENEROUS = 16
"""A token's longest text is so many times shorter than the JSON it may come from: escapes, and what templates drop."""

_SOME_BYTES = 1_000_000
"""Tools and variables that a template may not even look at."""


class ChatUpdate(NamedTuple):
    """An update of one output (see `Answer.updates`), or the whole of it, and what its text says."""

    output: Output
    pieces: list[Piece]


class Comparison(NamedTuple):
    """A chat compared with a recorded turn. continues: its prompt continues that turn. divergence: where the two
    differ; None if the chat continues the turn, or if they are not compared."""

    continues: bool
    divergence: Divergence | None


class Chats:
    """One per server, on the loop of its manager."""

    def __init__(
        self,
        manager: TokenizerManager,
        renderer: Renderer,
        parsers: AnswerParsers,
        conversations: Conversations,
        retain_ttl: float | None,
        rules: tuple[PrefixRule, ...] = (),
        *,
        prepares_turns: bool = False,
    ) -> None:
        """retain_ttl: seconds for which an answer's KV is leased to the next turn, where the call says nothing; None
        for what the server does with any request. rules: of --normalize-prefix. prepares_turns: the worker is sent what
        next prompts begin with."""
        self.parsers = parsers
        self.renderer = renderer
        self._manager = manager
        self._conversations = conversations
        self._named_jobs = NamedJobs()
        self._retain_ttl = retain_ttl
        self._rules = rules
        self._hints = RuleHints(rules)
        self._prepares_turns = prepares_turns
        self._habits = ReturnHabits()
        self._preparing: set[asyncio.Task[None]] = set()
        tokenizer = manager.tokenizer
        self._tokens = _Tokens(
            tokenizer.token_bytes, {each: tokenizer.token_text(each) for each in tokenizer.special_ids}
        )
        self._special = {text: token_id for token_id, text in self._tokens.special.items() if text}

    async def open_chat(self, client: Client, call: ChatCall) -> ChatAnswer:
        """Start a chat of a client. Raises RequestRefused, with errors of the prompt under ``input_ids``."""
        size = self.check_size(call.conversation)
        scope = client.scope(call.prompt.spec.namespace)
        seen = await beside_others(size, lambda: self._recognized(call, scope))
        sent, call = call, dataclasses.replace(call, conversation=seen.conversation)
        rendered, forced, make_parser, grammar = await self._rendered(call, size)
        known = await beside_others(size, lambda: self._known(call, rendered + forced, scope))
        before = call.after or self._turn_of_job(known, seen, _owner_of(sent, scope))
        job_id = await self._job_of(sent, before, scope, client.name, size)
        prompt = await self._prompt(call, rendered + forced, known, job_id, make_parser().keeps_special_tokens)
        if grammar is not None:
            sampling = msgspec.structs.replace(prompt.sampling, grammar=grammar)
            prompt = dataclasses.replace(prompt, spec=msgspec.structs.replace(prompt.spec, sampling=sampling))
        prompt = dataclasses.replace(prompt, forced=forced) if forced else prompt
        prompt = await self._with_state_point(prompt, call.conversation, rendered, size)
        prompt = await self._with_details(prompt, seen.taken)
        last = seen.last or self._conversations.last_of_job(_owner_of(sent, scope), job_id)
        if known is not None and before not in (call.after, known.turn) and (not last or last.job_id != job_id):
            last = before  # of conversations that began alike, the chat's
        self._hints.log_seen(seen.conversation, len(prompt.input_ids or []))
        diverged = await self._divergence(seen, last, known, rendered, forced, prompt.input_ids or [], size)
        # Where the chat continues a turn and parts before its end, another conversation was taken for this one.
        if diverged is not None and (known is None or diverged.token >= len(known.turn.ids) - 1):
            spec = msgspec.structs.replace(prompt.spec, diverged_at=diverged.token)
            prompt = dataclasses.replace(prompt, spec=spec, divergence=dataclasses.asdict(diverged))
        answer = await self._manager.open_answer(client, [prompt], stream=call.stream)
        num_messages = len(call.conversation.messages) - call.conversation.goes_on
        if before is None and call.prompt.spec.job_id is not None:
            before = self._conversations.last_of_job(_owner_of(sent, scope), job_id)
        given = min(before.given, num_messages) if before is not None else num_messages

        turn = _Asked(
            prompt=prompt,
            scope=scope,
            num_messages=num_messages,
            given=given,
            text=rendered + forced,
            prompt_chars=len(rendered),
            hides_special=known is not None and known.turn.hides_special,
            digests=seen.digests_from(given),
        )
        if last is not None and last.digests is not None and last.digests.thought:
            for message in call.conversation.messages[last.num_messages :][:1]:
                if message["role"] == "assistant":
                    self._habits.record_return(scope, message)

        def record(answered: Turn, pieces: list[Piece]) -> None:
            self._conversations.record(answered, client.name)
            if self._prepares_after(answered, sent, prompt):
                self._begin_preparing(client, answered, call.conversation, pieces)

        return ChatAnswer(answer, call, turn, make_parser, forced, self._tokens, record, diverged)

    async def compare(self, client: Client, chat: ChatAnswer, rid: str) -> Comparison | None:
        """Compare a chat that was just opened with the turn of this rid, whether or not that belongs to the chat's
        conversation; None if this client has no such turn on record."""
        scope, call, asked = client.scope(chat.call.prompt.spec.namespace), chat.call, chat.asked
        turn = self._conversations.get_turn(scope, rid)
        if turn is None:
            return None
        size = max(len(asked.text), len(turn.text))
        matched = await beside_others(size, lambda: self._conversations.match_turn(turn, call.conversation, asked.text))
        if matched is not None:
            return Comparison(continues=True, divergence=None)
        if turn.owner != _owner_of(call, scope) or turn.digests is None or asked.digests is None:
            return Comparison(continues=False, divergence=None)
        new = Rendered(
            digests=asked.digests,
            text=asked.text,
            prompt_chars=asked.prompt_chars,
            ids=np.array(asked.prompt.input_ids or [], dtype=np.int32),
        )
        old = _rendered(turn, turn.digests)
        found = await beside_others(size, lambda: find_divergence(old, new, call.conversation.messages, rid))
        return Comparison(continues=found is None, divergence=found)

    # -- the next turn ------------------------------------------------------------------------------------------------

    def _prepares_after(self, turn: Turn, sent: ChatCall, prompt: Prompt) -> bool:
        """May the prompt after this turn be prepared? sent: the call as its client sent it. prompt: what was made of
        it."""
        spec, conversation = prompt.spec, sent.conversation
        if not self._prepares_turns or spec.is_last_step or spec.sampling.n != 1 or turn.hides_special:
            return False
        if sent.prompt.spec.retain_ttl is not None or conversation.goes_on or not conversation.add_generation_prompt:
            return False  # its client asked for a lease on these very tokens; or no next message is to be expected
        if len(self._preparing) >= _MAX_PREPARING:
            return False
        if self._habits.is_worth_a_look(turn.scope):
            return True
        self._habits.record_look(turn.scope, departs=None)
        return False

    def _begin_preparing(self, client: Client, turn: Turn, conversation: Conversation, pieces: Iterable[Piece]) -> None:
        task = asyncio.get_running_loop().create_task(self._prepare(client, turn, conversation, pieces))
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    async def _prepare(self, client: Client, turn: Turn, conversation: Conversation, pieces: Iterable[Piece]) -> None:
        """Send the worker the tokens that the prompt after this turn begins with, if they are not the turn's."""
        answer = returned_answer(pieces, with_thoughts=self._habits.returns_thoughts(turn.scope))
        try:
            history = await beside_others(
                len(turn.text),
                lambda: next_history(
                    self.renderer, self._conversations, self._tokens.special, turn, conversation, answer
                ),
            )
            self._habits.record_look(turn.scope, departs=history is not None)
            if history is None:
                return
            (rest,) = await self._manager.tokenize(
                [history.rest], add_special_tokens=False, goes_on=len(history.shared_ids) > 0, param="messages"
            )
            ids = history.shared_ids.tolist() + rest
            prepared = dataclasses.replace(
                turn,
                text=history.text,
                prompt_chars=len(history.text),
                num_messages=turn.num_messages + 1,
                ids=np.array(ids, dtype=np.int32),
                digests=None,
                is_prepared=True,
            )
            self._conversations.record(prepared, client.name)
            if num_prepared(ids, turn) >= MIN_TOKENS and len(ids) < self.context_length:
                self._manager.prepare_turn(client, turn.rid, turn.index, prepared.ids)
        except RequestRefused as refusal:
            logger.debug("the prompt after %s is not prepared: %s", turn.rid, refusal.message)
        except Exception:
            logger.exception("the prompt after %s could not be prepared; no request is affected", turn.rid)

    async def render(self, call: ChatCall, *, may_overflow: bool = False) -> list[int]:
        """The tokens of a chat's prompt, for callers that only count them. may_overflow: it may be longer than the
        context, up to `MAX_TOKENS_OF_CALL`. Raises RequestRefused where `open_chat` would."""
        size = self.check_size(call.conversation, may_overflow=may_overflow)
        normal = await beside_others(size, lambda: normalized(call.conversation, self._rules, {}))
        call = dataclasses.replace(call, conversation=normal.conversation)
        rendered, forced, *_ = await self._rendered(call, size)
        (ids,) = await self._manager.tokenize(
            [rendered + forced], add_special_tokens=False, is_truncated=may_overflow, param="messages"
        )
        return ids

    @property
    def context_length(self) -> int:
        """Tokens."""
        return self._manager.limits.context_length

    async def count_tokens(self, texts: list[str]) -> list[int]:
        """How many tokens each text has by itself. Raises RequestRefused where one has more than the context."""
        ids = await self._manager.tokenize(texts, add_special_tokens=False, is_truncated=True, param="messages")
        return [len(each) for each in ids]

    def _recognized(self, call: ChatCall, scope: str) -> _Recognized:
        """The conversation under the rules, and the last turn of it."""
        sent, last, digests, known_by = call.conversation, None, None, Recognition()
        if not self._conversations.keeps:
            normal = normalized(sent, self._rules, {})
        else:
            known_by = recognition_of(sent)
            owner = _owner_of(call, scope)
            last = self._conversations.last_turn(owner, known_by)
            last = last or self._conversations.last_of_job(owner, call.prompt.spec.job_id)
            fixed: Mapping[str, str] = {}
            if last is not None and last.digests is not None and has_answers(sent):
                fixed = last.digests.fixed
            normal = normalized(sent, self._rules, fixed)
            digests = digest_chat(normal.conversation, known_by, normal.fixed)
        return _Recognized(normal.conversation, normal.taken, last, digests, known_by)

    async def _with_details(self, prompt: Prompt, taken: Mapping[str, str]) -> Prompt:
        """The prompt, with what rules took from it. taken: rule -> text."""
        if not taken:
            return prompt
        ids = await self._manager.tokenize(list(taken.values()), add_special_tokens=False, param="messages")
        counts = {rule: len(each) for rule, each in zip(taken, ids, strict=True)}
        for rule, count in counts.items():
            self._manager.metrics.prefix_normalized(rule, count)
        return dataclasses.replace(prompt, details={**prompt.details, "normalized_prefix": counts})

    async def _divergence(
        self,
        seen: _Recognized,
        last: Turn | None,
        known: GoesOn | None,
        rendered: str,
        forced: str,
        ids: list[int],
        size: int,
    ) -> Divergence | None:
        """Where the chat parts from the last turn of its conversation; None if it continues it, or if there is none.
        known: the turn that it continues."""
        digests = seen.digests
        if last is None or last.digests is None or digests is None:
            return None
        if known is not None and known.turn.num_messages >= last.num_messages and not known.turn.is_prepared:
            return None
        old = _rendered(last, last.digests)
        new = Rendered(
            digests=digests, text=rendered + forced, prompt_chars=len(rendered), ids=np.array(ids, dtype=np.int32)
        )
        size = max(size, len(last.text))
        found = await beside_others(size, lambda: find_divergence(old, new, seen.conversation.messages, last.rid))
        if found is not None:
            self._manager.metrics.conversation_diverged(found.kind)
            logger.debug(
                "chat diverges from %s at token %d (%s, message %s)", last.rid, found.token, found.kind, found.message
            )
            lost = len(last.ids) - found.token
            self._hints.log_divergence(seen.conversation, found.message, found.char, lost)
        if found is None or found.message is None:
            return found
        content = seen.conversation.messages[found.message].get("content")
        before = content[: found.char] if isinstance(content, str) else ""
        (count,) = await self.count_tokens([before]) if before else (0,)
        return dataclasses.replace(found, message_token=count)

    async def _rendered(self, call: ChatCall, size: int) -> tuple[str, str, Callable[[], OutputParser], Grammar | None]:
        """The prompt, what the answer is made to begin with, what makes its parser, and what it must look like. size:
        of the conversation."""
        if call.may_call and not self.renderer.knows_tools:
            raise RequestRefused(
                "the chat template has no place for tools, and no bundled one fits the model's marks, so the model "
                "would not see them; start the server with a --chat-template that has one, or leave out tools",
                code="no_tools_in_template",
                param="tools",
            )
        rendered = await beside_others(size, lambda: self.renderer.render(call.conversation))
        opening = await beside_others(size, lambda: self._opening(call.conversation, rendered))
        make_parser = partial(self.parsers.make_parser, call, opening)
        is_forced = call.choice.kind in ("any", "named")
        forced = make_parser().forced_prefix(call.choice.name) if is_forced else ""
        grammar = self.parsers.answer_grammar(call, opening, forced, self._special)
        return rendered, forced, make_parser, grammar

    def _known(self, call: ChatCall, text: str, scope: str) -> GoesOn | None:
        """The turn that the call, with this prompt, continues."""
        known = None
        if call.after is not None:
            known = self._conversations.match_turn(call.after, call.conversation, text)
        return known or self._conversations.find_turn(call.conversation, text, scope, call.name)

    def _turn_of_job(self, known: GoesOn | None, seen: _Recognized, owner: Owner) -> Turn | None:
        """The turn of which a chat has the job, if it names none: the one that it continues, or else the one most
        messages of which it has where they were.

        Conversations that began alike have equal turns, and a chat continues any of them. One that has been continued
        before may be another conversation's: the chat belongs to the one with the most of its messages, if that has
        more of them than the equal turns."""
        if known is None:
            return seen.turn_before
        best, most = known.turn, known.turn.num_messages + (not known.turn.is_prepared)
        for turn in self._conversations.last_of_equals(known.turn, owner) if known.again else ():
            if (num_equal := seen.num_equal(turn)) > most:
                best, most = turn, num_equal
        return best

    async def _job_of(self, call: ChatCall, before: Turn | None, scope: str, client: str, size: int) -> str | None:
        """The job of a chat: the one that it names; else that of the turn before it; else one of its shared name; else
        a new one. None where turns are not recorded. before: the turn that its API names, or `_turn_of_job`. size: of
        the conversation."""
        if (job_id := call.prompt.spec.job_id) is not None:
            return job_id
        job_id = before.job_id if before is not None else None
        new = self._conversations.new_job(call.rid)
        if call.shared_name is None or new is None:
            return job_id or new
        opening = await beside_others(size, lambda: opening_of(call.conversation))
        if job_id is None:
            return self._named_jobs.find_job(scope, call.shared_name, opening, client)
        self._named_jobs.record_chat(scope, call.shared_name, opening, job_id, client)
        return job_id

    async def _prompt(
        self, call: ChatCall, text: str, known: GoesOn | None, job_id: str | None, keeps_special_tokens: bool
    ) -> Prompt:
        """The call's prompt with its tokens, as a step of this job."""
        spec, is_truncated = call.prompt.spec, call.prompt.truncate_to is not None
        if known is not None:
            (rest,) = await self._manager.tokenize(
                [known.rest], goes_on=True, is_truncated=is_truncated, param="messages"
            )
            ids = known.turn.ids.tolist() + rest
            spec = msgspec.structs.replace(spec, predecessor=Predecessor(known.turn.rid, known.turn.index))
        else:
            (ids,) = await self._manager.tokenize(
                [text], add_special_tokens=False, is_truncated=is_truncated, param="messages"
            )
        if spec.retain_ttl is None and not spec.is_last_step:
            ttl, unasked = self._retain_ttl or None, spec.job_id is None
            spec = msgspec.structs.replace(spec, retain_ttl=ttl, unasked=unasked, default_lease=True)
        spec = msgspec.structs.replace(spec, job_id=job_id)
        if keeps_special_tokens and spec.sampling.skip_special_tokens:
            sampling = msgspec.structs.replace(spec.sampling, skip_special_tokens=False)
            spec = msgspec.structs.replace(spec, sampling=sampling)
        return dataclasses.replace(call.prompt, spec=spec, input_ids=ids)

    async def _with_state_point(self, prompt: Prompt, conversation: Conversation, rendered: str, size: int) -> Prompt:
        """The prompt of a model with recurrent states, which leaves one behind the last message: where the template
        drops the model's thoughts, or the answer is generated again, the next prompt parts from this one there."""
        if not self._manager.limits.keeps_states or prompt.truncate_to is not None:
            return prompt
        if conversation.goes_on or not conversation.add_generation_prompt:
            return prompt
        behind = await beside_others(size, lambda: self._behind_messages(conversation, rendered))
        (last,) = await self._manager.tokenize([behind + prompt.forced], add_special_tokens=False, param="messages")
        ids, count = prompt.input_ids or [], len(last)
        if not 0 < count < len(ids) or ids[-count:] != last:
            return prompt
        return dataclasses.replace(prompt, spec=msgspec.structs.replace(prompt.spec, state_points=(len(ids) - count,)))

    def check_size(self, conversation: Conversation, *, may_overflow: bool = False) -> int:
        """The `size_of` it. Refuses what can never fit before it is rendered, which takes time that others need.
        may_overflow: as in `render`."""
        context = tokens_to_read(self.context_length, is_truncated=may_overflow)
        count, size = len(conversation.messages), size_of(conversation)
        if count > context or size > context * self._manager.tokenizer.longest_token * _GENEROUS + _SOME_BYTES:
            raise context_exceeded(ContextOverflow(context, context + 1, at_least=True), "messages")
        return size

    def _opening(self, conversation: Conversation, rendered: str) -> str:
        """Text that the template wrote behind the last message; for a message that the model continues, its content."""
        if self.parsers.reasoning_name is None:
            return ""
        if conversation.goes_on:
            return conversation.messages[-1].get("content") or ""
        return self._behind_messages(conversation, rendered)

    def _behind_messages(self, conversation: Conversation, rendered: str) -> str:
        """Text that the template wrote behind the last message; empty where that cannot be told."""
        before = self.renderer.render(conversation.first(len(conversation.messages)))
        return rendered[len(before) :] if rendered.startswith(before) else ""


def _owner_of(call: ChatCall, scope: str) -> Owner:
    return Owner(scope, call.prompt.spec.client, call.name)


def _rendered(turn: Turn, digests: ChatDigests) -> Rendered:
    """digests: of the turn."""
    return Rendered(digests=digests, text=turn.text, prompt_chars=turn.prompt_chars, ids=turn.ids)


class _Recognized(NamedTuple):
    """conversation: under the rules, which took `taken`. last: the last turn of the same conversation, if any. digests:
    None where turns are not recorded."""

    conversation: Conversation
    taken: Mapping[str, str]
    last: Turn | None
    digests: ChatDigests | None
    known_by: Recognition

    def digests_from(self, given: int) -> ChatDigests | None:
        """The digests, to be recorded, of a chat whose conversation came with so many messages."""
        if self.digests is None:
            return None
        return dataclasses.replace(self.digests, keys=self.known_by.keys_from(given))

    def num_equal(self, turn: Turn) -> int:
        """How many messages of a turn, its answer included, the chat has in their old places."""
        if turn.digests is None or self.digests is None:
            return 0
        old, new = turn.digests.messages, self.digests.messages
        count = min(len(old), len(new))
        return int(np.count_nonzero(old[:count] == new[:count])) + self._repeats_answer_of(turn.digests)

    def _repeats_answer_of(self, old: ChatDigests) -> bool:
        count, messages = len(old.messages), self.conversation.messages
        return count < len(messages) and said_digest(messages[count]) == old.said

    @property
    def turn_before(self) -> Turn | None:
        """The last turn, if the chat repeats its answer, or an earlier one of its conversation, and has half of its
        messages in their old places. A short answer to one message is not enough: it may be that of another
        conversation. Nor are examples, which all conversations of a program begin with."""
        if self.last is None or self.last.digests is None or self.digests is None:
            return None
        old, messages = self.last.digests, self.conversation.messages
        count, new = len(old.messages), self.digests.messages
        if count > len(new):
            return None
        equal = old.messages == new[:count]
        earlier = range(self.last.given, count)
        if not self._repeats_answer_of(old) and not any(
            equal[at] and messages[at]["role"] == "assistant" for at in earlier
        ):
            return None
        num_equal = np.count_nonzero(equal)
        return self.last if 2 * num_equal >= count and (num_equal > 1 or old.said in old.keys) else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The prompt part of a `Turn`."""

    prompt: Prompt
    scope: str
    num_messages: int
    given: int
    text: str
    prompt_chars: int
    hides_special: bool
    digests: ChatDigests | None


class _Tokens(NamedTuple):
    """Token texts of the tokenizer. special: id -> text."""

    bytes: TokenBytes
    special: Mapping[int, str]


class ChatAnswer:
    """The answer to a chat. Close it as an `Answer`, which is ``answer``. turns: its outputs that have ended well.
    forced: what its text was made to begin with, which is no part of any output. call, asked: what
    it answers. divergence: where the chat parts from the last turn of its conversation, if it does."""

    def __init__(
        self,
        answer: Answer,
        call: ChatCall,
        asked: _Asked,
        make_parser: Callable[[], OutputParser],
        forced: str,
        tokens: _Tokens,
        record: Callable[[Turn, list[Piece]], None],
        divergence: Divergence | None,
    ) -> None:
        self.answer, self.call, self.asked = answer, call, asked
        self.forced = forced
        self.divergence = divergence
        self.turns: list[Turn] = []
        self._tokens = tokens
        self._record = record
        self._samples = [_Sample(make_parser(), forced) for _ in range(asked.prompt.sampling.n)]

    async def outputs(self) -> list[ChatUpdate]:
        """All outputs, once they have ended. Raises RequestRefused."""
        return [self._take(output) for output in await self.answer.outputs()]

    async def updates(self) -> AsyncIterator[ChatUpdate]:
        """New parts of the outputs, as they come. Raises RequestRefused."""
        async for output in self.answer.updates():
            yield self._take(output)

    def _take(self, output: Output) -> ChatUpdate:
        sample = self._samples[output.sample]
        pieces = sample.take_output(output)
        if not self.call.choice.parallel:
            pieces = first_call_only(pieces)
        sample.pieces += pieces
        if output.finish is not None and output.finish.type != "abort":
            self.turns.append(self._turn(output, sample))
            self._record(self.turns[-1], sample.pieces)
        return ChatUpdate(output, pieces)

    def _turn(self, output: Output, sample: _Sample) -> Turn:
        asked, finish = self.asked, output.finish
        ids = sample.ids
        if finish is not None and isinstance(finish.matched, int):
            ids = ids[:-1]
        cut = sample.text if finish is not None and isinstance(finish.matched, str) else None
        ids, said = kept_tokens(self._tokens.bytes, ids, cut, asked.prompt.sampling.skip_special_tokens)
        return Turn(
            rid=asked.prompt.rid,
            index=output.sample,
            scope=asked.scope,
            user=asked.prompt.spec.client,
            job_id=asked.prompt.spec.job_id,
            conversation=self.call.name,
            num_messages=asked.num_messages,
            given=asked.given,
            prompt_chars=asked.prompt_chars,
            text=asked.text + said,
            ids=np.array((asked.prompt.input_ids or []) + ids, dtype=np.int32),
            hides_special=asked.hides_special or spells_special(self._tokens.special, asked.text, said, ids),
            digests=None if asked.digests is None else _with_answer(asked.digests, sample.pieces),
        )


class _Sample:
    """One output, as it grows."""

    def __init__(self, parser: OutputParser, forced: str) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.pieces: list[Piece] = []
        """As the client gets them."""
        self._parser = parser
        self._before = parser.push_text(forced) if forced else []

    def take_output(self, output: Output) -> list[Piece]:
        self.ids += output.token_ids
        self.text += output.text
        if output.finish is not None and not self.ids:
            return []  # the model wrote nothing: the forced beginning is no answer
        pieces, self._before = self._before + self._parser.push_text(output.text), []
        return pieces + self._parser.finish() if output.finish is not None else pieces


def _with_answer(asked: ChatDigests, pieces: list[Piece]) -> ChatDigests:
    """The digests of a turn. pieces: of its answer."""
    text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    calls: dict[int, tuple[str, str]] = {}
    for piece in joined(pieces):
        if isinstance(piece, CallBegins):
            calls[piece.index] = piece.name, ""
        elif isinstance(piece, CallArguments):
            calls[piece.index] = calls[piece.index][0], piece.delta
    answer = answer_message(text, calls.values())
    return dataclasses.replace(
        asked,
        keys=answer_keys(asked.last, answer, asked.begins) + asked.keys,
        said=said_digest(answer),
        thought=any(isinstance(piece, Reasoning) for piece in pieces),
    )


def kept_tokens(token_bytes: TokenBytes, ids: list[int], visible: str | None, skips: bool) -> tuple[list[int], str]:
    """The most of the first ids that end in a whole character, and that are no more than ``visible``, the text that the
    client saw, where a stop string was cut off it. With their text, special tokens included. skips: the client saw no
    special tokens."""
    shown = IncrementalDecoder(token_bytes, skip_special_tokens=skips)
    whole = IncrementalDecoder(token_bytes, skip_special_tokens=False)
    texts: list[str] = []
    length = kept = 0
    for number, token_id in enumerate(ids, 1):
        texts.append(whole.push_ids((token_id,)))
        length += len(shown.push_ids((token_id,)))
        if visible is not None and length > len(visible):
            break
        if not whole.has_pending_bytes:
            kept = number
    return ids[:kept], "".join(texts[:kept])


def spells_special(special: Mapping[int, str], before: str, said: str, ids: list[int]) -> bool:
    """True if ``said``, the text of ``ids``, spells a special token in letters that is not among the ids. before: the
    text in front of it, where such a spelling may begin. special: id -> text."""
    begun = before[max(0, len(before) - max(map(len, special.values()), default=0)) :]
    text = begun + said
    spelled = sum(text.count(each) - begun.count(each) for each in special.values() if each)
    return spelled != sum(each in special for each in ids)
