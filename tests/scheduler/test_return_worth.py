"""Worth follows what was learned of returns: whose lease gives way, to whom, and when."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from baton.radix.lease import Lease
from baton.scheduler.jobs.calls import ToolCall
from baton.scheduler.jobs.kept_turn import KeptTurn, Worth
from baton.scheduler.jobs.returns import PRIOR_SHARE, TurnKind
from baton.scheduler.pins import PinManager
from baton.scheduler.policies.job_policies import MAX_PIN_S
from baton.scheduler.policies.registry import PINNING, POLICIES
from tests.doubles.scheduler_harness import Harness

LS = (ToolCall("ls", "ls -l"),)
FILL_S = 10.0


def harness(**more: Any) -> Harness:
    scene = Harness(**{"num_tokens": 1024, "leases": 8, "policy": "handoff", "lease_protection": FILL_S, **more})
    scene.turn_s = 0.01
    return scene


def pins_of(scene: Harness) -> PinManager:
    return scene.scheduler._pins


def learn_user(scene: Harness, seconds: list[float]) -> None:
    for each in seconds:
        pins_of(scene).times.record_duration((), each)


def learn_openings(scene: Harness, client: str, continued: int, ended: int) -> None:
    for number in range(ended):
        pins_of(scene)._returns.record_turn(client, TurnKind.OPENING, continued=number < continued)


def prompt(number: int, length: int = 70) -> list[int]:
    return list(range(1000 * number + 1, 1000 * number + length + 1))


def chat(
    scene: Harness,
    rid: str,
    ids: list[int],
    calls: tuple[ToolCall, ...] | None = (),
    *,
    job: str | None = None,
    **more: Any,
) -> list[int]:
    """A turn of a plain chat, to its end, and what it called, if that is known. Returns prompt and output."""
    scene.add(
        rid,
        ids,
        4,
        job_id=job or f"chat-{rid}",
        **{"retain_ttl": 100.0, "unasked": True, "default_lease": True, **more},
    )
    scene.run()
    if calls is not None:
        scene.scheduler.record_tool_calls(rid, 0, calls, scene.now)
    return ids + scene.outcomes[rid, 0].tokens


def pass_time(scene: Harness, seconds: float) -> None:
    scene.now += seconds
    scene.step()


def leases(scene: Harness) -> dict[str, Lease]:
    """Live ones, by the rid of their turn."""
    return {rid: lease for lease, (rid, _) in scene.scheduler.named_leases().items()}


def kept(scene: Harness, rid: str) -> KeptTurn:
    owner = leases(scene)[rid].owner
    assert isinstance(owner, KeptTurn)
    return owner


def breaks_for_newcomer(scene: Harness, rid: str) -> bool:
    """Does the lease of a turn break for a request that arrives now, beside one that runs?"""
    newcomer = scene.outcomes[rid, 0].request
    assert newcomer is not None
    return scene.scheduler._policy.may_break_for(newcomer, leases(scene)[rid], scene.now)


def next_to_break(scene: Harness) -> str:
    first = scene.scheduler._leases.least_valuable(scene.now)
    return next(rid for rid, lease in leases(scene).items() if lease is first)


# -- first turns -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_first_turn_that_called_a_tool_counts_as_asked_for(policy: str) -> None:
    scene = harness(policy=policy)
    chat(scene, "agent", prompt(1), LS)
    chat(scene, "one-shot", prompt(2))
    assert kept(scene, "agent").worth is Worth.ASKED_FOR and kept(scene, "one-shot").worth is Worth.FIRST_TURN
    assert next_to_break(scene) == "one-shot"
    assert breaks_for_newcomer(scene, "one-shot") and not breaks_for_newcomer(scene, "agent")


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_newcomers_wait_until_calls_of_first_turn_are_known(policy: str) -> None:
    """Where tools are waited for. It takes milliseconds, and tells an agent from a one-shot."""
    scene = harness(policy=policy)
    chat(scene, "new", prompt(1), None)
    assert breaks_for_newcomer(scene, "new") is (policy not in PINNING)
    scene.now += 1.1  # no parser reads it
    assert breaks_for_newcomer(scene, "new")


def test_first_turns_of_client_that_continues_them_are_kept() -> None:
    scene = harness()
    learn_openings(scene, "talks", 18, 20)
    learn_openings(scene, "asks", 2, 20)
    for client in ("talks", "asks", "new"):
        chat(scene, client, prompt(ord(client[0])), client=client)
    worth = {client: kept(scene, client).worth for client in ("talks", "asks", "new")}
    assert worth == {"talks": Worth.ASKED_FOR, "asks": Worth.FIRST_TURN, "new": Worth.FIRST_TURN}
    assert not breaks_for_newcomer(scene, "talks") and breaks_for_newcomer(scene, "asks")


def test_share_of_continued_openings_is_learned() -> None:
    scene = harness(num_tokens=4096, leases=64)
    times = pins_of(scene).times
    said = {rid: chat(scene, rid, prompt(number), client="c") for number, rid in enumerate("abcdef")}
    for rid in "abc":
        chat(scene, f"{rid}2", [*said[rid], 7], job=f"chat-{rid}", client="c")
    assert counts(scene, TurnKind.OPENING) == (3, 3)
    chat(scene, "tool", prompt(20), LS, client="c")
    chat(scene, "named", prompt(21), job="mine", unasked=False, client="c")
    chat(scene, "unread", prompt(22), None, client="c")
    assert len(times.history.durations_of("")) == 3
    pass_time(scene, MAX_PIN_S + 1)
    assert counts(scene, TurnKind.OPENING) == (6, 3), "d, e and f"
    assert counts(scene, TurnKind.TALK) == (3, 0), "a2, b2 and c2"
    assert counts(scene, TurnKind.NAMED) == (1, 0), "a first turn, too"
    users = times.history.durations_of("").tolist()
    assert users[3:] == [MAX_PIN_S] * 3, "the same three; not the first turns that were never continued"
    assert times.history.durations_of("ls").tolist() == [MAX_PIN_S]
    chat(scene, "d2", [*said["d"], 7], job="chat-d", client="c")
    assert counts(scene, TurnKind.OPENING) == (6, 4), "corrected"


def counts(scene: Harness, kind: TurnKind, client: str = "c") -> tuple[float, float]:
    """(turns that have counted, those of them that were continued)"""
    found = pins_of(scene)._returns._by_client[client][kind]
    return found.ended, found.continued


def test_openings_that_are_forgotten_count_as_not_continued() -> None:
    scene = harness(max_jobs=4)
    for number in range(10):
        chat(scene, f"one{number}", prompt(number), client="c")
    assert counts(scene, TurnKind.OPENING) == (6, 0)
    assert pins_of(scene)._returns.share_continued("", TurnKind.OPENING) < PRIOR_SHARE[TurnKind.OPENING]


# -- agents that have answered -----------------------------------------------------------------------------------------


def agent(scene: Harness, rid: str, number: int, calls: tuple[ToolCall, ...] | None = (), **more: Any) -> list[int]:
    """An agent that calls a tool in its first turn and, unless said otherwise, answers in the second."""
    job = more.pop("job", f"chat-{rid}")
    said = chat(scene, f"{rid}-call", prompt(number), LS, job=job, **more)
    return chat(scene, rid, [*said, 7], calls, job=job, **more)


def learn_answers(scene: Harness, continued: int, ended: int, client: str = "") -> None:
    for number in range(ended):
        pins_of(scene)._returns.record_turn(client, TurnKind.ANSWER, continued=number < continued)


def found(scene: Harness, ids: list[int]) -> int:
    return scene.cache.match_len("", np.array(ids, dtype=np.int32))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_answers_of_agents_that_never_return_are_given_up(policy: str) -> None:
    """The first five are kept, and overdue after 20 s. Where jobs are retired, the next one's KV is evicted first."""
    scene = harness(policy=policy, num_tokens=4096, leases=64)
    for number in range(5):
        agent(scene, f"agent{number}", number)
        assert kept(scene, f"agent{number}").worth is Worth.RETURNED
    pass_time(scene, 20.1)
    assert counts(scene, TurnKind.ANSWER, "") == (5, 0)
    old = chat(scene, "old", prompt(8))
    scene.scheduler.release_leases("old")
    over = agent(scene, "over", 9)
    assert "over" not in leases(scene)
    scene.cache.evict(10)
    victim, spared = (over, old) if scene.scheduler._policy.retires_jobs else (old, over)
    assert found(scene, victim) < len(victim) - 10 and found(scene, spared) >= len(spared) - 1


