"""The requests of one state: each continues the previous one, so that every token is computed once.

    text   | "Q: ..."  | generated | "\\nSo: "  | generated |
    sent   |------ text -----------|-- suffix --|                one request per step
    stage           finished rid ──continuation_of──▶ next rid

Text that a program appends waits (``pending``) until a step needs the server. The step sends it as a suffix to the
previous stage, and leaves a new stage, leased for ``retain_ttl`` seconds. If the server has forgotten a stage, the
whole chain is sent again as token ids. Used by one thread; only `abort` may be called from others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from ..backends import Backend
from ..choices import ChoicesSamplingMethod, Rows
from ..errors import BackendError
from .choice import Choice, take
from .piece import Piece, kept_ids
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
"""Computes the prompt and adds nothing to it: the one generated token is a stop token, which no child inherits."""

_GONE = ("parent_forgotten", "parent_not_found")
"""Error codes for a parent that did exist, but too long ago or before the server restarted."""


class Chain:
    """The requests of one state; see the module."""

    def __init__(self, backend: Backend, retain_ttl: float) -> None:
        self._backend = backend
        self._retain_ttl = retain_ttl
        self._stage: Stage | None = None
        self._pending = ""
        self._joined: list[Piece] = []
        """What `concatenate` brought, in front of the pending text; its ids are known where a model generated it."""
        self._pieces: list[Piece] = []
        self._fork_position = 0
        """How many pieces this chain had when it was forked."""
        self._add_special_tokens = True
        self._keeps_parent = False
        """Whether the last step asked the server to keep the parent's lease for other chains."""
        self._in_flight: list[str] = []

    def append(self, text: str, *, from_template: bool = False) -> None:
        """Add text; nothing is sent yet. ``from_template``: a chat template wrote it, special tokens included."""
        if from_template and self._is_empty:
            self._add_special_tokens = False
        self._pending += text

    def generate(
        self, sampling: dict[str, Any], options: dict[str, Any], *, stream: bool
    ) -> Iterator[list[dict[str, Any]]]:
        """Run one step. Yields the answers (one per sample or search result) as they grow, and finally the whole ones;
        the chain then goes on from the first of them. Raises BackendError."""
        rid = uuid4().hex
        # The chain goes on with the first answer: only that one needs to stay.
        fields = {"rid": rid, "sampling_params": sampling, "retain_ttl": self._retain_ttl, "retain_n": 1, **options}
        several = sampling.get("n", 1) > 1
        answers: list[dict[str, Any]] = []
        for answer in self._send([rid], fields, stream=stream and not several):
            answers = answer if isinstance(answer, list) else [answer]
            yield answers
        self._check_finished(answers)
        kept = kept_ids(answers[0], sampling)
        num_tokens = answers[0]["meta_info"]["prompt_tokens"] + len(kept) if kept is not None else None
        self._move_on(
            Piece(answers[0]["text"], kept),
            Stage(rid, self._releaser(answers), num_samples=len(answers), num_tokens=num_tokens),
        )

    def settle(self) -> None:
        """Have the server compute all text so far, and generate nothing, so that later steps share it. Raises
        BackendError."""
        rid = uuid4().hex
        fields = {"rid": rid, "sampling_params": COMPUTE_ONLY, "retain_ttl": self._retain_ttl}
        answers = list(self._send([rid], fields, stream=False))
        self._check_forced(answers)
        num_tokens = answers[0]["meta_info"]["prompt_tokens"]
        self._move_on(None, Stage(rid, self._releaser(answers), num_tokens=num_tokens))

    def replace_last(self, text: str) -> None:
        """Put ``text`` in place of what the last step generated. The server has KV for the text before it, and finds
        it in its cache."""
        if self._stage is not None:
            self._stage.leave()
            self._stage = None
        self._pieces.pop()
        self._pending = text

    def choose(self, choices: Sequence[str], method: ChoicesSamplingMethod) -> Choice:
        """Score each choice as a continuation and move on to the one that ``method`` takes. Raises BackendError."""
        if self._is_empty:
            raise BackendError("select needs text before it: the first token of a prompt follows nothing")
        if self._stage is None or self._has_pending or self._stage.num_tokens is None:
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
        try:
            rows = [answer["meta_info"]["input_token_logprobs"] for answer in answers]
            alone = self._score_alone(rows) if method.requires_unconditional_logprobs else None
            choice, taken = take(choices, method, rows, alone, answers)
        except BaseException:
            for rid in rids:
                self._release(rid)
            raise
        for position, rid in enumerate(rids):
            if position != taken and (release := self._releaser([answers[position]])) is not None:
                release(rid)
        ids = [token_id for _, token_id, _ in choice.rows[taken]]
        num_tokens = self._stage.num_tokens + len(ids)
        stage = Stage(rids[taken], self._releaser([answers[taken]]), num_tokens=num_tokens)
        self._move_on(Piece(choice.text, ids), stage)
        return choice

    def fork(self) -> Chain:
        """A second chain that goes on from here. Pending text is computed first, once for both."""
        if self._has_pending:
            self.settle()
        other = Chain(self._backend, self._retain_ttl)
        other._stage = None if self._stage is None else self._stage.join()
        other._pieces = list(self._pieces)
        other._add_special_tokens = self._add_special_tokens
        other._fork_position = len(self._pieces)
        return other

    def concatenate(self, forks: Sequence[Chain]) -> None:
        """Append what each of these forks of this chain has added, and end them. If nothing was added here meanwhile,
        the first one's KV stands right behind this chain's, and the chain goes on from it."""
        first = forks[0]
        if len(self._pieces) == first._fork_position and not self._has_pending:
            if self._stage is not None:
                self._stage.leave()
            self._stage, first._stage = first._stage, None
            self._pieces, self._joined, self._pending = first._pieces, first._joined, first._pending
            self._add_special_tokens = first._add_special_tokens
            forks = forks[1:]
        for fork in forks:
            new = [*fork._pieces[fork._fork_position :], *fork._joined]
            # What begins a fork of an empty state does not begin the prompt here.
            self._joined = [*self._pending_pieces(), *(replace(piece, add_special_tokens=False) for piece in new)]
            self._pending = fork._pending
        for fork in forks:
            fork.close()

    def abort(self) -> None:
        """Ask the server to end the step in flight; nothing happens if there is none. May be called from any thread."""
        for rid in list(self._in_flight):
            try:
                self._backend.abort(rid)
            except BackendError as error:
                logger.debug("request %s could not be aborted: %s", rid, error)

    def close(self) -> None:
        """End the chain: release its lease, unless other chains go on from the same stage."""
        if self._stage is not None:
            self._stage.leave()
            self._stage = None

    # -- requests ------------------------------------------------------------------------------------------------------

    def _send(self, rids: list[str], fields: dict[str, Any], *, stream: bool) -> Iterator[Any]:
        """Send the step ``fields`` as a continuation of everything so far; yields the answers."""
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
            "return_text_in_logprobs": True,
            "logprob_start_len": self._stage.num_tokens,
            "retain_ttl": self._retain_ttl,
        }
        try:
            (answers,) = self._call(rids, fields, stream=False)
            self._check_forced(answers)
            return answers
        except BackendError:
            for rid in rids:  # some of them may have succeeded
                self._release(rid)
            raise

    def _score_alone(self, rows: Sequence[Rows]) -> list[Rows]:
        """Score the same tokens as prompts of their own."""
        rids = [uuid4().hex for _ in rows]
        fields = {
            "rid": rids,
            "input_ids": [[token_id for _, token_id, _ in each] for each in rows],
            "sampling_params": COMPUTE_ONLY,
            "return_logprob": True,
            "return_text_in_logprobs": True,
            "logprob_start_len": 0,
        }
        (answers,) = self._call(rids, fields, stream=False)
        self._check_forced(answers)
        return [answer["meta_info"]["input_token_logprobs"] for answer in answers]

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
        """The fields that name the parent and the text to add, or give the whole prompt."""
        if self._stage is not None:
            fields = {"continuation_of": self._stage.rid, "continuation_index": self._stage.index}
            if self._joined:
                fields["continuation_ids"] = [i for piece in self._pending_pieces() for i in self._ids(piece)]
            elif self._pending:
                fields["continuation_suffix"] = self._pending
            # No chain can join in the meantime: only the thread that waits for this step makes forks.
            self._keeps_parent = self._stage.is_shared
            return fields | {"keep_parent": True} if self._keeps_parent else fields
        if self._pieces or not self._add_special_tokens:
            pieces = [*self._pieces, *self._pending_pieces()]
            return {"input_ids": [token_id for piece in pieces for token_id in self._ids(piece)]}
        return {"text": self._pending}

    def _ids(self, piece: Piece) -> list[int]:
        if piece.ids is not None:
            return piece.ids
        if not piece.text:
            return []
        return self._backend.tokenize(piece.text, add_special_tokens=piece.add_special_tokens)

    @property
    def _has_pending(self) -> bool:
        return bool(self._pending or self._joined)

    @property
    def _is_empty(self) -> bool:
        return self._stage is None and not self._pieces and not self._has_pending

    def _pending_pieces(self) -> list[Piece]:
        first = not self._pieces and not self._joined
        return [*self._joined, Piece(self._pending, add_special_tokens=first and self._add_special_tokens)]

    # -- stages --------------------------------------------------------------------------------------------------------

    def _move_on(self, generated: Piece | None, stage: Stage) -> None:
        self._pieces += self._pending_pieces()
        self._joined, self._pending = [], ""
        if generated is not None:
            self._pieces.append(generated)
        before, self._stage = self._stage, stage
        if before is not None:
            before.leave(handed_off=not self._keeps_parent)

    def _forget_stage(self) -> None:
        """Drop a stage that the server no longer knows; there is nothing to release."""
        assert self._stage is not None
        self._stage.leave(handed_off=True)
        self._stage = None

    def _releaser(self, answers: list[dict[str, Any]]) -> Callable[[str], None] | None:
        """The function that releases the leases of a finished request; None if it has none."""
        retained = [answer["meta_info"].get("retained") for answer in answers]
        return self._release if any(lease and lease.get("refused") is None for lease in retained) else None

    def _release(self, rid: str) -> None:
        try:
            self._backend.release(rid)
        except BackendError as error:
            # The lease expires by itself, and the program's results stand.
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
