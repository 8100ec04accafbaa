"""The curve of one pass, compared with the real radix cache run at each size."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from baton.entrypoints.analyze.analysis import Analysis
from baton.entrypoints.analyze.log.logged_request import LoggedRequest
from baton.entrypoints.analyze.log.prompt_text import id_units
from tests.doubles.cache_rig import CacheRig

SIZES = (256, 512, 768, 1024, 2048, 4096)
LONGEST = 240


Log = list[tuple[str, list[int], list[int]]]


def make_log(seed: int, count: int, page: int = 1, *, repeats: float = 0.0) -> Log:
    """(namespace, prompt, output): shared beginnings, turns that go on, new prompts. Each ends with a whole page.
    repeats: of the requests, those that come twice, with the same output."""
    rng = random.Random(seed)

    def new(length: int) -> list[int]:
        return [rng.randrange(10**6) for _ in range(length)]

    systems = [new(rng.randrange(5, 90)) for _ in range(4)]
    ended: list[list[int]] = [[]]
    log: Log = []
    for _ in range(count):
        kind = rng.random()
        start = rng.choice(ended[-30:]) if kind < 0.45 else rng.choice(systems) if kind < 0.85 else []
        prompt = start[: LONGEST - 80] + new(rng.randrange(1, 40))
        output = new(rng.randrange(1, 24))
        output += new((1 - len(prompt) - len(output)) % page)
        ended.append(prompt + output)
        log.append((rng.choice(["", "salt"]) if kind > 0.45 else "", prompt, output))
        if rng.random() < repeats:
            log.append(log[-1])
    return log


def real_hits(log: Log, size: int, page: int, *, exact: bool) -> int:
    """exact: evict single pages from a leaf, however long it is."""
    rig = CacheRig(size, page, rows=1)
    if exact:
        rig.cache.order._least_rest = page
    hits = 0
    for namespace, prompt, output in log:
        running = rig.start(np.array(prompt, np.int32), namespace)
        hits += running.kv.length
        running.ids = np.array([*prompt, *output], np.int32)
        assert rig.compute(running, len(running.ids) - 1)  # the last token of an output has no KV
        rig.finish(running)
    return hits


def analysed(log: Log, page: int, max_bytes: int = 0) -> Analysis:
    grid = [0, *(size // page for size in SIZES)]
    analysis = Analysis(id_units(page), max_bytes=max_bytes, has_times=False, grid=grid)
    for namespace, prompt, output in log:
        ids = (array("i", prompt).tobytes(), array("i", output).tobytes())
        analysis.add_request(
            LoggedRequest(
                prompt=ids[0],
                prompt_tokens=len(prompt),
                outputs=(ids[1],),
                output_tokens=len(output),
                has_outputs=True,
                namespace=namespace,
            )
        )
    analysis.end_log()
    return analysis


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("seed", [1, 2])
def test_hit_curve_matches_radix_cache_at_each_size(page: int, seed: int) -> None:
    print(f"seed {seed}")
    log = make_log(seed, 250, page)
    curve = analysed(log, page).curve.hits()
    for size, found in zip(SIZES, curve[1:]):
        assert found * page == real_hits(log, size, page, exact=True), size
    assert curve[1] < 0.8 * curve[-1], "the sizes differ in what they find"


@pytest.mark.parametrize("seed", [3, 4])
def test_hit_curve_stays_close_to_default_cache_behaviour(seed: int) -> None:
    """A server gives up a leaf as a whole where less than 1/256 of its pool would be left of it, and computes what is
    asked for again in slots of their own until it finds that it has them."""
    print(f"seed {seed}")
    log = make_log(seed, 400, repeats=0.1)
    prompt_tokens = sum(len(prompt) for _, prompt, _ in log)
    for size, found in zip(SIZES, analysed(log, 1).curve.hits()[1:]):
        assert abs(found - real_hits(log, size, 1, exact=False)) <= 0.02 * prompt_tokens, size


def test_bounded_tree_is_exact_up_to_its_reported_size() -> None:
    log = make_log(4, 600)
    whole = analysed(log, 1)
    bounded = analysed(log, 1, max_bytes=60_000)
    exact = bounded.exact_tokens
    assert exact is not None and whole.exact_tokens is None and SIZES[1] <= exact < whole.tree.live_units
    compared = 0
    for size, found, true in zip(SIZES, bounded.curve.hits()[1:], whole.curve.hits()[1:]):
        assert found == true if size <= exact else found <= true
        compared += size <= exact
    assert compared >= 2
    assert bounded.curve.units < whole.curve.units, "something that was forgotten came back"
    assert bounded.tree.used_bytes <= 60_000


def test_endless_hits_include_forgotten_content() -> None:
    """Thirty documents in turn, and memory for about twenty: none is found in the tree when it comes again."""
    rng = random.Random(5)
    documents = [[rng.randrange(10**6) for _ in range(200)] for _ in range(30)]
    log: Log = [("", documents[number % 30] + [number, 1, 2], [3]) for number in range(300)]
    whole, bounded = analysed(log, 1), analysed(log, 1, max_bytes=30 * 900)
    assert whole.totals.endless_hits == 270 * 200 and bounded.curve.units == 0
    assert bounded.totals.endless_hits == 270 * 192, "in whole chunks of 64 tokens"
    assert bounded.forgotten is not None and 0 < bounded.forgotten.false_share < 1e-6
    foreign = analysed([(str(number), prompt, output) for number, (_, prompt, output) in enumerate(log)], 1, 30 * 900)
    assert foreign.totals.endless_hits == 0, "nothing is shared across namespaces"