def test_agent_that_returns_after_all_is_corrected() -> None:
    scene = harness(num_tokens=4096, leases=64)
    said = [agent(scene, f"agent{number}", number) for number in range(5)]
    pass_time(scene, 20.1)
    assert pins_of(scene)._returns.share_continued("", TurnKind.ANSWER) < 0.1
    for number in range(3):
        chat(scene, f"back{number}", [*said[number], 7], job=f"chat-agent{number}")
    assert counts(scene, TurnKind.ANSWER, "") == (5, 3)
    agent(scene, "kept", 9)
    assert kept(scene, "kept").worth is Worth.RETURNED


def test_first_return_of_a_new_client_counts_for_more_than_those_of_all_others() -> None:
    """Where no other client ever returns, a new one's answers are worth less, and that of one that returned is not."""
    scene = harness(num_tokens=4096, leases=64)
    learn_answers(scene, 0, 60, client="others")
    said = agent(scene, "first", 1, client="new")
    assert kept(scene, "first").worth is Worth.FIRST_TURN
    said = chat(scene, "back", [*said, 7], job="chat-first", client="new")
    assert kept(scene, "back").worth is Worth.FIRST_TURN
    chat(scene, "back again", [*said, 7], job="chat-first", client="new")
    assert kept(scene, "back again").worth is Worth.RETURNED
    agent(scene, "theirs", 2, client="others")
    assert "theirs" not in leases(scene)


