"""One state's requests: each continues the one before it, so that every token is computed once.

    text   | "Q: ..."  | generated | "\\nSo: "  | generated |
    sent   |------ text -----------|-- suffix --|                one request per step
    stage           finished rid ──continuation_of──▶ next rid

Text that a program appends waits (``pending``) until a step needs the server. A step sends it as the suffix of the
stage before, and leaves a new stage, leased for ``retain_ttl`` seconds. Where the server has forgotten a stage, all of
the chain is sent again as token ids. Used by one thread; only `abort` may be called from others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from .backends import Backend
from .errors import BackendError
from .stage import Stage

logger = logging.getLogger(__name__)

_FORCED = 0
"""A token id that every vocabulary has."""

COMPUTE_ONLY = {
    "max_new_tokens": 1,
    "temperature": 0.0,
    "logit_bias": {str(_FORCED): 100.0},
    "stop_token_ids": [_FORCED],
}
"""Computes the prompt and adds nothing to it: the one token generated is made a stop, which no child inherits."""

_ITEM = "item"
"""What ``matched`` says of an output that is a whole item of a trie: nothing of it is cut off."""

_GONE = ("parent_forgotten", "parent_not_found")
"""Codes of a parent that this chain knows to have existed: too long ago, or before a restart."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of what the server has been sent or has generated. ids: None where only the text is known for certain."""

    text: str
    ids: list[int] | None = None
    add_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """How a `select` came out. scores: mean log-probability per token of each choice."""

    text: str
    scores: list[float]
    answers: list[dict[str, Any]]
    index: int


