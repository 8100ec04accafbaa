"""Requests with a known future: four synthetic traces on which eviction orders are compared.

Only the order of the requests and their shared parts matter, so tokens have no text. Every edge of the tree of all
prompts and answers has its own tokens: a token identifies its edge, and so the time of its next use.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

NOWHERE = -1


@dataclass(frozen=True)
class Request:
    """Two places in `Content`: the prompt ends at one, its answer at the other."""

    prompt: int
    end: int
    is_last: bool = False
    """True if no request continues it: the last step of a job."""
    no_reuse_from: int | None = None
    """Its tokens from here on are for this request alone."""


@dataclass
class Content:
    """The tree of all tokens that a trace will ever see; grows as the trace is made."""

    parents: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Tokens from the parent to each place."""
    lengths: list[int] = field(default_factory=list)
    """Tokens on the path from the root, of each place."""
    total: int = 0

    def add_tokens(self, parent: int, count: int) -> int:
        """``count`` new tokens after a place, or from the start (NOWHERE). Returns where they end."""
        self.parents.append(parent)
        self.starts.append(self.total)
        self.sizes.append(count)
        self.lengths.append(count + (self.lengths[parent] if parent != NOWHERE else 0))
        self.total += count
        return len(self.parents) - 1

    def path(self, place: int) -> Iterator[int]:
        """The places from ``place`` up."""
        while place != NOWHERE:
            yield place
            place = self.parents[place]

    def token_ids(self, place: int) -> np.ndarray:
        """int32 [tokens] from the root down to a place."""
        parts: list[np.ndarray] = []
        for at in self.path(place):
            parts.append(np.arange(self.starts[at], self.starts[at] + self.sizes[at], dtype=np.int32))
        return np.concatenate(parts[::-1])


@dataclass
class Trace:
    name: str
    content: Content
    requests: list[Request]

    def uses(self) -> list[list[int]]:
        """The requests that pass each place, by number and in order."""
        found: list[list[int]] = [[] for _ in self.content.parents]
        for number, request in enumerate(self.requests):
            for place in self.content.path(request.end):
                found[place].append(number)
        return found

    def working_set(self) -> float:
        """Tokens, on average over the trace, that were there already and will be asked for again."""
        span = 0
        for size, uses in zip(self.content.sizes, self.uses(), strict=True):
            span += size * (uses[-1] - uses[0] if uses else 0)
        return span / len(self.requests)


Session = Iterator[tuple[float, Request]]
"""Time before each request, since the previous one or the start of the session."""


def _trace(name: str, content: Content, sessions: Iterator[tuple[float, Session]], count: int) -> Trace:
    """The first ``count`` requests of sessions that begin at these times, which rise."""
    requests: list[Request] = []
    due: list[tuple[float, int, Session, Request]] = []
    upcoming, number = next(sessions), 0
    while len(requests) < count:
        while not due or upcoming[0] <= due[0][0]:
            begin, session = upcoming
            delay, request = next(session)
            heappush(due, (begin + delay, number, session, request))
            upcoming, number = next(sessions), number + 1
        time, serial, session, request = heappop(due)
        requests.append(request)
        if (later := next(session, None)) is not None:
            heappush(due, (time + later[0], serial, session, later[1]))
    return Trace(name, content, requests)


def agents(seed: int, count: int) -> Trace:
    """Jobs of 3 to 13 steps that share 20 system prompts; between two steps a tool runs, mostly for a short time."""
    rng, content = random.Random(seed), Content()
    prompts = [content.add_tokens(NOWHERE, 500) for _ in range(20)]

    def job() -> Session:
        place, steps = rng.choice(prompts), rng.randint(3, 13)
        for step in range(steps):
            prompt = content.add_tokens(place, rng.randint(75, 400))
            place = content.add_tokens(prompt, rng.randint(50, 250))
            tool = rng.lognormvariate(2.0, 1.2)
            yield (tool if step else 0.0), Request(prompt, place, is_last=step == steps - 1)

    return _trace("agents", content, _poisson(rng, 2.0, job), count)