def test_overdue_follows_the_times_of_those_that_returned() -> None:
    scene = harness()
    learn_user(scene, [50.0] * 9 + [80.0] + [MAX_PIN_S] * 5)
    agent(scene, "a", 1)
    pass_time(scene, 49.0)
    assert "" not in pins_of(scene)._returns._by_client
    pass_time(scene, 1.1)
    assert counts(scene, TurnKind.ANSWER, "") == (1, 0)
    pass_time(scene, MAX_PIN_S)
    assert counts(scene, TurnKind.ANSWER, "") == (1, 0), "it counts once"


@pytest.mark.parametrize("unread", [False, True], ids=["read", "unread"])
@pytest.mark.parametrize(
    ("why", "fields"),
    [("calls a tool", {}), ("asked for", {"default_lease": False}), ("default", {})],
)
def test_only_answers_are_given_up(why: str, fields: dict[str, Any], unread: bool) -> None:
    """Not what calls a tool, or has not been read, and not what the client itself asked to keep."""
    scene = harness()
    learn_answers(scene, 0, 50)
    calls = None if unread else LS if why == "calls a tool" else ()
    agent(scene, "a", 1, calls, **fields)
    assert ("a" in leases(scene)) is (unread or why != "default")


def test_work_begins_anew_when_the_user_writes_again() -> None:
    """After an answer; not with what a tool returns, nor for a subagent while its parent works."""
    scene = harness()

    def asked(rid: str) -> str:
        job = scene.scheduler._pins._table.get_job("", rid)
        assert job is not None
        serials = {each.request.serial: rid for (rid, _), each in scene.outcomes.items() if each.request is not None}
        return serials[job.asked[1]]

    said = chat(scene, "a", prompt(1), LS, job="chat-a")
    chat(scene, "child", prompt(3), job="child", parent_job_id="chat-a")
    said = chat(scene, "b", [*said, 7], job="chat-a")
    assert asked("chat-a") == "a"
    chat(scene, "c", [*said, 8], LS, job="chat-a")
    assert asked("chat-a") == "c"
    chat(scene, "child again", prompt(4), job="child")
    assert asked("child") == "a"


def test_first_turn_is_never_given_up() -> None:
    """However few are continued: many of them may share a prompt."""
    scene = harness()
    learn_openings(scene, "", 0, 200)
    chat(scene, "one", prompt(1))
    assert kept(scene, "one").worth is Worth.FIRST_TURN


