"""A whole scheduler, driven from one seed: random arrivals, shared prefixes, aborts, pressure; allocations and steps
that fail, and messages that make no sense. Checked: results, conservation, and that some request always makes
progress."""

from __future__ import annotations

import os
import random
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest

from baton.entrypoints.http_statuses import status_of
from baton.scheduler.batch import ScheduleBatch
from baton.scheduler.constraints.item_trie import ItemTrie
from baton.scheduler.jobs.calls import ToolCall
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.request import Request, RequestStatus
from baton.scheduler.request_spec import Predecessor
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.block_mirror import TreeFollower
from tests.doubles.kv_echo import VOCAB, Stage, expected_beams, expected_output
from tests.doubles.pooled_positions import POOLINGS, PooledPositions
from tests.doubles.scheduler_harness import STEP_FAILURES, Harness
from tests.doubles.simulated_grammars import SOURCES, SimulatedGrammars

SEED = int(os.environ.get("BATON_SIM_SEED", "20"))


def random_prompt(rng: random.Random, stems: list[list[int]], longest: int) -> list[int]:
    """A few shared stems, cut at random, and a tail of its own: splits at every kind of place."""
    prompt = rng.choice(stems)[: rng.randrange(0, 90)] + [rng.randrange(20) for _ in range(rng.randrange(1, 40))]
    return prompt[:longest]


@dataclass
class Sent:
    """What a request asked for. ``prompt``: only the suffix, for a continuation of ``parent``."""

    prompt: list[int]
    new: int
    ignore_eos: bool
    parent: tuple[str, int] | None = None
    search: SamplingParams | None = None
    trie: ItemTrie | None = None
    grammar: int | None = None
    """-1 for one that cannot be compiled."""


