"""Where requests of a log leave recurrent states, and how many of them pools of several sizes still have."""

from __future__ import annotations

import random
from array import array

import pytest

from baton.entrypoints.analyze.analysis import Analysis
from baton.entrypoints.analyze.log.logged_request import LoggedRequest
from baton.entrypoints.analyze.log.prompt_text import id_units
from baton.entrypoints.analyze.reuse.reuse_tree import ReuseTree
from baton.entrypoints.analyze.reuse.state_pools import StatePools, state_sizes
from baton.entrypoints.analyze.reuse.tree_node import Node, StateMarks
from baton.entrypoints.analyze.reuse.turns import end_of
from tests.doubles.scheduler_harness import Harness

TOLERANCE = 0.04
"""Share of the prompt tokens by which the pools may differ from the server's."""


def logged(prompt: list[int], output: list[int], **fields) -> LoggedRequest:
    return LoggedRequest(
        prompt=array("i", prompt).tobytes(),
        prompt_tokens=len(prompt),
        outputs=(array("i", output).tobytes(),),
        output_tokens=len(output),
        has_outputs=True,
        **fields,
    )


def analysed(requests: list[LoggedRequest], page: int = 1, max_bytes: int = 0) -> StatePools:
    analysis = Analysis(id_units(page), max_bytes=max_bytes, has_times=False, has_states=True)
    for request in requests:
        analysis.add_request(request)
    assert analysis.states is not None
    return analysis.states


def served(seed: int, states: int, page: int) -> tuple[float, list[LoggedRequest]]:
    """Ten chats of two kinds with edits, one request at a time, on the server's scheduler, tree and states. Returns the
    share of the prompt tokens that it found, and its log."""
    harness, rng = (
        Harness(num_tokens=20_000, context=1024, page_size=page, states=states, chunk=2000),
        random.Random(seed),
    )

    def new(count: int) -> list[int]:
        return [rng.randrange(50_000) for _ in range(count)]

    systems = [new(40), new(12)]
    chats = [list(systems[chat % 2]) for chat in range(10)]
    order = [chat for chat in range(10) for _ in range(6)]
    rng.shuffle(order)
    requests, asked, found = [], 0, 0
    for number, chat in enumerate(order):
        before = chats[chat]
        if rng.random() < 0.15 and len(before) > 70:
            before = before[: rng.randrange(40, len(before))]
        prompt = before + new(rng.randint(3, 20))
        harness.add(str(number), prompt, rng.randint(2, 12))
        harness.run()
        outcome = harness.outcomes[str(number), 0]
        assert outcome.request is not None
        asked, found = asked + len(prompt), found + outcome.request.found.total
        requests.append(logged(prompt, outcome.tokens))
        chats[chat] = prompt + outcome.tokens
    return found / asked, requests


@pytest.mark.parametrize(
    ("seed", "page", "size"),
    [
        (1, 1, 8),
        (1, 16, 16),
        *(pytest.param(seed, 1, size, marks=pytest.mark.slow) for seed in (2, 3) for size in (4, 11, 16, 64)),
    ],
)
def test_pools_find_what_the_server_finds(seed: int, page: int, size: int) -> None:
    """One slot beyond the size is that of the running request; pages longer than a token take two more."""
    found, requests = served(seed, size + (1 if page == 1 else 3), page)
    pools = analysed(requests, page)
    mine = pools.found_units[pools.sizes.index(size)] * page / sum(request.prompt_tokens for request in requests)
    assert found > 0.25 and mine == pytest.approx(found, abs=TOLERANCE)


def test_pools_of_several_sizes_do_not_affect_each_other() -> None:
    rng, requests = random.Random(5), []
    chats: list[list[int]] = [[kind] * 9 for kind in (1, 2, 3) for _ in range(4)]
    for _ in range(150):
        chat = rng.randrange(len(chats))
        prompt = [*chats[chat][: rng.choice((9, 1000, 1000))], rng.randrange(10**6), chat]
        output = [rng.randrange(10**6) for _ in range(rng.randint(1, 9))]
        requests.append(logged(prompt, output))
        chats[chat] = prompt + output
    together = analysed(requests)
    assert together.found_units == sorted(together.found_units) and together.turns > 50
    for size in (4, 8, 16):
        analysis = Analysis(id_units(1), max_bytes=0, has_times=False, has_states=True)
        analysis.states = alone = StatePools(analysis.tree, [size])
        for request in requests:
            analysis.add_request(request)
        place = together.sizes.index(size)
        assert alone.found_units == [together.found_units[place], together.found_units[-1]]
        assert alone.found_turns == [together.found_turns[place], together.found_turns[-1]]


