"""A per-token twin of the cache's history: what became of every prefix that a cache ever had, by brute force.

It wraps the calls that change the cache, walks the whole tree after each, and keeps one entry for each token of each
path, in a dictionary that forgets nothing. A page in the tree is a copy of its tokens; two pages that begin alike are
two copies. For every request that is admitted it says what its report must be.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from baton.radix.cache import RadixCache
from baton.radix.lease import LeaseState, LeaseTable
from baton.radix.node import TreeNode
from baton.radix.tiers.host_tier import HostTier
from baton.radix.tree import RadixTree
from baton.scheduler import pins
from baton.scheduler.continuation.continuations import Continuations
from baton.scheduler.memory import kv_memory
from baton.scheduler.memory.kv_memory import KVMemory
from baton.scheduler.outcome import CacheReport, MissedSpan
from baton.scheduler.request import Request
from baton.scheduler.scheduler import Scheduler

Path = int
"""The number of a path: a namespace and its first token ids."""

ENDS = {"finished": "evicted", "expired": "expired", "released": "released"}


@dataclass
class Token:
    """The last token of one path."""

    copies: int = 0
    fate: str = ""
    """Empty: it was never in the cache."""
    left_at: float = 0.0
    by: tuple[str, str | None] | None = None
    client: str = ""


@dataclass
class Copy:
    """A page in the tree."""

    tokens: tuple[Path, ...]
    end: tuple[int, str] = (0, "finished")
    """When the last sequence that held it ended, and how."""


@dataclass
class CacheTwin:
    """Attach it before the first request. ``compared``: reports that were compared, by reason the spans in them."""

    scheduler: Scheduler
    now: float = 0.0
    compared: dict[str, int] = field(default_factory=dict)
    reports: int = 0
    errors: list[Exception] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cache: RadixCache = self.scheduler._cache
        self._numbers: dict[tuple[Path | str, int], Path] = {}
        self._tokens: dict[Path, Token] = {}
        self._copies: dict[Path, Copy] = {}
        """Those in the tree, by the path down to the end of their page."""
        self._clock = itertools.count(1)
        self._pressure: list[tuple[str, str | None]] = []
        self._lease_end = "finished"
        self._breaks = False
        self._namespaces: dict[str, set[str]] = {}
        self._diverged: dict[Request, int | None] = {}

    # -- the calls that change the cache ------------------------------------------------------------------------------

    def attach(self, patch: pytest.MonkeyPatch) -> None:
        twin = self

        def wrap(owner: Any, name: str, before: Any = None, after: Any = None, around: Any = None) -> None:
            original = getattr(owner, name)

            def wrapped(*args: Any, **kwargs: Any) -> Any:
                if before is not None:
                    twin._guard(before, *args, **kwargs)
                with around(*args, **kwargs) if around is not None else _nothing():
                    result = original(*args, **kwargs)
                if after is not None:
                    twin._guard(after, result, *args, **kwargs)
                return result

            patch.setattr(owner, name, wrapped)

        wrap(Scheduler, "_advance_time", before=lambda scheduler, now: setattr(twin, "now", now))
        wrap(KVMemory, "open_request", around=lambda memory, request, *_: twin._pressed(request))
        wrap(KVMemory, "extend", around=lambda memory, request, *_: twin._pressed(request))
        wrap(KVMemory, "break_lease", around=lambda *_: twin._breaking())
        wrap(KVMemory, "_evict_for", around=lambda memory, needed: twin._pressed(None))
        wrap(RadixCache, "free_nodes", before=lambda cache, nodes: twin._evict(nodes))
        wrap(HostTier, "_give_up", before=lambda tier, node: twin._drop(node))
        wrap(HostTier, "discard_copies", before=lambda tier: twin._drop_all())
        wrap(RadixTree, "hide", before=lambda *_: twin.walk(), after=lambda *_: twin._clear_hidden())
        wrap(RadixCache, "_start_afresh", before=lambda cache: twin._clear_all())
        wrap(RadixCache, "_insert", before=lambda *_: twin.walk(), after=lambda _, cache, seq, *__: twin.walk(seq))
        wrap(RadixCache, "cache_unfinished_req", after=lambda _, cache, seq, ids: twin._hold_tail(seq, ids))
        for name in ("cache_finished_req", "release"):
            patch.setattr(RadixCache, name, self._ending(getattr(RadixCache, name)))
        wrap(LeaseTable, "_close", around=lambda table, lease, state: twin._closing(state))
        for module in (kv_memory, pins):
            patch.setattr(module, "retire", self._retiring(module.retire))  # type: ignore[attr-defined]
        wrap(Continuations, "find_prompt", before=lambda *args: twin._note_divergence(*args))
        reporter = self.scheduler._prefill._reporter
        wrap(reporter, "report_request", after=lambda _, request, now: twin._compare(request, now))

    def _guard(self, hook: Any, *args: Any, **kwargs: Any) -> None:
        """Call a hook and keep its errors: the scheduler would contain them, as those of any request."""
        try:
            hook(*args, **kwargs)
        except Exception as error:
            self.errors.append(error)

    @contextmanager
    def _pressed(self, request: Request | None):
        """Memory is being found for a request; None: for those that run, unless it is known better."""
        if request is not None:
            self._pressure.append((request.spec.client, request.rid))
        elif not self._pressure:
            self._pressure.append(("", None))
        else:
            self._pressure.append(self._pressure[-1])
        try:
            yield
        finally:
            self._pressure.pop()

    @contextmanager
    def _closing(self, state: LeaseState):
        self._lease_end = {LeaseState.EXPIRED: "expired", LeaseState.RELEASED: "released"}.get(state, "finished")
        try:
            yield
        finally:
            self._lease_end = "finished"

    def _ending(self, original: Any) -> Any:
        """A sequence ends: of a finished request, its tokens get into the tree before that."""

        def wrapped(cache: RadixCache, seq: Any, *args: Any, **kwargs: Any) -> Any:
            node, hidden, namespace = seq.node, _is_hidden(cache.tree, seq.node), seq.namespace
            finished = bool(args)  # with the ids
            ids = [int(each) for each in args[0]] if finished else _ids_down_to(node)
            held = seq.tree_len
            client = seq.client
            result = original(cache, seq, *args, **kwargs)
            if not hidden and not cache.disabled:
                whole = max(held, len(ids) - len(ids) % cache.page_size)
                self._end(self._path(namespace, ids[:whole]), "finished" if finished else self._lease_end)
                if finished:
                    self._keep_tail(namespace, ids, whole, client)
            return result

        return wrapped

    def _retiring(self, original: Any) -> Any:
        def wrapped(cache: RadixCache, node: TreeNode, *args: Any, **kwargs: Any) -> int:
            hidden, ids = _is_hidden(cache.tree, node), _ids_down_to(node)
            namespace = cache.tree.namespace_of(node) if ids and not hidden else ""
            tokens = original(cache, node, *args, **kwargs)
            if not hidden and tokens:
                path = self._path(namespace, ids)
                self._end(path[len(ids) - tokens :], "finished" if self._breaks else "released")
            return tokens

        return wrapped

    @contextmanager
    def _breaking(self):
        """A lease is broken, for memory: KV that is marked to be evicted for that was not given up."""
        self._breaks = True
        try:
            yield
        finally:
            self._breaks = False

    def _end(self, path: Sequence[Path], how: str) -> None:
        """Sequences that held these tokens, from the last one back, have ended. path: at the end of whole pages."""
        end = next(self._clock), how
        for number in path:
            if number in self._copies:
                self._copies[number].end = end

    def _hold_tail(self, seq: Any, token_ids: np.ndarray) -> None:
        if not self._cache.disabled and not _is_hidden(self._cache.tree, seq.node):
            ids = [int(each) for each in token_ids]
            self._keep_tail(seq.namespace, ids, len(ids) - len(ids) % self._cache.page_size, seq.client)

    def _keep_tail(self, namespace: str, ids: list[int], start: int, client: str) -> None:
        for number in self._path(namespace, ids)[start:]:
            token = self._tokens[number]
            if not token.copies:
                token.fate, token.left_at, token.by, token.client = "page", self.now, None, client

    # -- copies come and go -------------------------------------------------------------------------------------------

    def walk(self, seq: Any = None) -> None:
        """Look at the whole tree: new copies were computed by this sequence, or came from a store."""
        seen = self._copies_in_tree()
        for last, tokens in seen.items():
            if last not in self._copies:
                self._copies[last] = Copy(tokens)
                for number in tokens:
                    token = self._tokens[number]
                    if not token.copies:
                        token.client = seq.client if seq is not None else ""
                    token.copies, token.fate = token.copies + 1, "here"
        assert seen.keys() == self._copies.keys(), "a page left the tree, and no call that is known removed it"

    def _copies_in_tree(self) -> dict[Path, tuple[Path, ...]]:
        tree = self._cache.tree
        seen: dict[Path, tuple[Path, ...]] = {}
        todo: list[tuple[TreeNode, str, Path | str]] = [
            (node, node.child_key[0], "root " + node.child_key[0])  # type: ignore[index]
            for node in tree.root.children.values()
            if not tree.is_hidden(node)
        ]
        while todo:
            node, namespace, above = todo.pop()
            path = self._follow(above, np.frombuffer(node.key, dtype=np.int32).tolist())
            if len(node.value) or node.host is not None:
                for start in range(0, len(path), tree.page_size):
                    page = tuple(path[start : start + tree.page_size])
                    seen[page[-1]] = page
            todo += [(child, namespace, path[-1]) for child in node.children.values() if not tree.is_hidden(child)]
        return seen

    def _evict(self, nodes: Sequence[TreeNode]) -> None:
        self.walk()
        for node in nodes:
            if node.host is None and len(node.value) and not _is_hidden(self._cache.tree, node):
                for copy in self._pages_of(node):
                    self._leave(copy, ENDS[self._copies[copy].end[1]])

    def _drop(self, node: TreeNode) -> None:
        self.walk()
        if not len(node.value) and not _is_hidden(self._cache.tree, node):
            for copy in self._pages_of(node):
                self._leave(copy, "dropped")

    def _drop_all(self) -> None:
        for node in [node for node in self._cache.tree.nodes() if node.host is not None][::-1]:
            self._drop(node)

    def _clear_hidden(self) -> None:
        seen = self._copies_in_tree()
        for copy in [copy for copy in self._copies if copy not in seen]:
            self._leave(copy, "cleared", pressed=False)

    def _clear_all(self) -> None:
        for copy in list(self._copies):
            self._leave(copy, "cleared", pressed=False)

    def _leave(self, copy: Path, fate: str, *, pressed: bool = True) -> None:
        for number in self._copies.pop(copy).tokens:
            token = self._tokens[number]
            token.copies -= 1
            if not token.copies:
                token.fate, token.left_at = fate, self.now
                token.by = self._pressure[-1] if pressed and self._pressure else None

    def _pages_of(self, node: TreeNode) -> list[Path]:
        """The copies in a node, the last first."""
        path = self._path(self._cache.tree.namespace_of(node), _ids_down_to(node))
        page = self._cache.page_size
        return [path[end - 1] for end in range(node.prefix_len, node.prefix_len - len(node), -page)]

    # -- paths --------------------------------------------------------------------------------------------------------

    def _path(self, namespace: str, ids: Iterable[int]) -> list[Path]:
        return self._follow("root " + namespace, ids)

    def _follow(self, above: Path | str, ids: Iterable[int]) -> list[Path]:
        path: list[Path] = []
        for each in ids:
            number = self._numbers.setdefault((above, each), len(self._numbers))
            self._tokens.setdefault(number, Token())
            path.append(number)
            above = number
        return path

    # -- reports ------------------------------------------------------------------------------------------------------

    def _note_divergence(self, parts: Continuations, requests: list[Request], live: Any, earlier: Any = ()) -> None:
        first, left = requests[0], list[int | None]()
        turn = first.spec.predecessor
        names: list[tuple[str, int]] = [*([(turn.rid, turn.index)] if turn is not None else []), *earlier]
        prompt = [int(each) for each in first.own_ids]
        for name in names if first.spec.continuation is None else ():
            sample = parts._records.look_up(name[0], name[1], first.namespace)
            if sample is not None:
                step = [*map(int, sample.ids.view()), *map(int, sample.result)]
                both = min(len(step), len(prompt))
                left.append(next((place for place in range(both) if step[place] != prompt[place]), None))
        known = [place for place in left if place is not None]
        for request in requests:
            self._diverged[request] = None if None in left or not known else max(known)

    def _compare(self, request: Request, now: float) -> None:
        self.walk()
        if request.queried:
            return
        report = request.cache_report
        expected = self.expected(request, now)
        assert report is not None and report == expected, f"{request}: {report} instead of {expected}"
        assert sum(span.tokens for span in report.missed) == request.prompt_len - request.found.total
        self.reports += 1
        for span in report.missed:
            self.compared[span.reason] = self.compared.get(span.reason, 0) + 1

    def expected(self, request: Request, now: float) -> CacheReport:
        """The report of a request that has just been opened."""
        found, end, page = request.found.total, request.prompt_len, self._cache.page_size
        ids = [int(each) for each in request.token_ids.view(0, end)]
        limit, client, diverged = max(found, end - 1), request.spec.client, self._diverged.get(request)
        took_over = request.inheritance is not None and request.inheritance.took_over
        path = self._path(request.namespace, ids)
        whole = 0
        while whole + page <= limit and path[whole + page - 1] in self._copies:
            whole += page
        known = self._namespaces.setdefault(client, set())
        known.add(request.namespace)
        each: list[tuple[str, float | None, str | None]] = []
        # Of what others have computed a client is told only that whole pages of it are there.
        told = [
            i for i in range(found, limit) if self._is_told(path[i], client) or (i < whole and self._is_here(path[i]))
        ]
        start = told[-1] + 1 if told else found
        for place in range(found, end):
            token = self._tokens[path[place]]
            if place >= limit:
                each.append(("required", None, None))
            elif self._cache.disabled:
                each.append(("disabled", None, None))
            elif token.fate == "here" and place < whole:
                each.append(("not_looked_up" if took_over else "not_loaded", None, None))
            elif self._is_told(path[place], client):
                if token.fate in ("here", "page"):
                    each.append(("page", None, None))
                else:
                    each.append((token.fate, now - token.left_at, self._named(token.by, client)))
            else:
                runs = [self._run(client, other, ids, start) for other in known - {request.namespace}] if client else []
                if any(place in run for run in runs):
                    each.append(("namespace", None, None))
                else:
                    each.append(("unseen" if diverged is None or place < diverged else "diverged", None, None))
        return CacheReport(_joined(each, found), diverged)

    def _is_told(self, number: Path, client: str) -> bool:
        return bool(self._tokens[number].fate) and self._tokens[number].client == client

    def _is_here(self, number: Path) -> bool:
        return self._tokens[number].fate == "here"

    def _run(self, client: str, namespace: str, ids: list[int], start: int) -> range:
        """The places from ``start`` on that this client has computed in another namespace, one after the other."""
        place = start
        path = self._path(namespace, ids)
        while (
            place < len(ids) - 1
            and all(self._tokens[number].fate for number in path[: place + 1])
            and self._tokens[path[place]].client == client
        ):
            place += 1
        return range(start, place)

    @staticmethod
    def _named(by: tuple[str, str | None] | None, client: str) -> str | None:
        if by is None or by[1] is None:
            return None if by is None else "running requests"
        return by[1] if by[0] == client else "another client"


def _joined(each: list[tuple[str, float | None, str | None]], start: int) -> tuple[MissedSpan, ...]:
    spans: list[MissedSpan] = []
    place = start
    for (reason, by), group in itertools.groupby(each, key=lambda token: (token[0], token[2])):
        ages = [age for _, age, _ in group]
        known = [age for age in ages if age is not None]
        spans.append(MissedSpan(reason, place, len(ages), min(known) if known else None, by))  # type: ignore[arg-type]
        place += len(ages)
    return tuple(spans)


def _ids_down_to(node: TreeNode) -> list[int]:
    parts: list[list[int]] = []
    while node.parent is not None:
        parts.append(np.frombuffer(node.key, dtype=np.int32).tolist())
        node = node.parent
    return list(itertools.chain(*reversed(parts)))


def _is_hidden(tree: RadixTree, node: TreeNode) -> bool:
    """True for a node that no match finds, and for one that has left the tree."""
    while node.parent is not None:
        if tree.is_hidden(node):
            return True
        node = node.parent
    return node is not tree.root


@contextmanager
def _nothing():
    yield
