"""Turns requests into the batch of a step. The one place where a live Request becomes plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..memory_pool.req_to_token import RowUpdates
from .batch import BeamStep, ForwardMode, KVCopies, PooledSpan, ScheduleBatch, SequenceInfo
from .constraints.constraint import AllowedTokens, ConstraintState
from .outcome import RequestRefused
from .request import Request, RequestFault

NO_IDS = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class TokenRows:
    """Rows for a step: one token for each of these running requests, and the guesses that follow it. Their slots are
    allocated."""

    requests: list[Request]
    ids: np.ndarray
    """int32 [tokens]: -(i + 1) stands for the token that row i of the step in flight samples."""
    slots: np.ndarray
    """int32 [tokens]"""
    new_lens: np.ndarray
    """int32 [n]: length to which each row computes its request."""
    draft_lens: np.ndarray | None = None
    """int32 [n]: number of guesses among each row's tokens; None if there are none."""


@dataclass(slots=True, eq=False)
class PlannedStep:
    """A step's batch, and the requests that its rows belong to."""

    batch: ScheduleBatch
    requests: list[Request]
    """The request of each row."""
    num_prompts: int
    """Leading rows that compute prompts, or a retracted request's known tokens; the others are running requests."""
    serves_running: bool
    """True if the step gives a token to every running request that a decode step would serve."""
    searches: list[Request] = field(default_factory=list)
    """The request of each search in batch.beams."""
    opened: list[Request] = field(default_factory=list)
    """The request of each entry in batch.opened; the step runner knows them once the step is formed."""
    formed: float = 0.0
    """Time at which it was formed, on the scheduler's clock."""
    fence: int = 0
    """A fence that is open until the step has ended, see memory_pool/fences.py."""
    is_preparation: bool = False
    """Its only row is a chunk of a preparation (preparations.py)."""
    awaiting: list[tuple[int, Request]] = field(default_factory=list)
    """Rows with a constraint that the token in flight decides, and their requests."""
    allowed: list[AllowedTokens] = field(default_factory=list)
    """The parts of batch.allowed."""
    longest_gap: int = 0
    """Steps from the last one that served a running request of this step, for the one that has waited longest; 1 if
    that was the step before."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of new prompt tokens."""
        return int(self.batch.extend_lens[: self.num_prompts].sum()) if self.num_prompts else 0


def plan_step(
    mode: ForwardMode,
    requests: list[Request],
    new_lens: np.ndarray,
    slots: np.ndarray,
    *,
    step_id: int,
    row_updates: RowUpdates,
    copies: list[KVCopies],
    running: TokenRows | None = None,
) -> PlannedStep:
    """Plan a step that computes each request up to ``new_lens`` (int32 [bs]), and count that as scheduled.

    ``slots`` as `KVMemory.extend` returned them. ``running``: rows of the last requests, which are running; the others
    compute their known tokens. A search is a row like any other while its prompt is computed.
    """
    bs = len(requests)
    num_prompts = bs - len(running.requests) if running is not None else bs
    prefix_lens = np.array([r.scheduled_len for r in requests], dtype=np.int32)
    input_ids = running.ids if running is not None else NO_IDS
    if num_prompts:
        prompts = [_known_ids(r, new) for r, new in zip(requests[:num_prompts], new_lens.tolist())]
        input_ids = np.concatenate([*prompts, input_ids])
    step = PlannedStep(
        ScheduleBatch(
            step_id=step_id,
            mode=mode,
            opened=[],
            closed=[],
            serials=np.fromiter((r.serial for r in requests), dtype=np.int64, count=bs),
            input_ids=input_ids,
            out_cache_loc=slots,
            req_pool_indices=np.fromiter((r.held_kv.row for r in requests), dtype=np.int32, count=bs),
            prefix_lens=prefix_lens,
            extend_lens=new_lens - prefix_lens,
            samples=np.empty(bs, dtype=bool),
            output_positions=np.empty(bs, dtype=np.int32),
            logprob_starts=new_lens - prefix_lens,
            logprob_targets=[],
            row_updates=row_updates,
            copies=KVCopies.join(copies),
            draft_lens=running.draft_lens if running is not None else None,
        ),
        requests,
        num_prompts,
        serves_running=num_prompts == 0,
    )
    _fill_rows(step, new_lens)
    return step


def _known_ids(request: Request, stop: int) -> np.ndarray:
    """int32 [n]: the prompt tokens that the step computes, up to ``stop``."""
    try:
        return request.token_ids.view(request.scheduled_len, stop)
    except Exception as error:
        raise RequestFault(request) from error