def conversation(name: int, turns: int) -> list[LoggedRequest]:
    requests, history = [], [name] * 20
    for turn in range(turns):
        prompt, output = [*history, *[1000 * name + turn] * 3], [2000 * name + turn] * 5
        requests.append(logged(prompt, output))
        history = prompt + output
    return requests


def test_newest_turn_outlasts_all_earlier_ones() -> None:
    """Two conversations of many turns fit into the smallest pool: each needs one state, and the rest gives way."""
    first, second = conversation(1, 12), conversation(2, 12)
    pools = analysed([each for both in zip(first, second) for each in both])
    assert pools.sizes[0] == 4 and pools.turns == 22
    assert pools.found_turns[0] == pools.found_turns[-1] == 22
    assert pools.left == 2 * 12 * 2  # at the end of each turn, and before the last token of each prompt


def test_more_conversations_than_states_find_nothing() -> None:
    turns = zip(*(conversation(name, 6) for name in range(1, 9)))
    pools = analysed([each for turn in turns for each in turn])
    assert pools.found_turns[0] == 0 and pools.found_turns[pools.sizes.index(8)] == pools.turns == 40


def test_return_to_an_earlier_turn_is_counted() -> None:
    requests = conversation(1, 5)
    edited = logged([1] * 20 + [1000] * 3 + [2000] * 5 + [77] * 3, [5, 6])
    pools = analysed([*requests, edited])
    assert pools.older_turns == 1 and pools.found_units[-1] - analysed(requests).found_units[-1] == 27
    assert analysed([*requests, edited, edited]).older_turns == 1  # several continue there now


def test_third_user_of_a_beginning_finds_it_whole() -> None:
    system = list(range(100, 150))
    users = [logged([*system, user, user], [user] * 3) for user in range(3)]
    assert analysed(users[:2]).found_units[-1] == 0
    assert analysed(users).found_units[-1] == 50


def test_named_points_take_the_place_of_the_prompts_end() -> None:
    first = logged(list(range(50)), [7, 8], state_points=(30, 10**9))
    edited = logged([*range(40), 99], [7, 8])
    again = logged([*range(50)], [7, 8])
    assert analysed([first, edited]).found_units[-1] == 30
    assert analysed([first]).left == 2
    assert analysed([first, again]).found_units[-1] == 30
    plain = logged(list(range(50)), [7, 8])
    assert analysed([plain, again]).found_units[-1] == 49
    continued = logged(list(range(50)), [7, 8], continues=True)
    assert analysed([continued, again]).found_units[-1] == 0


def test_states_at_named_points_go_after_others() -> None:
    place = state_sizes().index(8)
    others = [logged([number] * 10, [3, 4], is_aborted=True) for number in range(50, 250)]
    edited = logged([*range(30), 99, 99], [7])

    def found_by_edit(*points: int) -> int:
        first = logged(list(range(50)), [7, 8], state_points=points, is_aborted=True)
        found = [analysed(requests).found_units[place] for requests in ([first, *others], [first, *others, edited])]
        return found[1] - found[0]

    assert found_by_edit(20) == 20 and found_by_edit() == 0


def test_aborted_requests_keep_nothing_before_others() -> None:
    """The states of aborted requests go before those of turns."""
    kept = conversation(1, 2)
    passing = [logged([number] * 10, [3, 4], is_aborted=True) for number in range(50, 60)]
    pools = analysed([kept[0], *passing, kept[1]])
    assert pools.found_turns[0] == 1
    ended = [logged([number] * 10, [3, 4, 5, 6, 7, 8, 9, 9]) for number in range(50, 60)]
    assert analysed([kept[0], *ended, kept[1]]).found_turns[0] == 0


def test_more_turns_are_kept_where_requests_ask() -> None:
    def chat(kept: int) -> list[LoggedRequest]:
        requests = conversation(1, 4)
        for request in requests:
            request.retain_states = kept
        others = [logged([number] * 10, [3, 4], is_aborted=True) for number in range(50, 60)]
        back = [1] * 20 + [1000] * 3 + [2000] * 5 + [1001] * 3 + [2001] * 5 + [77] * 3
        return [*requests, *others, logged(back, [5])]

    place = state_sizes().index(4)
    found = [analysed(chat(kept)).found_units[place] for kept in (1, 3)]
    assert found[1] - found[0] == 35


