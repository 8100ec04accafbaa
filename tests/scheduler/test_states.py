"""What a model with recurrent states computes again: where states are left, and which give way."""

from __future__ import annotations

import numpy as np
import pytest

from baton.radix.node import StateKind
from baton.radix.node_states import NodeStates, Rank
from baton.scheduler.batch import StopMatch
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import Harness, Outcome
from tests.doubles.specs import make_spec

PAGES = pytest.mark.parametrize("page", [1, 16, 64])


def scene(page: int = 1, states: int = 64, **options) -> Harness:
    return Harness(num_tokens=options.pop("num_tokens", 2048), context=1024, page_size=page, states=states, **options)


def states_of(harness: Harness) -> NodeStates:
    assert harness.cache.states is not None
    return harness.cache.states


def ranks_of(harness: Harness) -> dict[int, Rank]:
    """The rank of each state, by its number of tokens."""
    states = states_of(harness)
    return {node.prefix_len: states.on_device.rank_of(node.state) for node in states.nodes()}


def ask(harness: Harness, rid: str, prompt: list[int], new: int = 8, **more) -> tuple[list[int], int]:
    """The output, which is what it must be, and how many tokens of the prompt were found."""
    harness.add(rid, prompt, new, **more)
    harness.run()
    outcome = harness.outcomes[rid, 0]
    assert outcome.tokens == expected_output(prompt, new, stateful=True)
    assert outcome.request is not None
    return outcome.tokens, outcome.request.found.total


@PAGES
def test_every_turn_of_a_chat_computes_its_own_tokens_only(page) -> None:
    harness, prompt = scene(page, states=8), prompt_of(130)
    said, _ = ask(harness, "t0", prompt)
    for turn in range(1, 10):
        before = [*prompt, *said]
        prompt = [*before, *prompt_of(20, turn)]
        said, found = ask(harness, f"t{turn}", prompt)
        assert found >= len(before) - 1 - page  # the last token of a turn was never computed


@PAGES
def test_an_edit_of_the_last_message_starts_from_the_turn_before(page) -> None:
    harness, first = scene(page), prompt_of(130)
    said, _ = ask(harness, "a", first)
    second = [*first, *said, *prompt_of(40, 1)]
    ask(harness, "b", second)
    edited = [*first, *said, *prompt_of(40, 2)]
    _, found = ask(harness, "c", edited)
    assert found >= len(first) + len(said) - 1 - page


@PAGES
@pytest.mark.parametrize("more", [{}, {"retain_ttl": 0.5}])
@pytest.mark.parametrize("new", [0, 1, 8])
def test_the_third_user_of_a_beginning_finds_it_whole(page, new, more) -> None:
    harness, system = scene(page, chunk=500), prompt_of(128)
    finds = [ask(harness, f"u{user}", [*system, *prompt_of(30, user + 1)], new, **more)[1] for user in range(3)]
    aligned = 128 if page == 64 else 0  # the state at the last whole page of the first prompt
    assert finds == [0, aligned, 128]
    kinds = [node.state_kind for node in states_of(harness).nodes() if node.prefix_len == 128]
    assert kinds == [StateKind.TURN_END if page == 64 and new else StateKind.BRANCH]