def tenants(seed: int, count: int) -> Trace:
    """60 tenants with prompts of 500 to 4,000 tokens, few of them much used, each busy for a while and then silent;
    their users say 1 to 4 things."""
    rng, content = random.Random(seed), Content()
    prompts = [content.add_tokens(NOWHERE, rng.randint(500, 4000)) for _ in range(60)]
    weights = [1 / (rank + 1) for rank in range(60)]
    busy = [rng.random() < 0.4 for _ in prompts]

    def user() -> Session:
        if rng.random() < 0.1:
            changed = rng.randrange(60)
            busy[changed] = not busy[changed]
        chosen = rng.choices(range(60), [w * (1 if on else 0.02) for w, on in zip(weights, busy)])[0]
        place, turns = prompts[chosen], rng.choice([1, 1, 1, 2, 3, 4])
        for turn in range(turns):
            prompt = content.add_tokens(place, rng.randint(20, 200))
            place = content.add_tokens(prompt, rng.randint(50, 400))
            yield (rng.expovariate(1 / 40) if turn else 0.0), Request(prompt, place, is_last=turn == turns - 1)

    return _trace("tenants", content, _poisson(rng, 4.0, user), count)


def retrieval(seed: int, count: int) -> Trace:
    """A system prompt, one of 2,000 documents by Zipf's law, often a second one, a question that is asked once. What
    people ask about drifts."""
    rng, content = random.Random(seed), Content()
    system = content.add_tokens(NOWHERE, 800)
    documents = [rng.randint(300, 1500) for _ in range(2000)]
    weights = [1 / (rank + 1) ** 0.9 for rank in range(2000)]
    order = list(range(2000))
    places: dict[tuple[int, int], int] = {}

    def one() -> Session:
        if rng.random() < 0.2:
            a, b = rng.randrange(200), rng.randrange(2000)
            order[a], order[b] = order[b], order[a]
        place = system
        for _ in range(rng.choice([1, 1, 2])):
            document = order[rng.choices(range(2000), weights)[0]]
            if (place, document) not in places:
                places[place, document] = content.add_tokens(place, documents[document])
            place = places[place, document]
        shared = content.lengths[place]
        prompt = content.add_tokens(place, rng.randint(20, 100))
        yield 0.0, Request(prompt, content.add_tokens(prompt, rng.randint(50, 300)), no_reuse_from=shared)

    return _trace("retrieval", content, _poisson(rng, 1.0, one), count)


def bursts(seed: int, count: int) -> Trace:
    """Chats below one hot system prompt with slow users, and occasional batches of 100 long prompts that are never
    repeated."""
    rng, content = random.Random(seed), Content()
    system = content.add_tokens(NOWHERE, 2000)

    def chat() -> Session:
        place, turns = system, min(12, 1 + int(rng.expovariate(1 / 4)))
        for turn in range(turns):
            prompt = content.add_tokens(place, rng.randint(20, 200))
            place = content.add_tokens(prompt, rng.randint(100, 500))
            pause = rng.lognormvariate(3.5, 1.0)
            yield (pause if turn else 0.0), Request(prompt, place, is_last=turn == turns - 1)

    def batch() -> Session:
        for _ in range(100):
            prompt = content.add_tokens(NOWHERE, rng.randint(1000, 3000))
            yield 0.01, Request(prompt, content.add_tokens(prompt, 100), no_reuse_from=0)

    def any_session() -> Session:
        return batch() if rng.random() < 0.01 else chat()

    return _trace("bursts", content, _poisson(rng, 1.5, any_session), count)


def _poisson(rng: random.Random, rate: float, make: Callable[[], Session]) -> Iterator[tuple[float, Session]]:
    time = 0.0
    while True:
        time += rng.expovariate(rate)
        yield time, make()


TRACES: dict[str, Callable[[int, int], Trace]] = {
    "agents": agents,
    "tenants": tenants,
    "retrieval": retrieval,
    "bursts": bursts,
}
