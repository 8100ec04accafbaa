"""Finished turns: which one a prompt extends, and which are forgotten."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.scheduler.jobs import finished_turns
from baton.scheduler.jobs.finished_turns import TAIL, FinishedTurns
from tests.doubles.counted_lines import lines_run


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def count(first: int, length: int) -> np.ndarray:
    return np.arange(first, first + length, dtype=np.int32)


def record(
    turns: FinishedTurns,
    name: str,
    prompt: np.ndarray,
    output: np.ndarray,
    *,
    client: str = "",
    namespace: str = "",
) -> np.ndarray:
    """Returns prompt and output."""
    turns.record_turn(client, namespace, (name, 0), f"job {name}", prompt, output)
    return np.concatenate([prompt, output])


def found(turns: FinishedTurns, prompt: np.ndarray, client: str = "", namespace: str = "") -> str | None:
    turn = turns.find_turn(client, namespace, prompt)
    return turn.name[0] if turn is not None else None


def test_prompt_extends_longest_turn_whose_ids_it_begins_with() -> None:
    turns = FinishedTurns(8)
    first = record(turns, "first", count(0, 20), ids(70, 71))
    second = record(turns, "second", np.concatenate([first, ids(90)]), ids(80, 81, 82))
    assert found(turns, second) == "second", "it need not bring more"
    assert found(turns, np.concatenate([second, ids(1, 2, 3)])) == "second"
    assert found(turns, np.concatenate([first, ids(1, 2, 3)])) == "first"
    assert found(turns, first[:-1]) is None and found(turns, ids()) is None
    turn = turns.find_turn("", "", first)
    assert turn is not None and (turn.name, turn.job_id, turn.length) == (("first", 0), "job first", 22)


def test_thousands_of_equal_turns_cost_no_more_than_a_hundred() -> None:
    def cost(number: int) -> int:
        turns, said = FinishedTurns(number), ids()
        for each in range(number):
            said = record(turns, str(each), count(0, 20), ids(70, 71))
        names = [found(turns, said) for _ in range(3)]
        assert names == [str(number - each) for each in (1, 2, 3)], "each time one that was not extended"
        return lines_run(lambda: found(turns, said), finished_turns)

    assert cost(100) == cost(2000)


@pytest.mark.parametrize("changed", range(20))
def test_any_other_id_makes_another_prompt(changed: int) -> None:
    """But for the last of the answer, which a tokenizer may merge with what follows."""
    turns = FinishedTurns(8)
    said = record(turns, "a", count(0, 15), count(50, 5))
    prompt = np.concatenate([said, ids(1, 2)])
    prompt[changed] += 1
    assert found(turns, prompt) == ("a" if changed == 19 else None)


def test_answer_of_one_token_must_be_the_same() -> None:
    """Otherwise every request with the same prompt would extend it."""
    turns = FinishedTurns(8)
    record(turns, "a", count(0, 15), ids(50))
    assert found(turns, np.append(count(0, 15), ids(51, 52))) is None
    assert found(turns, np.append(count(0, 15), ids(50, 52))) == "a"


def test_turns_of_other_clients_and_namespaces_are_not_found() -> None:
    turns = FinishedTurns(8)
    said = record(turns, "a", count(0, 15), count(50, 5), client="alice", namespace="salt")
    for client, namespace in (("bob", "salt"), ("alice", ""), ("", "salt"), ("salt", "alice")):
        assert found(turns, said, client, namespace) is None
    assert found(turns, said, "alice", "salt") == "a"


def test_conversations_that_began_alike_stay_apart() -> None:
    turns = FinishedTurns(8)
    for name in ("a", "b", "c"):
        said = record(turns, name, count(0, 15), count(50, 5))
    following = [found(turns, np.concatenate([said, ids(number)])) for number in range(4)]
    assert following == ["c", "b", "a", "c"]


def test_only_turns_that_can_be_extended_are_recorded() -> None:
    turns = FinishedTurns(8)
    record(turns, "nothing said", count(0, 15), ids())
    record(turns, "short", ids(1, 2), count(0, TAIL - 2))
    assert len(turns) == 0
    said = record(turns, "long enough", ids(1, 2), count(0, TAIL - 1))
    assert found(turns, said) == "long enough"
    none = FinishedTurns(0)
    assert found(none, record(none, "a", count(0, 15), count(50, 5))) is None


def test_full_table_forgets_oldest_of_client_with_most() -> None:
    turns = FinishedTurns(4)
    kept = [record(turns, f"mine{number}", count(number, 9), count(50, 5), client="me") for number in range(2)]
    for number in range(40):
        record(turns, f"flood{number}", count(100 * number, 9), count(50, 5), client="flood")
        assert len(turns) == min(4, number + 3)
    assert [found(turns, each, "me") for each in kept] == ["mine0", "mine1"]
    assert found(turns, np.concatenate([count(3900, 9), count(50, 5)]), "flood") == "flood39"
    assert found(turns, np.concatenate([count(3700, 9), count(50, 5)]), "flood") is None


def test_found_turn_is_forgotten_later() -> None:
    turns = FinishedTurns(2)
    one = record(turns, "one", count(0, 9), count(50, 5))
    two = record(turns, "two", count(200, 9), count(50, 5))
    assert found(turns, one) == "one"
    record(turns, "three", count(300, 9), count(50, 5))
    assert found(turns, one) == "one" and found(turns, two) is None


def test_only_few_turns_of_repetitive_prompt_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = FinishedTurns(500)
    same = np.zeros(1000, dtype=np.int32)
    for number in range(300):
        record(turns, f"turn{number}", np.append(ids(number), same[: 2 * number + 10]), same[:5])
    hashed: list[int] = []
    digests = finished_turns._digests
    monkeypatch.setattr(
        finished_turns, "_digests", lambda prompt, lengths: hashed.append(len(lengths)) or digests(prompt, lengths)
    )
    assert found(turns, same) is None
    assert hashed == [2 * finished_turns.MAX_HASHED]
    assert found(turns, np.append(ids(299), same)) == "turn299"


@pytest.mark.parametrize("seed", range(20))
def test_table_agrees_with_list_of_turns(seed: int) -> None:
    """Ids are few, so that turns begin with each other and are equal. Every other table forgets turns."""
    print(f"seed={seed}")
    rng = random.Random(seed)
    turns, said = FinishedTurns(1000 if seed % 2 else 20), dict[str, tuple[np.ndarray, int, str]]()
    for number in range(150):
        base = rng.choice(list(said.values()))[0].tolist() if said and rng.random() < 0.7 else []
        prompt = ids(*base, *(rng.randrange(2) for _ in range(rng.randrange(1, 4))))
        client = rng.choice(["a", "b"])
        fits = [
            len(whole)
            for whole, output, owner in said.values()
            if owner == client
            and len(whole) <= len(prompt)
            and (
                np.array_equal(prompt[: len(whole)], whole)
                or (output > 1 and np.array_equal(prompt[: len(whole) - 1], whole[:-1]))
            )
        ]
        turn = turns.find_turn(client, "", prompt)
        assert (turn.length if turn is not None else None) == max(fits, default=None), prompt
        output = ids(*(rng.randrange(2) for _ in range(rng.randrange(0, 4))))
        whole = record(turns, f"turn{number}", prompt, output, client=client)
        if len(output) and len(whole) > TAIL:
            said[f"turn{number}"] = whole, len(output), client
        known = {turn.name[0] for turn in turns._turns.values()}
        said = {name: each for name, each in said.items() if name in known}