@PAGES
@pytest.mark.parametrize("chunk", [7, 64, 500])
@pytest.mark.parametrize("new", [1, 6])
def test_samples_of_one_prompt_compute_it_once(page, chunk, new) -> None:
    harness, prompt = scene(page, chunk=chunk, policy="lpm"), prompt_of(200)
    harness.add("a", prompt, new, n=4)
    harness.run()
    found = [asked.found.total for sample in range(4) if (asked := harness.outcomes["a", sample].request) is not None]
    assert found[0] == 0 and found[1:] == [199 // page * page] * 3
    for sample in range(4):
        assert harness.outcomes["a", sample].tokens == expected_output(prompt, new, stateful=True)


@PAGES
@pytest.mark.parametrize("chunk", [7, 500])
@pytest.mark.parametrize("new", [1, 6])
def test_a_prompt_that_is_sent_again_computes_its_last_token_only(page, chunk, new) -> None:
    harness, prompt = scene(page, chunk=chunk), prompt_of(200)
    finds = [ask(harness, f"a{turn}", prompt, new)[1] for turn in range(3)]
    assert finds == [0, 199 // page * page, 199 // page * page]
    if page == 1:  # else the turn's end may be in the same page
        kinds = {node.prefix_len: node.state_kind for node in states_of(harness).nodes()}
        assert kinds[199] is StateKind.PASSING


@pytest.mark.parametrize("depth", [1, 2])
def test_a_state_for_the_same_prompt_gives_way_to_that_of_the_turn(depth) -> None:
    """The tree and the sequence both name the one at 48 tokens when the one at 64 needs a slot."""
    harness, prompt = scene(16, states=2, depth=depth), prompt_of(60)
    said, _ = ask(harness, "a", prompt, 10)
    _, found = ask(harness, "b", [*prompt, *said, *prompt_of(20, 1)])
    assert found == 64


def test_a_state_for_the_same_prompt_is_left_only_where_none_is_near() -> None:
    """Not behind a point that the client names, nor by a continuation."""
    harness, prompt = scene(), prompt_of(40)
    ask(harness, "a", prompt, 6, state_points=(30,), retain_ttl=100.0)
    assert sorted(node.prefix_len for node in states_of(harness).nodes()) == [30, 45]
    harness.continue_from("a", "b", [1, 2, 3], 6)
    harness.run()
    assert sorted(node.prefix_len for node in states_of(harness).nodes()) == [30, 45, 54]


@PAGES
def test_a_state_is_left_where_the_client_expects_a_later_prompt_to_part(page) -> None:
    """As behind the last message of a chat, where a template drops the thoughts of the answer that followed."""
    harness, prompt = scene(page), prompt_of(192)
    ask(harness, "a", prompt, state_points=(128,))
    _, found = ask(harness, "b", [*prompt[:128], *prompt_of(30, 5)])
    assert found == 128


def find_stop(harness: Harness, begin: int, end: int) -> None:
    """Every output has a stop string in the text of its tokens from ``begin`` to ``end``."""
    forward = harness.model.forward

    def forward_and_search(batch, fault):
        result = forward(batch, fault)
        for row in np.flatnonzero(result.counts).tolist():
            seen = int(batch.output_positions[row]) + int(result.counts[row])
            if seen == end:
                result.stop_matches[row] = StopMatch(0, begin, "")
            elif begin < seen < end:
                result.stop_begins[row] = begin
        return result

    harness.model.forward = forward_and_search  # type: ignore[method-assign]


@PAGES
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("begin", [0, 5, 9])
def test_a_turn_is_continued_where_its_stop_string_was_cut_off(page, depth, begin) -> None:
    harness, prompt = scene(page, depth=depth), prompt_of(126)
    said = expected_output(prompt, begin, stateful=True)
    find_stop(harness, begin, begin + 6)
    harness.add("leased", prompt, 40, retain_ttl=100.0, stop=("a stop",))
    harness.run()
    harness.continue_from("leased", "child", [1, 2, 3], 2)
    harness.run()
    child = harness.outcomes["child", 0].request
    assert child is not None and child.inheritance is not None and child.inheritance.path == "handoff"
    assert child.found.total == len(prompt) + begin
    other = prompt_of(126, 1)
    harness.add("free", other, 40, stop=("a stop",))
    harness.run()
    said = expected_output(other, begin, stateful=True)
    _, found = ask(harness, "next", [*other, *said, 1, 2, 3], 2)
    assert found == (len(other) + begin) // page * page


def test_a_search_for_stop_strings_takes_no_state_from_others() -> None:
    """With a single slot, the state before the text that may begin one is overwritten."""
    harness, prompt = scene(states=1), prompt_of(40)
    find_stop(harness, 2, 30)
    ask(harness, "a", prompt, 20, stop=("a stop",))


@PAGES
@pytest.mark.parametrize("chunk", [50, 500])
def test_a_prompt_that_was_sent_without_output_is_found_by_the_same_prompt(page, chunk) -> None:
    harness, prompt = scene(page, chunk=chunk), prompt_of(140)
    ask(harness, "warm", prompt, 0)
    assert ask(harness, "same", prompt)[1] == 139 // page * page
    assert ask(harness, "longer", [*prompt, 1, 2])[1] == 140 // page * page


def test_a_passed_state_does_not_count_as_used() -> None:
    """What is continued from is; the states above it, which the match only passed, sink."""
    harness = scene(states=8)
    said, _ = ask(harness, "a", prompt_of(40))
    turn = [*prompt_of(40), *said, *prompt_of(30, 1)]
    answer, _ = ask(harness, "b", turn)
    ranks = ranks_of(harness)
    ask(harness, "c", [*turn, *answer, 1, 2, 3])
    now = ranks_of(harness)
    assert now[47] == ranks[47]


@pytest.mark.parametrize("states", [1, 2, 3])
def test_few_states_serve_many_requests(states) -> None:
    harness = scene(states=states, num_tokens=640)
    prompts = {f"r{number}": prompt_of(30 + 7 * number, number) for number in range(8)}
    for rid, prompt in prompts.items():
        harness.add(rid, prompt, 12, retain_ttl=50.0)
    harness.run()
    for rid, prompt in prompts.items():
        assert harness.outcomes[rid, 0].tokens == expected_output(prompt, 12, stateful=True)


def test_no_turn_is_lost_where_all_that_runs_is_retracted() -> None:
    """The search lacks a state beside the prompt that is being computed, which continues in the same turn."""
    harness = scene(states=4, chunk=32)
    harness.add("long", prompt_of(200), 4)
    harness.now += 1
    harness.add("search", prompt_of(8, 1), 6, beam_width=3, priority=1)
    while not harness.scheduler.is_idle:
        assert harness.step()
    assert harness.scheduler.stats().retractions > 0


def test_kv_that_no_state_lies_behind_goes_first() -> None:
    harness = scene(states=8, num_tokens=512)
    said, _ = ask(harness, "old", prompt_of(100))
    harness.add("aborted", prompt_of(100, 1), 8)
    harness.step()
    harness.abort("aborted")  # its chunk is in flight: it has no state
    harness.run()
    ask(harness, "fill", prompt_of(330, 2))
    _, found = ask(harness, "next", [*prompt_of(100), *said, 1])
    assert found == 107


def test_turn_ends_outlive_states_that_requests_only_passed() -> None:
    harness = scene(states=6)
    said, _ = ask(harness, "kept", prompt_of(50))
    conversation = prompt_of(60, 1)
    for turn in range(12):
        answer, _ = ask(harness, f"t{turn}", conversation, 4)
        conversation = [*conversation, *answer, turn]
    _, found = ask(harness, "again", [*prompt_of(50), *said, 1])
    assert found == 57


@pytest.mark.parametrize(("kept", "found"), [(1, 0), (3, 35)])
def test_more_turn_ends_are_kept_where_a_program_asks_for_it(kept, found) -> None:
    harness, prompts = scene(states=4), [prompt_of(30, 1)]
    for turn in range(3):
        spec = make_spec(f"t{turn}", prompts[-1], retain_states=kept)
        harness.outcomes |= {r.key: Outcome(request=r) for r in harness.scheduler.add_request(spec, harness.now)}
        harness.run()
        prompts.append([*prompts[-1], *harness.outcomes[f"t{turn}", 0].tokens, 5])
    for other in range(1):
        ask(harness, f"o{other}", prompt_of(20, 50 + other), 4)
    middle = prompts[1]
    assert ask(harness, "back", [*middle[:-1], 9])[1] >= found


def test_a_handoff_names_the_state_that_the_parent_left() -> None:
    harness = scene(states=8)
    harness.add("a", prompt_of(300), 8, retain_ttl=100.0)
    harness.run()
    (lease,) = harness.scheduler.live_leases()
    assert lease.kv is not None and lease.kv.states.newest is not None
    slot = lease.kv.states.newest.slot
    harness.continue_from("a", "b", [1, 2, 3])
    harness.step()
    assert lease.kv is None
    child = harness.outcomes["b", 0].request
    assert child is not None and child.inheritance is not None and child.inheritance.path == "handoff"
    assert states_of(harness).carries(slot)  # an edit can go back there
    harness.run()
    said = harness.outcomes["a", 0].tokens
    assert harness.outcomes["b", 0].tokens == expected_output([*prompt_of(300), *said, 1, 2, 3], 8, stateful=True)


def test_a_fork_of_a_running_parent_copies_no_state() -> None:
    harness = scene(states=8)
    harness.add("a", prompt_of(60), 20)
    for _ in range(6):
        harness.step()
    held = states_of(harness).slots.held
    harness.continue_from("a", "b", [1, 2], at="now")
    assert states_of(harness).slots.held <= held + 1
    harness.run()
    assert harness.outcomes["a", 0].tokens == expected_output(prompt_of(60), 20, stateful=True)


def test_an_aborted_fork_gives_its_names_back() -> None:
    harness = scene(states=8)
    harness.add("a", prompt_of(60), 8, retain_ttl=100.0)
    harness.run()
    for number in range(5):
        harness.continue_from("a", f"f{number}", [number], keep_parent=True)
        for _ in range(number):
            harness.step()
        harness.abort(f"f{number}")
    harness.run()
    harness.scheduler.release_leases("a")
    slots = states_of(harness).slots
    assert slots.held == len(states_of(harness))


def test_a_state_that_a_step_in_flight_reads_is_not_handed_out() -> None:
    """Beams that part name their parent's state no more once their step is formed. A load from the host could take the
    slot then, and would not wait for the step."""
    harness = scene(states=16, depth=2)
    harness.add("search", prompt_of(20), 6, beam_width=4, n=4)
    harness.add("other", prompt_of(12, 1), 30)
    slots, waited = states_of(harness).slots, 0
    while harness.scheduler.live_requests:
        batch = harness.scheduler.next_batch(harness.now)
        if batch is None or batch.states is None:
            break
        free = set(slots.free_slots().tolist())
        assert not free & set(batch.states.sources.tolist())
        waited += slots.quarantined
        harness.take_ends(harness.scheduler.process_result(harness.model.forward(batch), harness.now))
    assert waited


def test_a_lost_state_waits_for_the_steps_in_flight() -> None:
    harness = scene(states=8)
    harness.add("a", prompt_of(20), 20)
    harness.step()
    slots = states_of(harness).slots
    slots.take()  # its holder is lost
    batch = harness.scheduler.next_batch(harness.now)
    assert batch is not None
    harness.scheduler.self_check(harness.now)
    assert (slots.quarantined, harness.scheduler.stats().states.leaked) == (1, 1)
    harness.scheduler.process_result(harness.model.forward(batch), harness.now)
    assert slots.quarantined == 0
    harness.scheduler.check_invariants()