def _fill_rows(step: PlannedStep, new_lens: np.ndarray) -> None:
    """Fill in everything that depends on how far each request has got."""
    batch = step.batch
    constrained: list[tuple[int, Request]] = []
    drafted = batch.draft_lens.tolist() if batch.draft_lens is not None else [0] * len(batch)
    for row, (request, old, new) in enumerate(zip(step.requests, batch.prefix_lens.tolist(), new_lens.tolist())):
        try:
            _fill_row(step, row, request, old, new, drafted[row], constrained)
        except Exception as error:
            raise RequestFault(request) from error
    _add_allowed(step, constrained)
    batch.lacks_masks = bool(step.awaiting)


def add_masks(step: PlannedStep) -> None:
    """Fill in what the constraints of a step allow, now that the step before it has ended. Raises RequestFault, and
    then the others are still to be filled in."""
    _add_allowed(step, [each for each in step.awaiting if each[1].finish is None])
    step.batch.lacks_masks = False


def _add_allowed(step: PlannedStep, constrained: list[tuple[int, Request]]) -> None:
    """Add what may be sampled in these rows. Raises RequestFault, and then nothing is added."""
    if not constrained:
        return
    batch, parts = step.batch, list[AllowedTokens]()
    first_samples = (np.cumsum(batch.sampled_counts) - batch.sampled_counts).astype(np.int32)
    kinds: dict[type[ConstraintState], list[tuple[int, Request]]] = {}
    for row, request in constrained:
        assert request.constraint_state is not None
        kinds.setdefault(type(request.constraint_state), []).append((row, request))
    for kind, members in kinds.items():
        if batch.draft_lens is not None:
            drafted = [each for each in members if batch.draft_lens[each[0]]]
            members = [each for each in members if not batch.draft_lens[each[0]]]
            parts += [
                allowed.shift(int(first_samples[row])) for row, allowed in _allowed_along(kind, drafted, batch).items()
            ]
        if members:
            rows = first_samples[[row for row, _ in members]]
            allowed = _allowed_next(kind, [request for _, request in members])
            parts.append(allowed.renumber(lambda own, rows=rows: rows[own]))
    step.allowed += parts
    batch.allowed = AllowedTokens.merge(step.allowed)


def _allowed_next(kind: type[ConstraintState], requests: list[Request]) -> AllowedTokens:
    try:
        return kind.allowed_next([request.constraint_state for request in requests])
    except Exception as error:
        if len(requests) == 1:
            raise RequestFault(requests[0]) from error
        alone = AllowedTokens.join([(i, _allowed_next(kind, [request])) for i, request in enumerate(requests)])
        assert alone is not None
        return alone


def _allowed_along(
    kind: type[ConstraintState], drafted: list[tuple[int, Request]], batch: ScheduleBatch
) -> dict[int, AllowedTokens]:
    """Row -> what may follow its known tokens and each of its guesses."""
    if not drafted:
        return {}
    assert batch.draft_lens is not None
    ends = np.cumsum(batch.extend_lens)
    drafts = [batch.input_ids[ends[row] - batch.draft_lens[row] : ends[row]] for row, _ in drafted]
    try:
        each = kind.allowed_along([request.constraint_state for _, request in drafted], drafts)
    except Exception as error:
        if len(drafted) == 1:
            raise RequestFault(drafted[0][1]) from error
        return {row: allowed for one in drafted for row, allowed in _allowed_along(kind, [one], batch).items()}
    found = {}
    for (row, request), allowed in zip(drafted, each, strict=True):
        if isinstance(allowed, RequestRefused):
            raise RequestFault(request) from allowed
        found[row] = allowed
    return found


def _fill_row(
    step: PlannedStep,
    row: int,
    request: Request,
    old: int,
    new: int,
    drafted: int,
    constrained: list[tuple[int, Request]],
) -> None:
    """old, new: computed length before and after the step. drafted: number of its last tokens that are guesses.
    constrained: gets the row if its constraint decides what it samples."""
    batch = step.batch
    end = len(request.token_ids) + request.num_output_placeholders
    samples = new - drafted == end and request.max_new_tokens > 0
    batch.samples[row] = samples
    batch.output_positions[row] = end - request.prompt_len
    if request.logprob_next < request.prompt_len and old < request.prompt_len - 1:
        first = max(0, request.logprob_next - 1 - old)
        if first < new - old:
            batch.logprob_starts[row] = first
            batch.logprob_targets.append(
                request.token_ids.view(old + first + 1, min(new + 1, request.prompt_len)).copy()
            )
    if request.spec.pooling is not None:
        _add_pooled(batch, row, request, old, new)
    if not request.is_open:
        batch.opened.append(_info(request))
        step.opened.append(request)
    if samples and request.beams is not None:
        batch.beams.append(_beam_step(request, row, row + 1))
        step.searches.append(request)
    elif samples and request.constraint_state is not None and request.num_output_placeholders:
        step.awaiting.append((row, request))
    elif samples and request.constraint_state is not None:
        constrained.append((row, request))
    request.scheduled_len = new
    request.num_drafted = drafted
    request.num_output_placeholders += samples + drafted
    if row >= step.num_prompts:
        _note_gap(step, request)
    request.last_step = batch.step_id