@pytest.mark.parametrize("kind", [TurnKind.ANSWER, TurnKind.TALK])
def test_turn_is_given_up_only_by_what_the_clients_own_turns_show(kind: TurnKind) -> None:
    scene = harness(num_tokens=4096, leases=64)
    for _ in range(200):
        pins_of(scene)._returns.record_turn("bob", kind, continued=False)
    for client in ("alice", "bob"):
        calls = LS if kind is TurnKind.ANSWER else ()
        said = chat(scene, client, prompt(ord(client[0])), calls, client=client)
        chat(scene, f"{client}2", [*said, 7], job=f"chat-{client}", client=client)
    assert "alice2" in leases(scene) and "bob2" not in leases(scene)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_flood_of_named_one_shots_leaves_other_clients_turns_their_worth(policy: str) -> None:
    """Nor does it cost the client's own conversations, named or not, more than the worth of a plain first turn."""
    scene = harness(policy=policy, num_tokens=16_384, leases=256)
    for number in range(100):
        chat(scene, f"one{number}", prompt(number, 20), job=f"named {number}", unasked=False, client="bob")
    pass_time(scene, 21.0)
    assert counts(scene, TurnKind.NAMED, "bob") == (100, 0)
    worth: dict[str, list[Worth]] = {}
    for client in ("alice", "bob"):
        for number, name in enumerate(("named", "plain")):
            rid = f"{client} {name}"
            said = chat(scene, rid, prompt(200 + number), job=rid, unasked=name == "plain", client=client)
            worth.setdefault(rid, []).append(kept(scene, rid).worth)
            chat(scene, f"{rid} 2", [*said, 7], job=rid, client=client)
            worth[rid].append(kept(scene, f"{rid} 2").worth)
    returned = Worth.RETURNED
    assert worth == {
        "alice named": [Worth.ASKED_FOR, returned],
        "alice plain": [Worth.FIRST_TURN, returned],
        "bob named": [Worth.FIRST_TURN, returned],
        "bob plain": [Worth.FIRST_TURN, returned],
    }


def test_name_makes_no_turn_worth_less() -> None:
    """The client continues its plain conversations, but none of those that it names."""
    scene = harness()
    learn_openings(scene, "c", 18, 20)
    for _ in range(50):
        pins_of(scene)._returns.record_turn("c", TurnKind.NAMED, continued=False)
    chat(scene, "plain", prompt(1), client="c")
    chat(scene, "named", prompt(2), job="mine", unasked=False, client="c")
    assert kept(scene, "plain").worth is kept(scene, "named").worth is Worth.ASKED_FOR


def test_answer_is_kept_while_other_work_of_its_job_runs() -> None:
    scene = harness()
    learn_answers(scene, 0, 50)
    said = chat(scene, "call", prompt(1), LS, job="chat-a")
    for rid, tokens in (("a", 4), ("other", 100)):
        scene.add(rid, [*said, 7], tokens, job_id="chat-a", retain_ttl=100.0, unasked=True, default_lease=True)
    while ("a", 0) not in scene.scheduler.named_leases().values():
        scene.step()
    scene.scheduler.record_tool_calls("a", 0, (), scene.now)
    assert "a" in leases(scene)
    scene.run()
    scene.scheduler.record_tool_calls("other", 0, (), scene.now)
    assert "other" not in leases(scene)


def test_claimed_answer_is_kept_for_the_request_that_claimed_it() -> None:
    scene = harness()
    learn_answers(scene, 0, 50)
    agent(scene, "a", 1, None)
    scene.scheduler._leases.claim(leases(scene)["a"], scene.now)
    scene.scheduler.record_tool_calls("a", 0, (), scene.now)
    assert "a" in leases(scene)


def test_records_of_overdue_jobs_hold_no_node() -> None:
    """A node that has been evicted would keep its tokens in memory."""
    scene = harness(leases=1, num_tokens=4096)
    chat(scene, "holder", prompt(2), LS, job="mine", retain_ttl=1000.0, default_lease=False)
    chat(scene, "refused", prompt(1), None)
    step = pins_of(scene).find_step("refused", 0)
    assert step is not None and step.is_refused and step.node is not None
    pass_time(scene, 21.0)
    assert step.node is None


def test_answer_without_a_lease_is_retired_too() -> None:
    """There was no room for its lease: its KV is evicted before older KV that may be used again."""
    scene = harness(leases=1, num_tokens=4096)
    learn_answers(scene, 0, 50)
    old = chat(scene, "old", prompt(5))
    scene.scheduler.release_leases("old")
    job = "chat-a"
    said = chat(scene, "a-call", prompt(1), LS, job=job)
    chat(scene, "holder", prompt(2), LS, job="mine", unasked=False, retain_ttl=1000.0)
    over = chat(scene, "a", [*said, 7], (), job=job)
    scene.cache.evict(10)
    assert found(scene, over) < len(over) - 10 and found(scene, old) >= len(old) - 1