def test_turns_before_a_fork_stay_kept_while_its_branches_grow() -> None:
    place = state_sizes().index(11)
    requests = conversation(1, 2)
    fork = [1] * 20 + [1000] * 3 + [2000] * 5 + [1001] * 3 + [2001] * 5
    branches = {3: fork, 4: fork}
    for turn in range(4):
        for branch, history in branches.items():
            prompt, output = [*history, *[1000 * branch + turn] * 3], [2000 * branch + turn] * 5
            requests.append(logged(prompt, output))
            branches[branch] = prompt + output
    for request in requests:
        request.retain_states = 3
    others = [logged([number] * 10, [3, 4], is_aborted=True) for number in range(50, 70)]
    back = logged([1] * 20 + [1000] * 3 + [2000] * 5 + [77] * 3, [5])
    before = analysed([*requests, *others]).found_units[place]
    assert analysed([*requests, *others, back]).found_units[place] - before == 27


def test_end_of_what_several_continue_is_kept() -> None:
    """A prompt's end that need not be kept becomes a branch once a second output continues it."""
    place = state_sizes().index(8)
    first, user = logged([1] * 30, [2, 3], is_aborted=True), logged([1] * 29 + [5] * 9, [5] * 3)
    others = [logged([number] * 10, [3, 4], is_aborted=True) for number in range(50, 250)]
    third = logged([1] * 29 + [7] * 9, [5])

    def found_by_third(*before: LoggedRequest) -> int:
        found = [analysed(requests).found_units[place] for requests in ([*before, *others], [*before, *others, third])]
        return found[1] - found[0]

    assert found_by_third(first, user) == 29 and found_by_third(first) == 0


def test_cost_of_a_state_counts_what_was_evicted_above_it() -> None:
    """Each turn ends shortly behind another state. When that is gone, the end of the long prompt costs most."""
    long = logged([1] * 100, [2] * 5)
    short = [logged([number] * 30, [3] * 5) for number in range(50, 58)]
    again = logged([1] * 100 + [2] * 5 + [9] * 3, [4])
    assert analysed([long, *short, again]).found_turns[0] == 1


def test_states_leave_with_the_nodes_that_the_tree_forgets() -> None:
    requests = [logged([name] * 600, [name, 1, 2]) for name in range(500)]
    analysis = Analysis(id_units(1), max_bytes=100_000, has_times=False, has_states=True)
    for request in [*requests, requests[-1]]:
        analysis.add_request(request)
    assert analysis.states is not None and analysis.exact_tokens is not None
    assert analysis.states.found_units[-1] == 599
    for node in analysis.tree.nodes():
        assert_marks_add_up(node, len(analysis.states.sizes) + 1)


def assert_marks_add_up(node: Node, sizes: int) -> None:
    marks, children = node.states or StateMarks(), list((node.children or {}).values())
    for bit in range(sizes):
        below = sum((child.states.any if child.states else 0) >> bit & 1 for child in children)
        assert (marks.below >> bit & 1, marks.many >> bit & 1) == (below > 0, below > 1), (node.key, bit)
    assert not (marks.turn | marks.branch) & ~marks.carried and not marks.turn & marks.branch


@pytest.mark.parametrize("seed", range(3))
def test_marks_of_random_logs_add_up(seed: int) -> None:
    rng = random.Random(seed)
    analysis = Analysis(id_units(1), max_bytes=rng.choice((0, 30_000)), has_times=False, has_states=True)
    for _ in range(150):
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
        request = logged(prompt, [rng.randrange(2) for _ in range(rng.randint(1, 5))])
        request.state_points = tuple(rng.sample(range(16), rng.choice((0, 0, 2))))
        analysis.add_request(request)
    assert analysis.states is not None
    for node in analysis.tree.nodes():
        assert_marks_add_up(node, len(analysis.states.sizes) + 1)
    for bit, pool in enumerate(analysis.states._pools[: analysis.states._followed]):
        carried = sum((node.states.carried >> bit & 1) for node in analysis.tree.nodes() if node.states is not None)
        assert carried <= pool.count <= pool.size + 1


def test_paths_are_cut_at_whole_units() -> None:
    tree = ReuseTree(4)
    last = tree.access("", array("i", range(20)).tobytes()).last
    place = tree.cut_path(last, 7)
    assert end_of(place, 4) == 7 and end_of(last, 4) == 20 and last.parent is place
    assert (
        tree.cut_path(last, 7) is place and tree.cut_path(last, 20) is last and end_of(tree.cut_path(last, 3), 4) == 3
    )
    assert tree.access("", array("i", range(20)).tobytes()).runs == [(0, 3), (3, 4), (7, 13)]