class Simulation:
    """One run from one seed. Time advances by one second per step; everything else is drawn."""

    def __init__(
        self,
        seed: int,
        *,
        faults: bool = False,
        host_ratio: float = 0.0,
        guesses: int = 0,
        jobs: bool = False,
        new_jobs: float = 0.0,
        unwanted: float = 0.0,
        clients: bool = False,
        next_turns: float = 0.4,
        prepares: bool = False,
        grammars: bool = True,
        adapters: bool = False,
        pooled: float = 0.0,
        states: int = 0,
        window: int = 0,
        follow: bool = False,
        check_every: int = 1,
        **options,
    ) -> None:
        """jobs: half of the requests are steps of jobs, whose ids are few, so that they are used again. new_jobs: share
        of these that bring a new id, in place of the oldest.
        faults: steps fail too, now and then, and copies between tiers. host_ratio: size of the host tier by that of the
        pool, and of its states by the model's; 0: none. guesses: a step brings up to so many tokens more for a request.
        unwanted: share of the requests that say from where their KV is of no further use. clients: the requests come
        from two, or from one that is not known. next_turns: share of whole prompts that go on from what an earlier
        request said; half of them do not name it. prepares: next turns are prepared, with lulls for it. grammars: some
        requests have one. adapters: half of the requests have one of two. pooled: share of the whole prompts that are
        pooled. states: slots of the model's recurrent states; 0 for a model without them. window: tokens that its
        layers with a window see; 0 for none. follow: a follower of block events compares what it knows with the tree.
        check_every: of the checks of all invariants, two or three a turn, one in so many is made; more than 1 for tests
        of something else."""
        self.rng = rng = random.Random(seed)
        self.turns = random.Random(seed + 2)
        self.prefills = random.Random(seed + 3)
        self.jobs = random.Random(seed + 4) if jobs else None
        self.unwanted, self.unwanted_share = random.Random(seed + 5), unwanted
        self.clients = random.Random(seed + 6) if clients else None
        self.drawn_grammars = random.Random(seed + 7) if grammars else None
        self.adapters = random.Random(seed + 9) if adapters else None
        self.adapter_of: dict[str, str] = {}
        self.pools, self.pooled_share = random.Random(seed + 10), pooled
        self.positions = PooledPositions()
        self.num_pooled = 0
        """Vectors that were checked."""
        self.next_turns = next_turns
        self.unnamed = random.Random(seed + 7)
        """Decides which turns name no predecessor, so that the scheduler must find it."""
        self.recognized = 0
        """Requests that the scheduler has found to extend a finished turn."""
        self.preparing = random.Random(seed + 8) if prepares else None
        self.prepared: list[tuple[Request, list[int]]] = []
        """Requests, and the tokens that were to be computed for the turn after each."""
        self.job_names = deque([f"job{number}" for number in range(6)], maxlen=6)
        self.new_jobs, self.num_jobs = new_jobs, 6
        self.steps_run = 0
        self.parents = random.Random(seed + 20)
        """Chooses the parents of jobs."""
        self.eos = (3, 4, 5, 6)
        num_tokens = rng.choice([320, 384, 640])
        if host_ratio:
            options["host_tokens"] = max(1, int(num_tokens * host_ratio) // 64) * 64
            options["host_states"] = int(states * host_ratio)
            options["tiers_rng"] = random.Random(seed + 1)
        self.harness = Harness(
            num_tokens=num_tokens,
            rows=rng.choice([3, 8]),
            leases=rng.choice([2, 8]),
            leased_ratio=rng.choice([0.3, 0.9]),
            chunk=rng.choice([1, 7, 32, 64, 500]),
            max_finished_requests=rng.choice([4, 1000]),
            context=256,
            eos=self.eos,
            states=states,
            window=window,
            **options,
        )
        self.reach = window
        self.follower = None
        if follow:
            page, host_tokens = options.get("page_size", 1), options.get("host_tokens", 0)
            self.follower = TreeFollower(self.harness.cache, max(4, page), host_tokens)
        self.harness.check_every = check_every
        self.failure_rate = rng.choice([0.0, 0.0, 0.1])
        self.harness.allocator.should_fail = lambda call: rng.random() < self.failure_rate
        if self.harness.slots is not None:
            self.harness.slots.should_fail = lambda call: rng.random() < self.failure_rate
        self.fault_rate = rng.choice([0.03, 0.1]) if faults else 0.0
        self.harness.fault = self.fault
        if guesses:
            self.harness.model.guesses = lambda: rng.randint(0, guesses)
        if self.harness.tiers is not None:
            self.harness.tiers.failure_rate = self.fault_rate
        self.stems = [[rng.randrange(VOCAB) for _ in range(90)] for _ in range(3)]
        self.sent: dict[str, Sent] = {}
        self.namespaces: dict[str, str] = {}
        self.aborted: set[str] = set()
        self.trie = ItemTrie.build(np.random.default_rng(seed).integers(0, VOCAB, (60, 3), dtype=np.int32))
        self.grammars = SimulatedGrammars(self.eos)
        self.under_grammar = 0
        """Outputs under a grammar that have been checked."""
        self.paths: set[str] = set()
        self.hit: set[str] = set()
        """Rids that an injected fault has ended."""
        self.searches = 0
        self.mixed = 0
        """Steps that computed prompts and tokens of running requests."""

    def run(self, steps: int) -> None:
        rng, harness = self.rng, self.harness
        for number in range(self.steps_run, self.steps_run + steps):
            is_lull = self.preparing is not None and number % 100 >= 20
            if rng.random() < 0.3 and not is_lull and len(harness.scheduler.live_requests) < 24:
                self.send(f"r{number}")
            if rng.random() < 0.03 and self.sent:
                self.abort(rng.choice(list(self.sent)))
            if rng.random() < 0.02 and self.sent:
                harness.scheduler.release_leases(rng.choice(list(self.sent)))
            if rng.random() < 0.01:
                harness.scheduler.flush_cache()
            if rng.random() < 0.02:
                self.send_nonsense()
            if self.drawn_grammars is not None and self.grammars.num_compiling and self.drawn_grammars.random() < 0.3:
                self.grammars.finish(self.drawn_grammars.randrange(self.grammars.num_compiling))
            if self.jobs is not None:
                self.stir_jobs(self.jobs)
            if self.adapters is not None and number % 40 == 0:  # "b" is unloaded for a while
                harness.scheduler.set_adapters({"a", "b"} if self.adapters.random() < 0.7 else {"a"})
            if self.preparing is not None and self.preparing.random() < 0.15:
                self.prepare(self.preparing)
            if is_lull and self.preparing is not None and self.prepared and self.preparing.random() < 0.1:
                self.send_prepared(f"r{number}", self.preparing)
            self.step()
        self.steps_run += steps
        self.failure_rate = self.fault_rate = 0.0
        self.grammars.finish()
        if harness.tiers is not None:
            harness.tiers.failure_rate = 0.0
        # Most turns are still to come; two checks a turn, so that both have their turn.
        harness.check_every = max(harness.check_every, 3)
        harness.run()
        harness.now += 1000.0
        harness.step()  # the last leases expire
        harness.run()  # what they held is stored, if there is a tier
        harness.check_every = 1
        harness.verify()
        self.check()
        self.check_jobs()

    def prepare(self, rng: random.Random) -> None:
        """Prepare a turn after one that has ended, or not; after most of what it read and said, or little of it."""
        outcomes = self.harness.outcomes
        if not outcomes:
            return
        rid, index = rng.choice(list(outcomes)[-8:])
        away = [job for job in self.harness.scheduler.unended_jobs() if not job.open_rids]
        last = [job.last_step for job in away if job.last_step is not None and job.last_step.is_pinned]
        if last and rng.random() < 0.8:
            step = rng.choice(last)
            rid, index = step.rid, step.index
        request = outcomes[rid, index if (rid, index) in outcomes else 0].request
        assert request is not None
        said = request.token_ids.view().tolist()
        ids = said[: rng.choice([len(said), len(said) - 3, len(said) // 2])]
        ids += [rng.randrange(20) for _ in range(rng.choice([1, 10, 80]))]
        self.harness.prepare(rid, ids, index)
        self.prepared = [*self.prepared[-2:], (request, ids)]

    def send_prepared(self, rid: str, rng: random.Random) -> None:
        """The turn that was prepared last, of the same job."""
        before, ids = self.prepared.pop()
        prompt, new = [*ids[:200], rng.randrange(20)], rng.randrange(1, 20)
        more = {"job_id": before.spec.job_id, "namespace": before.spec.namespace, "adapter": before.adapter}
        more |= {"retain_ttl": 60.0, "ignore_eos": True}
        try:
            self.harness.add(rid, prompt, new, **more)
        except RequestRefused as refusal:
            assert refusal.code == "request_failed", refusal
            return
        self.sent[rid] = Sent(prompt, new, ignore_eos=True)
        self.namespaces[rid], self.adapter_of[rid] = before.spec.namespace, before.adapter

    def stir_jobs(self, rng: random.Random) -> None:
        """Read tool calls, of unknown steps too; end jobs; let the clock leap."""
        scheduler = self.harness.scheduler
        if self.sent and rng.random() < 0.3:
            calls = rng.choice([(), (ToolCall("ls", "ls -l"),), (ToolCall("make", "make all"), ToolCall("ls"))])
            rid = rng.choice([*list(self.sent)[-6:], "nobody"])
            scheduler.record_tool_calls(rid, rng.choice([0, 0, 1]), calls, self.harness.now)
        if rng.random() < 0.02:
            namespace, job_id = rng.choice(["", "salt"]), rng.choice(self.job_names)
            ended = scheduler.end_job(namespace, job_id, self.harness.now)
            if ended is not None:
                self.aborted.update(ended.aborted_rids)
                self.harness.take_ends(ended.events)
        if rng.random() < 0.005:
            self.harness.now += rng.choice([50.0, 5000.0])

    def job(self, rng: random.Random) -> dict[str, Any]:
        if rng.random() < 0.4:
            return {}
        if rng.random() < self.new_jobs:
            self.job_names.append(f"job{self.num_jobs}")
            self.num_jobs += 1
        parent = self.parents.choice([None, None, *self.job_names])
        return {"job_id": rng.choice(self.job_names), "is_last_step": rng.random() < 0.15, "parent_job_id": parent}

    def step(self) -> None:
        """One turn. If it did nothing, nothing can change any more but the clock: then no request may be waiting."""
        calls = self.harness.calls
        acted = self.harness.step()
        if self.follower is not None:
            self.follower.compare()
        if not acted and (self.failure_rate == 0.0 or self.harness.calls == calls):
            live = self.harness.scheduler.live_requests
            if self.grammars.num_compiling:
                live = [request for request in live if request.status is RequestStatus.RUNNING]
            assert not live, f"no request makes progress: {live}"

    def fault(self, batch: ScheduleBatch) -> Stage | None:
        """Steps that copy fail more often: others may have been promised what they copy."""
        self.mixed += batch.is_extend and self.harness.scheduler._in_flight[-1].num_prompts < len(batch)
        self.positions.note_step(batch)
        stages: list[Stage] = ["updates", "copies", "compute", "finish"]
        rate = 5 * self.fault_rate if len(batch.copies) else self.fault_rate
        return self.rng.choice(stages) if self.rng.random() < rate else None

    def send_nonsense(self) -> None:
        """A name that is taken, and names that do not exist."""
        for request in self.harness.scheduler.live_requests[:1]:
            with pytest.raises(RequestRefused) as refused:
                self.harness.add(request.rid, [1, 2, 3], 4)
            assert refused.value.code in ("duplicate_rid", "request_failed")
        self.harness.abort("nobody")
        assert not self.harness.scheduler.release_leases("nobody")
        with pytest.raises(RequestRefused) as refused:
            self.harness.continue_from("nobody", "orphan", [1, 2], 4)
        assert status_of(refused.value) == 404 or refused.value.code == "request_failed"

    def send(self, rid: str) -> None:
        rng = self.rng
        new, n, ignore = rng.randrange(1, 40), rng.choice([1, 1, 1, 3]), rng.random() < 0.5
        ttl = rng.choice([0.0, 5.0, 60.0])
        trie = self.trie if rng.random() < 0.1 else None
        search: dict[str, Any] = {}
        if rng.random() < 0.25:
            width = rng.choice([1, 2, 3])
            n, new = rng.randint(1, width), max(3, new // 2)
            search = {"beam_width": width, "early_stopping": rng.choice([False, True, "never"])}
            search["length_penalty"] = rng.choice([0.0, 1.0, 1.5])
        elif trie is not None:
            new = max(3, new)
        number = None
        if self.drawn_grammars is not None and trie is None and self.drawn_grammars.random() < 0.15:
            number = self.drawn_grammars.randrange(-1 if self.drawn_grammars.random() < 0.3 else 0, len(SOURCES))
        if self.prefills.random() < 0.1 and not search and trie is None and number is None:
            new = 0
        common = {"n": n, "ignore_eos": ignore, "no_stop_trim": rng.random() < 0.2, **search}
        params = SamplingParams(temperature=0.0, max_new_tokens=new, **common) if search else None
        common |= {"retain_ttl": ttl, "trie": trie}
        if number is not None and self.drawn_grammars is not None:
            is_ready = self.drawn_grammars.random() < 0.5
            common["grammar"] = self.grammars.constraint(number if number >= 0 else None, is_ready)
        common |= self.job(self.jobs) if self.jobs is not None else {}
        if self.clients is not None:
            common["client"] = self.clients.choice(["", "alice", "bob"])
        adapter = self.adapters.choice(["", "", "a", "b"]) if self.adapters is not None else ""
        if self.unwanted.random() < self.unwanted_share:
            common["no_reuse_from"] = self.unwanted.choice([0, 30, 200])
        if self.sent and rng.random() < 0.5:
            parent = rng.choice(list(self.sent)[-12:])
            suffix = [rng.randrange(20) for _ in range(rng.choice([0, 1, 3, 20]))]
            namespace = self.namespaces[parent]
            if self.adapters is None or self.adapters.random() < 0.9:
                adapter = self.adapter_of[parent]
            common["adapter"] = adapter
            index = rng.choice([0, 0, 1])
            at: Literal["finish", "now"] = "now" if rng.random() < 0.3 else "finish"
            keep = rng.random() < 0.3
            try:
                self.harness.continue_from(
                    parent, rid, suffix, new, index=index, at=at, keep_parent=keep, namespace=namespace, **common
                )
            except RequestRefused as refusal:
                assert status_of(refusal) in (400, 404, 409, 410) or refusal.code == "request_failed", refusal
                assert refusal.code != "adapter_mismatch" or adapter != self.adapter_of[parent]
                return
            assert adapter == self.adapter_of[parent]
            self.sent[rid] = Sent(suffix, new, ignore, (parent, index), params, trie, number)
        else:
            namespace = rng.choice(["", "", "salt"])
            prompt, predecessor = random_prompt(rng, self.stems, 200), None
            if self.sent and self.turns.random() < self.next_turns:
                namespace, adapter, prompt, predecessor = self.next_turn()
                predecessor = None if self.unnamed.random() < 0.5 else predecessor
            if self.pools.random() < self.pooled_share:
                client = {"client": common["client"]} if "client" in common else {}
                common = {"pooling": self.pools.choice(POOLINGS), "no_reuse_from": 0, **client}
                new, params, number, predecessor, trie = 0, None, None, None, None
            try:
                self.harness.add(
                    rid, prompt, new, namespace=namespace, adapter=adapter, predecessor=predecessor, **common
                )
            except RequestRefused as refusal:
                is_wide = self.is_stateful and refusal.param == "beam_width"
                is_large = params is not None and (is_wide or refusal.code == "kv_pool_exceeded")
                assert is_large or refusal.code in ("request_failed", "invalid_grammar"), refusal
                return
            self.sent[rid] = Sent(prompt, new, ignore, None, params, trie, number)
        self.namespaces[rid], self.adapter_of[rid] = namespace, adapter

    def next_turn(self) -> tuple[str, str, list[int], Predecessor]:
        """Namespace, adapter, and a prompt that goes on from what an earlier request had said by now, or nearly."""
        turns = self.turns
        outcomes = self.harness.outcomes
        if self.preparing is not None and self.prepared and self.preparing.random() < 0.7:
            before, ids = self.preparing.choice(self.prepared)
            ids = [*ids[: len(ids) - self.preparing.choice([0, 0, 0, 5])][:196], self.preparing.randrange(20)]
            return before.spec.namespace, before.adapter, ids, Predecessor(before.rid, before.index)
        ended = [key for key, outcome in outcomes.items() if outcome.finish is not None]
        rid, index = turns.choice(ended[-8:] if ended and turns.random() < 0.9 else list(outcomes))
        request = self.harness.outcomes[rid, index].request
        assert request is not None
        ids = request.token_ids.view()[:196].tolist() or [1]
        if turns.random() < 0.2:
            ids[turns.randrange(len(ids))] = 7
        ids = ids[: len(ids) - turns.choice([0, 0, 0, 1])] + [
            turns.randrange(20) for _ in range(turns.randrange(1, 20))
        ]
        namespace = self.namespaces[rid] if turns.random() < 0.9 else "pepper"
        adapter = request.adapter
        if self.adapters is not None and self.adapters.random() < 0.1:
            adapter = self.adapters.choice(["", "a", "b"])
        return namespace, adapter, ids, Predecessor(rid, turns.choice([index, index, 1]))

    def abort(self, rid: str) -> None:
        if any(r.rid == rid for r in self.harness.scheduler.live_requests):
            self.aborted.add(rid)
        self.harness.abort(rid)

    def prompt_of(self, rid: str, index: int) -> list[int]:
        """The whole prompt of a sample, from what its ancestors really said."""
        sent = self.sent[rid]
        request = self.harness.outcomes[rid, index].request
        if sent.parent is None:
            if request is not None and request.inheritance is not None:
                self.paths.add(f"{request.inheritance.path} of the turn before")
                self.recognized += request.spec.predecessor is None and request.spec.job_id is None
            return sent.prompt
        assert request is not None and request.inheritance is not None
        self.paths.add(request.inheritance.path)
        parent, sample = sent.parent
        if self.sent[parent].search is not None:
            said = self.harness.outcomes[parent, 0].results[sample].ids.tolist()
            sequence = self.prompt_of(parent, 0) + said
        else:
            sequence = self.prompt_of(parent, sample) + self.harness.outcomes[parent, sample].tokens
        return sequence[: request.inheritance.inherited_tokens] + sent.prompt

    def check(self) -> None:
        for (rid, index), outcome in self.harness.outcomes.items():
            sent = self.sent[rid]
            assert outcome.finish is not None
            if outcome.refusal is not None and outcome.refusal.code == "request_failed":
                self.hit.add(rid)
                continue
            if outcome.refusal is not None and outcome.refusal.code == "invalid_grammar":
                assert sent.grammar == -1
                continue
            if outcome.refusal is not None and outcome.refusal.code not in STEP_FAILURES:
                assert sent.parent is not None and status_of(outcome.refusal) in (400, 409)
                continue
            fell_short = "the beam search found nothing" in (outcome.finish.message or "")
            if outcome.finish.type == "abort" and not fell_short:
                assert rid in self.aborted or rid in self.harness.failed
                if not outcome.tokens:
                    continue
            if sent.search is not None:
                own = None if sent.grammar is None else self.grammars.constraint(sent.grammar, True)
                ends, adapter = frozenset(self.eos), self.adapter_of[rid]
                found = expected_beams(
                    self.prompt_of(rid, index), sent.search, sent.trie, ends, own, adapter, self.is_stateful, self.reach
                )
                assert [(r.ids.tolist(), r.score) for r in outcome.results] == [
                    (r.ids.tolist(), r.score) for r in found
                ]
                assert fell_short == (not found)
                self.searches += 1
                self.under_grammar += own is not None
                continue
            end_ids = frozenset() if sent.ignore_eos else frozenset(self.eos)
            twin = None if sent.grammar is None else self.grammars.twin(sent.grammar)
            prompt = self.prompt_of(rid, index)
            expected = expected_output(
                prompt, sent.new, end_ids, sent.trie, twin, self.adapter_of[rid], self.is_stateful, self.reach
            )
            self.under_grammar += twin is not None
            request = outcome.request
            if outcome.finish.type == "length" and request is not None and request.spec.pooling is not None:
                self.positions.check(request)
                self.num_pooled += 1
            if outcome.finish.type == "abort":
                expected = expected[: len(outcome.tokens)]
            assert outcome.tokens == expected, (rid, index)
        stats = self.harness.scheduler.stats()
        assert stats.free_tokens + stats.evictable_tokens == stats.total_tokens
        assert stats.protected_tokens == stats.private_tokens == stats.leased_tokens == 0
        assert self.harness.pool.num_free == self.harness.pool.num_rows
        self.check_states()
        self.check_windows()

    def check_windows(self) -> None:
        """Only the tree keeps slots of the window pool, and gives them all back."""
        windows = self.harness.windows
        if windows is not None:
            assert windows.free_tokens + windows.evictable_tokens == windows.total_tokens
            flush = self.harness.scheduler.flush_cache
            assert flush() or flush(), "a fault that is injected into the first prevents no second"
            assert windows.free_tokens == windows.total_tokens

    def check_states(self) -> None:
        """Only the tree holds states, and gives them all back."""
        slots = self.harness.slots
        if slots is not None:
            flush = self.harness.scheduler.flush_cache
            assert flush() or flush(), "a fault that is injected into the first prevents no second"
            assert (slots.free, slots.held, slots.quarantined) == (slots.total, 0, 0)

    @property
    def is_stateful(self) -> bool:
        return self.harness.slots is not None

    def check_jobs(self) -> None:
        """Every pin has ended in one way, and nothing open is left of any job."""
        stats = self.harness.scheduler.stats().jobs
        preparations = self.harness.scheduler._preparations
        assert not preparations._pending and preparations.request_in_flight is None
        assert stats.pins == stats.hits + stats.expired + stats.broken + stats.released
        for namespace in ("", "salt"):
            for job in self.harness.scheduler.describe_jobs(namespace, None, self.harness.now):
                assert not job["open_requests"] and not job["pins"]


def simulate(seed: int, *, steps: int, **options) -> Simulation:
    print(f"BATON_SIM_SEED={seed}")
    simulation = Simulation(seed, **options)
    simulation.run(steps)
    return simulation