class Chain:
    """See the module."""

    def __init__(self, backend: Backend, retain_ttl: float) -> None:
        self._backend = backend
        self._retain_ttl = retain_ttl
        self._stage: Stage | None = None
        self._pending = ""
        self._pieces: list[_Piece] = []
        self._add_special_tokens = True
        self._keeps_parent = False
        """Whether the step sent last asked the server to leave the parent's lease to others."""
        self._in_flight: list[str] = []

    def append(self, text: str, *, from_template: bool = False) -> None:
        """More text; nothing is sent yet. ``from_template``: a chat template wrote it, special tokens included."""
        if from_template and not self._pending and not self._pieces:
            self._add_special_tokens = False
        self._pending += text

    def generate(
        self, sampling: dict[str, Any], options: dict[str, Any], *, stream: bool
    ) -> Iterator[list[dict[str, Any]]]:
        """One step. Yields the answers (one per sample, or result of a search) as they grow, at last the whole ones;
        then the chain has moved on to the first of them. Raises BackendError."""
        rid = uuid4().hex
        # The chain goes on with the first answer: only that one needs to stay.
        fields = {"rid": rid, "sampling_params": sampling, "retain_ttl": self._retain_ttl, "retain_n": 1, **options}
        several = sampling.get("n", 1) > 1
        answers: list[dict[str, Any]] = []
        for answer in self._send([rid], fields, stream=stream and not several):
            answers = answer if isinstance(answer, list) else [answer]
            yield answers
        self._check_finished(answers)
        kept = _kept_ids(answers[0], sampling)
        num_tokens = answers[0]["meta_info"]["prompt_tokens"] + len(kept) if kept is not None else None
        self._move_on(
            _Piece(answers[0]["text"], kept),
            Stage(rid, self._releaser(answers), num_samples=len(answers), num_tokens=num_tokens),
        )

    def settle(self) -> None:
        """Have all text so far computed, and nothing generated, so that what follows shares it. Raises BackendError."""
        rid = uuid4().hex
        fields = {"rid": rid, "sampling_params": COMPUTE_ONLY, "retain_ttl": self._retain_ttl}
        answers = list(self._send([rid], fields, stream=False))
        self._check_forced(answers)
        num_tokens = answers[0]["meta_info"]["prompt_tokens"]
        self._move_on(None, Stage(rid, self._releaser(answers), num_tokens=num_tokens))

    def choose(self, choices: Sequence[str]) -> Choice:
        """Score each choice as a continuation and move on to the best. Raises BackendError."""
        if self._stage is None and not self._pending and not self._pieces:
            raise BackendError("select needs text before it: the first token of a prompt follows nothing")
        if self._stage is None or self._pending or self._stage.num_tokens is None:
            self.settle()
        rids = [uuid4().hex for _ in choices]
        try:
            answers = self._score(rids, choices)
        except BackendError as error:
            if error.code not in _GONE:
                raise
            self._forget_stage()
            self.settle()
            answers = self._score(rids, choices)
        assert self._stage is not None and self._stage.num_tokens is not None
        logprobs = [answer["meta_info"]["input_token_logprobs"] for answer in answers]
        scores = [_mean([value for value, _, _ in rows]) for rows in logprobs]
        best = max(range(len(choices)), key=scores.__getitem__)
        for position, rid in enumerate(rids):
            if position != best and (release := self._releaser([answers[position]])) is not None:
                release(rid)
        ids = [token_id for _, token_id, _ in logprobs[best]]
        num_tokens = self._stage.num_tokens + len(ids)
        stage = Stage(rids[best], self._releaser([answers[best]]), num_tokens=num_tokens)
        self._move_on(_Piece(choices[best], ids), stage)
        return Choice(choices[best], scores, answers, best)

    def fork(self) -> Chain:
        """A second chain that goes on from here. What is pending is computed first, once for both."""
        if self._pending:
            self.settle()
        other = Chain(self._backend, self._retain_ttl)
        other._stage = None if self._stage is None else self._stage.join()
        other._pieces = list(self._pieces)
        other._add_special_tokens = self._add_special_tokens
        return other

    def abort(self) -> None:
        """Ask the server to end the step in flight; nothing happens if there is none. May be called from any thread."""
        for rid in list(self._in_flight):
            try:
                self._backend.abort(rid)
            except BackendError as error:
                logger.debug("request %s could not be aborted: %s", rid, error)

    def close(self) -> None:
        """The chain ends: its lease is released, unless other chains go on from the same stage."""
        if self._stage is not None:
            self._stage.leave()
            self._stage = None

    # -- requests ------------------------------------------------------------------------------------------------------

    def _send(self, rids: list[str], fields: dict[str, Any], *, stream: bool) -> Iterator[Any]:
        """Answers to the step ``fields``, put behind all that stands."""
        try:
            yield from self._call(rids, {**fields, **self._prompt()}, stream=stream)
        except BackendError as error:
            if error.code not in _GONE:
                raise
            self._forget_stage()
            yield from self._call(rids, {**fields, **self._prompt()}, stream=stream)

    def _score(self, rids: list[str], choices: Sequence[str]) -> list[dict[str, Any]]:
        assert self._stage is not None
        self._keeps_parent = True
        fields = {
            "rid": rids,
            "continuation_of": self._stage.rid,
            "continuation_suffix": list(choices),
            "continuation_index": self._stage.index,
            "keep_parent": True,
            "sampling_params": COMPUTE_ONLY,
            "return_logprob": True,
            "logprob_start_len": self._stage.num_tokens,
            "retain_ttl": self._retain_ttl,
        }
        try:
            (answers,) = self._call(rids, fields, stream=False)
            self._check_forced(answers)
            return answers
        except BackendError:
            for rid in rids:  # some of them may have ended well
                self._release(rid)
            raise

    def _call(self, rids: list[str], fields: dict[str, Any], *, stream: bool) -> Iterator[Any]:
        self._in_flight = rids
        try:
            if stream:
                yield from self._backend.stream(fields)
            else:
                yield self._backend.generate(fields)
        finally:
            self._in_flight = []

    def _prompt(self) -> dict[str, Any]:
        """The fields that say what is continued."""
        if self._stage is not None:
            fields = {"continuation_of": self._stage.rid, "continuation_index": self._stage.index}
            if self._pending:
                fields["continuation_suffix"] = self._pending
            # Nobody can join meanwhile: forks are made by the thread that waits for this step.
            self._keeps_parent = self._stage.is_shared
            return fields | {"keep_parent": True} if self._keeps_parent else fields
        if self._pieces or not self._add_special_tokens:
            pieces = [*self._pieces, self._pending_piece()]
            return {"input_ids": [token_id for piece in pieces for token_id in self._ids(piece)]}
        return {"text": self._pending}

    def _ids(self, piece: _Piece) -> list[int]:
        if piece.ids is not None:
            return piece.ids
        if not piece.text:
            return []
        return self._backend.tokenize(piece.text, add_special_tokens=piece.add_special_tokens)

    def _pending_piece(self) -> _Piece:
        first = not self._pieces
        return _Piece(self._pending, add_special_tokens=first and self._add_special_tokens)

    # -- stages --------------------------------------------------------------------------------------------------------

    def _move_on(self, generated: _Piece | None, stage: Stage) -> None:
        self._pieces.append(self._pending_piece())
        self._pending = ""
        if generated is not None:
            self._pieces.append(generated)
        before, self._stage = self._stage, stage
        if before is not None:
            before.leave(handed_off=not self._keeps_parent)

    def _forget_stage(self) -> None:
        """The server does not know it any more: there is nothing to release."""
        assert self._stage is not None
        self._stage.leave(handed_off=True)
        self._stage = None

    def _releaser(self, answers: list[dict[str, Any]]) -> Callable[[str], None] | None:
        """How the leases of a finished request are given up; None if it has none."""
        retained = [answer["meta_info"].get("retained") for answer in answers]
        return self._release if any(lease and lease.get("refused") is None for lease in retained) else None

    def _release(self, rid: str) -> None:
        try:
            self._backend.release(rid)
        except BackendError as error:
            # It ends by itself, and what the program did stands.
            logger.warning("the lease of request %s could not be released before its time: %s", rid, error)

    def _check_finished(self, answers: list[dict[str, Any]]) -> None:
        for answer in answers:
            finish = answer["meta_info"]["finish_reason"] or {"type": "abort", "message": "the answer has no end"}
            if finish["type"] == "abort":
                raise BackendError(f"aborted: {finish.get('message') or 'no reason given'}", code="aborted")

    def _check_forced(self, answers: list[dict[str, Any]]) -> None:
        self._check_finished(answers)
        for answer in answers:
            finish = answer["meta_info"]["finish_reason"]
            if finish.get("matched") != _FORCED:
                raise BackendError(f"computing a prompt alone ended with {finish}, not with token {_FORCED}")


def _kept_ids(answer: dict[str, Any], sampling: dict[str, Any]) -> list[int] | None:
    """The generated ids that a child inherits; None where a stop string cut them somewhere."""
    finish, ids = answer["meta_info"]["finish_reason"], answer["output_ids"]
    if finish["type"] != "stop" or sampling.get("no_stop_trim", False):
        return ids
    stop = sampling.get("stop", ())
    if finish["matched"] == _ITEM and _ITEM not in ([stop] if isinstance(stop, str) else stop):
        return ids
    return None if isinstance(finish["matched"], str) else ids[:-1]


def _mean(logprobs: list[float | None]) -> float:
    """None stands for minus infinity, which JSON cannot say."""
    return math.fsum(-math.inf if value is None else value for value in logprobs) / max(1, len(logprobs))