def _add_pooled(batch: ScheduleBatch, row: int, request: Request, old: int, new: int) -> None:
    """old, new: computed length before and after the step."""
    pooling, is_last, count = request.spec.pooling, new == request.prompt_len, new - old
    assert pooling is not None
    if not pooling.needs_first_tokens:
        if is_last:
            batch.pooled.append(PooledSpan(row, count - 1, count, old, is_last))
        return
    stop = count if pooling.kind == "mean" else int(old == 0)
    batch.pooled.append(PooledSpan(row, 0, stop, old, is_last))


def _note_gap(step: PlannedStep, running: Request) -> None:
    gap = step.batch.step_id - running.last_step
    if gap > step.longest_gap:
        step.longest_gap = gap


def add_searches(step: PlannedStep, searches: list[Request], input_ids: np.ndarray, slots: np.ndarray) -> None:
    """Append one row for each beam of each search to a decode step. input_ids, slots: int32 [rows added]."""
    batch = step.batch
    counts = [len(search.held_beams.rows) for search in searches]
    num_wanted = []
    start = len(batch)
    for search, count in zip(searches, counts):
        beam_step = _beam_step(search, start, start + count)
        batch.beams.append(beam_step)
        step.searches.append(search)
        step.requests += [search] * count
        num_wanted.append(beam_step.num_candidates)
        search.num_output_placeholders += 1
        _note_gap(step, search)
        search.last_step = batch.step_id
        start += count

    def each(values: list, dtype: type) -> np.ndarray:
        return np.repeat(np.array(values, dtype=dtype), counts)

    ones = np.ones(sum(counts), dtype=np.int32)
    batch.serials = np.concatenate([batch.serials, each([s.serial for s in searches], np.int64)])
    batch.input_ids = np.concatenate([batch.input_ids, input_ids])
    batch.out_cache_loc = np.concatenate([batch.out_cache_loc, slots])
    batch.req_pool_indices = np.concatenate([batch.req_pool_indices, *(s.held_beams.rows for s in searches)])
    batch.prefix_lens = np.concatenate([batch.prefix_lens, each([s.held_beams.length - 1 for s in searches], np.int32)])
    batch.extend_lens = np.concatenate([batch.extend_lens, ones])
    batch.samples = np.concatenate([batch.samples, each([wanted > 0 for wanted in num_wanted], bool)])
    positions = each([s.num_computed_beam_tokens for s in searches], np.int32)
    batch.output_positions = np.concatenate([batch.output_positions, positions])
    batch.logprob_starts = np.concatenate([batch.logprob_starts, ones])
    if batch.draft_lens is not None:
        batch.draft_lens = np.concatenate([batch.draft_lens, 0 * ones])


def _info(request: Request) -> SequenceInfo:
    counts_prompt = request.sampling.repetition_penalty != 1.0
    return SequenceInfo(
        serial=request.serial,
        sampling=request.sampling,
        seed=request.seed,
        logprobs=request.logprobs,
        eos_ends=request.constraint is None or request.constraint.eos_ends,
        prompt_ids=request.token_ids.view(0, request.prompt_len).copy() if counts_prompt else NO_IDS,
        banned=request.spec.banned,
        pooling=request.spec.pooling,
        adapter=request.adapter,
    )


def _beam_step(search: Request, start: int, stop: int) -> BeamStep:
    """The BeamStep of one search. It asks for no candidates while a retracted search recomputes known tokens."""
    group, kv = search.beams, search.beam_kv
    assert group is not None
    shared_len = kv.start if kv is not None else 0
    if search.num_computed_beam_tokens < group.num_tokens:
        return BeamStep(search.serial, start, stop, num_candidates=0, scores=group.scores, shared_len=shared_len)
    return BeamStep(
        search.serial,
        start,
        stop,
        num_candidates=group.num_candidates,
        scores=group.scores,
        shared_len=shared_len,
        bans_ends=group.bans_ends,
        allowed=group.allowed(),
        sequences=group.sequences() if search.sampling.stop else None,
    )