# -- conversations that stay away --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_conversation_away_longer_than_users_ever_stay_loses_to_fresh_ones(policy: str) -> None:
    scene = harness(policy=policy)
    learn_user(scene, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    said = chat(scene, "a", prompt(1))
    chat(scene, "back", [*said, 7], job="chat-a")
    pass_time(scene, 7.0)
    chat(scene, "fresh", prompt(2))
    assert kept(scene, "back").worth is Worth.RETURNED and next_to_break(scene) == "fresh"
    assert not breaks_for_newcomer(scene, "back")
    pass_time(scene, 1.1)
    assert kept(scene, "back").worth is Worth.FIRST_TURN and next_to_break(scene) == "back", "idle for longer"
    assert breaks_for_newcomer(scene, "back")


def test_worth_falls_while_leases_have_been_valued() -> None:
    """A value must not fall unnoticed: the table values a lease again only if it has changed."""
    scene = harness(pin_time="fixed", pin_seconds=0.1)
    learn_user(scene, [1.0] * 10)
    for number in (1, 2):
        said = chat(scene, f"a{number}", prompt(number))
        chat(scene, f"b{number}", [*said, 7], job=f"chat-a{number}")
        pass_time(scene, 0.3)
    assert next_to_break(scene) == "b1", "both are valued"
    chat(scene, "fresh", prompt(3))
    assert next_to_break(scene) == "fresh"
    pass_time(scene, 0.4)
    assert next_to_break(scene) == "b1"
    pass_time(scene, 0.4)
    assert next_to_break(scene) == "b1"
    scene.scheduler.release_leases("b1")
    assert next_to_break(scene) == "b2"


def test_conversation_that_users_leave_for_long_keeps_its_worth() -> None:
    """Four of five return after a minute: at any age before that its return is likelier than a first turn's."""
    scene = harness()
    learn_user(scene, [60.0] * 8 + [MAX_PIN_S] * 2)
    said = chat(scene, "a", prompt(1))
    chat(scene, "back", [*said, 7], job="chat-a")
    assert kept(scene, "back").falls_at == pytest.approx(scene.now + 60.0, abs=0.1)
    pass_time(scene, 59.0)
    chat(scene, "fresh", prompt(2))
    assert next_to_break(scene) == "fresh"


def test_one_straggler_does_not_keep_the_worth_of_all() -> None:
    """Half return after 5 s, one of the rest after 90 s: by then a fresh first turn is likelier to be continued."""
    scene = harness(pin_time="fixed", pin_seconds=0.1)
    learn_user(scene, [5.0] * 20 + [90.0] + [MAX_PIN_S] * 20)
    said = chat(scene, "a", prompt(1))
    chat(scene, "back", [*said, 7], job="chat-a")
    assert kept(scene, "back").falls_at == pytest.approx(scene.now + 5.0, abs=0.1)


def test_lease_that_a_client_asks_for_keeps_its_worth() -> None:
    """However long its user stays away; else a stranger's first turn, which nothing was asked for, would break it."""
    scene = harness(pin_time="fixed", pin_seconds=0.1)
    learn_user(scene, [5.0] * 20 + [MAX_PIN_S] * 20)
    said = chat(scene, "a", prompt(1))
    chat(scene, "back", [*said, 7], job="chat-a", unasked=False, default_lease=False)
    pass_time(scene, 50.0)
    chat(scene, "fresh", prompt(2))
    assert next_to_break(scene) == "fresh"


def test_nothing_falls_before_enough_is_known() -> None:
    scene = harness()
    learn_user(scene, [1.0] * 6)  # and the return of this one
    said = chat(scene, "a", prompt(1))
    chat(scene, "back", [*said, 7], job="chat-a")
    assert kept(scene, "back").falls_at == math.inf


def test_late_tool_falls_by_its_own_times() -> None:
    """The tool's, not the user's, and never before the policy stops expecting it."""
    scene = harness(pin_time="fixed", pin_seconds=3.0)
    learn_user(scene, [50.0] * 10)
    for _ in range(10):
        pins_of(scene).times.record_duration(LS, 2.0)
    said = chat(scene, "a", prompt(1))
    chat(scene, "back", [*said, 7], LS, job="chat-a")
    assert kept(scene, "back").falls_at == kept(scene, "back").expected_until == pytest.approx(scene.now + 3.0, abs=0.1)
    said = chat(scene, "c", prompt(2))
    chat(scene, "talk", [*said, 7], job="chat-c")
    assert kept(scene, "talk").falls_at > scene.now + 40.0


def test_returned_conversation_is_worth_its_return_again() -> None:
    scene = harness()
    learn_user(scene, [1.0] * 10)
    said = chat(scene, "a", prompt(1))
    said = chat(scene, "b", [*said, 7], job="chat-a")
    pass_time(scene, 20.0)
    assert kept(scene, "b").worth is Worth.FIRST_TURN
    chat(scene, "c", [*said, 8], job="chat-a")
    assert kept(scene, "c").worth is Worth.RETURNED


def test_claimed_lease_does_not_fall() -> None:
    scene = harness()
    learn_user(scene, [1.0] * 10)
    said = chat(scene, "a", prompt(1))
    said = chat(scene, "b", [*said, 7], job="chat-a")
    owner = kept(scene, "b")
    scene.scheduler._leases.claim(leases(scene)["b"], scene.now)
    pass_time(scene, 20.0)
    assert owner.falls_at < scene.now
    assert owner.worth is Worth.RETURNED


def test_kv_of_fallen_conversation_leaves_before_that_of_others() -> None:
    scene = harness(leased_ratio=1.0, max_client_leased_ratio=1.0)
    learn_user(scene, [1.0] * 10)
    said = chat(scene, "a", prompt(1, 150))
    gone = chat(scene, "gone", [*said, 7], job="chat-a")
    pass_time(scene, 20.0)
    said = chat(scene, "c", prompt(2, 150))
    here = chat(scene, "here", [*said, 7], job="chat-c")
    memory = scene.scheduler._memory
    memory.reclaim(memory.available_tokens + 100, scene.now)
    assert {*leases(scene)} == {"here"}
    found = [scene.cache.match_len("", np.array(ids, dtype=np.int32)) for ids in (gone, here)]
    assert found[0] < 100 and found[1] >= len(here) - 1


# -- who waits, who gives way ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", ["", "bob"], ids=["one client", "another client"])
@pytest.mark.parametrize("named", [False, True], ids=["plain", "named"])
def test_flood_of_named_one_shots_ends_no_lease_within_the_budget(client: str, named: bool) -> None:
    """A conversation that has just begun takes over the KV of its first turn."""
    scene = harness(num_tokens=16_384, leases=256)
    for number in range(150):
        chat(scene, f"one{number}", prompt(number, 20), job=f"one {number}", unasked=False, client=client)
    pass_time(scene, 21.0)
    said = chat(scene, "new", prompt(200), job="new", unasked=not named)
    pass_time(scene, 5.0)
    said = chat(scene, "new 2", [*said, 7], job="new", unasked=not named)
    chat(scene, "new 3", [*said, 7], job="new", unasked=not named)
    for rid in ("new 2", "new 3"):
        request = scene.outcomes[rid, 0].request
        assert request is not None and request.inheritance is not None and request.inheritance.path == "handoff"


@pytest.mark.parametrize("bare", [False, True], ids=["chats", "prompts"])
def test_flood_of_one_shots_leaves_agent_its_kv(bare: bool) -> None:
    """From its first turn on: its tool runs while five pools of one-shots pass. They never wait for each other."""
    scene = harness(num_tokens=600, context=300, max_client_leased_ratio=1.0)
    names: dict[str, Any] = {} if bare else {"job": "chat-agent"}

    def turn(rid: str, ids: list[int], calls: tuple[ToolCall, ...], **fields: Any) -> list[int]:
        if not bare:
            return chat(scene, rid, ids, calls, **fields)
        scene.add(rid, ids, 4)
        scene.run()
        scene.scheduler.record_tool_calls(rid, 0, calls, scene.now)
        return ids + scene.outcomes[rid, 0].tokens

    said = turn("agent", prompt(1), LS, **names)
    scene.turn_s = 0.0
    for number in range(5):
        for one in range(30):
            turn(f"one{number}.{one}", prompt(100 + 30 * number + one, 120), ())
        scene.now += 0.5
        said = turn(f"agent{number}", [*said, *prompt(2 + number, 5)], LS, **names)
        request = scene.outcomes[f"agent{number}", 0].request
        assert request is not None and request.inheritance is not None
        assert (request.inheritance.path, request.inheritance.recomputed_tokens) == ("handoff", 1), number


def test_flood_of_one_client_does_not_touch_another_clients_first_turn_with_a_tool() -> None:
    scene = harness(num_tokens=600, context=300)
    said = chat(scene, "agent", prompt(1), LS, client="alice")
    scene.turn_s = 0.0
    for number in range(30):
        chat(scene, f"one{number}", prompt(100 + number, 120), (), client="bob")
    chat(scene, "back", [*said, 7], job="chat-agent", client="alice")
    request = scene.outcomes["back", 0].request
    assert request is not None and request.inheritance is not None and request.inheritance.path == "handoff"
