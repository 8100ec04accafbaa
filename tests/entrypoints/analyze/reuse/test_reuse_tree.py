from __future__ import annotations

import random
from collections import OrderedDict

from baton.entrypoints.analyze.reuse.reuse_tree import NODE_BYTES, Node, ReuseTree


def distances(runs: list[tuple[int, int]]) -> list[int]:
    return [above + number for above, units in runs for number in range(1, units + 1)]


class Stack:
    """The slow twin: a list of prefixes, the last one used first."""

    def __init__(self) -> None:
        self.order: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self.used_at: dict[tuple[str, bytes], int] = {}
        self.now = 0

    def access(self, namespace: str, key: bytes) -> list[int]:
        prefixes = [(namespace, key[: end + 1]) for end in range(len(key))]
        places = {prefix: place for place, prefix in enumerate(reversed(self.order), 1)}
        found = []
        for prefix in prefixes:
            if prefix not in places:
                break
            found.append(places[prefix])
        for prefix in reversed(prefixes):
            self.order.pop(prefix, None)
            self.order[prefix] = None
            self.used_at[prefix] = self.now
        self.now += 1
        return found


def random_keys(seed: int, count: int, length: int = 12) -> list[tuple[str, bytes]]:
    rng = random.Random(seed)
    return [
        (
            rng.choice("ab"),
            bytes(rng.choice(b"xyz" if rng.random() < 0.3 else b"x") for _ in range(rng.randint(1, length))),
        )
        for _ in range(count)
    ]


def check(tree: ReuseTree) -> None:
    nodes = list(tree.nodes())
    assert len(nodes) == tree.num_nodes
    assert sum(len(node.key) for node in nodes) == tree.key_bytes == tree.live_units * tree.unit_bytes
    ends = {(time, id(node)) for time, node in tree._oldest}
    for node in nodes:
        parent = node.parent
        assert parent is not None and parent.children is not None and parent.children[node.name] is node
        assert len(node.key) % tree.unit_bytes == 0 and node.key
        assert node.start == parent.start + len(parent.key) // tree.unit_bytes
        if parent.parent is not None:
            assert parent.last_use >= node.last_use and parent.uses >= node.uses
        if node.children is None:
            assert (node.last_use, id(node)) in ends, "each leaf can be found to be forgotten"


def test_reuse_distances_match_lru_stack() -> None:
    for seed in range(8):
        print(f"seed {seed}")
        tree, stack = ReuseTree(1), Stack()
        for namespace, key in random_keys(seed, 150):
            access = tree.access(namespace, key)
            assert distances(access.runs) == stack.access(namespace, key)
            assert access.known == len(distances(access.runs))
            check(tree)
        assert tree.live_units == len(stack.order)


def test_renumbering_times_preserves_distances() -> None:
    tree, stack, marks = ReuseTree(1, times=64), Stack(), []
    for number, (namespace, key) in enumerate(random_keys(5, 1500, 6)):
        if number % 50 == 0:
            marks.append((tree.mark(), stack.now))
        assert distances(tree.access(namespace, key).runs) == stack.access(namespace, key)
        check(tree)
    assert stack.now > tree._recency.capacity, "they were numbered anew"
    for mark, since in marks:
        assert tree.used_since(mark) == sum(at >= since for at in stack.used_at.values())


def test_least_recently_used_paths_are_forgotten_first() -> None:
    bound = 40 * NODE_BYTES
    tree, stack = ReuseTree(1, bound), Stack()
    forgot = 0
    for namespace, key in random_keys(6, 400, 30):
        distances_of_all = stack.access(namespace, key)
        found = distances(tree.access(namespace, key).runs)
        exact = tree.exact_units
        if exact is None:
            assert found == distances_of_all
        else:
            assert [place for place in distances_of_all if place <= exact] == [
                place for place in found if place <= exact
            ]
        for _, path, start in tree.forget_oldest():
            assert 0 <= start < len(path)
            forgot += 1
        assert tree.used_bytes <= bound
        check(tree)
    assert forgot > 20 and tree.exact_units is not None and tree.exact_units > 20


def test_forgotten_path_is_returned_with_namespace_and_full_key() -> None:
    tree = ReuseTree(2, 3 * NODE_BYTES)
    told: list[tuple[str, bytes, int]] = []
    for key in (b"aabbcc", b"aabbdd", b"eeff", b"gg"):
        tree.access("s", key)
        told += tree.forget_oldest()
    assert told == [("s", b"aabbcc", 2), ("s", b"aabbdd", 0)]


def test_oldest_queue_stays_bounded() -> None:
    tree = ReuseTree(1)
    for _ in range(5000):
        tree.access("", b"abc")
    assert len(tree._oldest) <= 1026 and tree.num_nodes == 1


def test_node_memory_matches_node_bytes() -> None:
    """NODE_BYTES is what a node takes beside its key: the limit of memory depends on it."""
    import tracemalloc

    keys = [random.Random(number).randbytes(40) for number in range(4000)]
    keys += [key[:20] + bytes(reversed(key[20:])) for key in keys]
    tracemalloc.start()
    try:
        tree = ReuseTree(4, times=1 << 14)
        before = tracemalloc.get_traced_memory()[0]
        for key in keys:
            tree.access("", key)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert tree.num_nodes == 12_000 and 0.6 < taken / tree.used_bytes < 1.1


def test_split_node_reports_key_uses_and_start() -> None:
    tree = ReuseTree(1)
    tree.access("", b"abcd")
    access = tree.access("", b"abxy")
    upper: Node = access.path[0]
    assert (upper.key, upper.uses, upper.start) == (b"ab", 2, 0)
    assert (access.last.key, access.last.start, access.known) == (b"xy", 2, 2)
