"""Compiling grammars: in a thread, in turns of clients, and on trial in a process that may end."""

from __future__ import annotations

import gc
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llguidance import grammar_from

from baton.runtime.constraints import grammars
from baton.runtime.constraints.grammars import Grammars
from baton.runtime.constraints.trial import NotWanted, Trial, TrialBroken, TrialFailed
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.sampling_params import Grammar
from tests.doubles.trained_tokenizers import CONFIG, byte_level, write_folder

DEADLINE_S = 60.0
REGEX = grammar_from("regex", "(ab|a)*c{2,5}")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("tokenizer"), byte_level(), CONFIG))


@pytest.fixture
def table(tokenizer: Tokenizer) -> Iterator[Grammars]:
    assert tokenizer.eos_token_id is not None
    found = Grammars(lambda: tokenizer, tokenizer.vocab_size, (tokenizer.eos_token_id,))
    yield found
    found.close()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def chain(length: int) -> str:
    """A schema of references, one behind the other."""
    links: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "string"}}}
    return grammar_from("json_schema", json.dumps(schema))


def patterns(count: int) -> str:
    """A schema that takes time and memory with a power of its length."""
    schema = {"type": "string", "allOf": [{"pattern": f"a{i}"} for i in range(count)]}
    return grammar_from("json_schema", json.dumps(schema))


# -- the table ---------------------------------------------------------------------------------------------------------


def test_grammar_is_compiled_once_and_wakes_the_loop(table: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    woken = threading.Event()
    monkeypatch.setattr(table, "_wake", woken.set)
    one = table.constraint(Grammar("regex", REGEX))
    other = table.constraint(Grammar("guided_regex", REGEX))
    assert woken.wait(DEADLINE_S) and one.is_ready and other.is_ready and one.failure() is None
    assert one.root is other.root and (one.name, other.name) == ("regex", "guided_regex")
    assert one.start().allowed().count() > 0


def test_grammar_that_cannot_be_compiled_is_refused_with_its_field(table: Grammars) -> None:
    wrong = table.constraint(Grammar("sampling_params.regex", grammar_from("regex", "(")))
    deadline = threading.Event()
    while not wrong.is_ready:
        deadline.wait(0.01)
    refusal = wrong.failure()
    assert refusal is not None and (refusal.code, refusal.param) == ("invalid_grammar", "sampling_params.regex")
    assert refusal.message.startswith("sampling_params.regex: ")


def test_only_grammars_asked_for_last_are_kept(table: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_GRAMMARS", 2)
    sources = [grammar_from("regex", f"a{{{count}}}") for count in (1, 2, 3)]
    first, second, _ = (table.constraint(Grammar("regex", sources[place])) for place in (0, 1, 0))
    table.constraint(Grammar("regex", sources[2]))
    assert table.constraint(Grammar("regex", sources[0]))._root is first._root, "it was asked for after the second"
    assert table.constraint(Grammar("regex", sources[1]))._root is not second._root


def test_clients_take_turns(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of one client is not compiled before the single grammar of another."""
    tried, may_go = list[str](), threading.Event()

    def try_grammar(trial: Trial, source: str, is_wanted: Callable[[], bool]) -> int:
        assert may_go.wait(DEADLINE_S)
        tried.append(source)
        return 0

    monkeypatch.setattr(Trial, "try_grammar", try_grammar)
    table = Grammars(lambda: tokenizer, tokenizer.vocab_size, (2,))
    flood = [table.constraint(Grammar("regex", grammar_from("regex", f"a{{{n}}}")), "one") for n in range(1, 9)]
    wait_until(lambda: not table._waiting or len(table._waiting["one"]) < 8)
    other = table.constraint(Grammar("regex", grammar_from("regex", "b")), "other")
    may_go.set()
    wait_until(lambda: other.is_ready and all(each.is_ready for each in flood))
    assert tried.index(grammar_from("regex", "b")) == 1, "after the one that was under way"
    table.close()


def test_grammar_of_a_flood_has_the_turn_of_another_client(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last grammar of a flood is compiled next if another client asks for it, and once."""
    tried, may_go = list[str](), threading.Event()

    def try_grammar(trial: Trial, source: str, is_wanted: Callable[[], bool]) -> int:
        assert may_go.wait(DEADLINE_S)
        tried.append(source)
        return 0

    monkeypatch.setattr(Trial, "try_grammar", try_grammar)
    table = Grammars(lambda: tokenizer, tokenizer.vocab_size, (2,))
    sources = [grammar_from("regex", f"a{{{n}}}") for n in range(1, 9)]
    flood = [table.constraint(Grammar("regex", source), "one") for source in sources]
    wait_until(lambda: len(table._waiting["one"]) < 8)
    same = [table.constraint(Grammar("regex", sources[-1]), "other") for _ in range(2)]
    may_go.set()
    wait_until(lambda: all(each.is_ready for each in (*flood, *same)))
    assert tried.index(sources[-1]) == 1 and sorted(tried) == sorted(sources)
    wait_until(lambda: not table._waiting)
    table.close()


def test_grammar_that_could_not_be_tried_is_tried_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for its request, and for each that comes later."""
    left = [TrialBroken("no process")] * 3

    def try_grammar(trial: Trial, source: str, is_wanted: Callable[[], bool]) -> int:
        if left:
            raise left.pop()
        return 0

    monkeypatch.setattr(Trial, "try_grammar", try_grammar)
    table = Grammars(lambda: tokenizer, tokenizer.vocab_size, (2,))
    first = table.constraint(Grammar("regex", REGEX))
    wait_until(lambda: first.is_ready)
    refusal = first.failure()
    assert refusal is not None and (refusal.code, len(left)) == ("request_failed", 1)
    later = table.constraint(Grammar("regex", REGEX))
    wait_until(lambda: later.is_ready)
    assert later.failure() is None and not left
    table.close()


def test_thread_that_does_not_start_is_started_later(table: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError):
            table.constraint(Grammar("regex", REGEX))
    assert threading.stack_size() == 0
    constraint = table.constraint(Grammar("regex", REGEX))
    wait_until(lambda: constraint.is_ready)
    assert constraint.failure() is None


@pytest.mark.parametrize(
    ("lark", "is_taken"),
    [
        ('start: "a" <[SPECIAL]> "<[7]>" /<[^x]>/ // <[7]>', True),
        ('start: "a" <[7]>', False),
        ("start: <[*]>", False),
        ("start: <[1-3,SPECIAL]>", False),
        ("start: <[^SPECIAL]>", False),
    ],
)
def test_only_special_tokens_are_named_by_id(table: Grammars, tokenizer: Tokenizer, lark: str, is_taken: bool) -> None:
    source = lark.replace("SPECIAL", str(max(tokenizer.special_ids)))
    constraint = table.constraint(Grammar("ebnf", grammar_from("lark", source)))
    wait_until(lambda: constraint.is_ready)
    refusal = constraint.failure()
    assert (refusal is None) == is_taken, refusal
    assert refusal is None or "tokens that are not special" in refusal.message


def test_grammar_without_a_request_is_not_compiled(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits is dropped, one on trial is given up, and both are compiled if a request asks again."""
    tried, given_up = list[str](), threading.Event()
    hold = grammar_from("regex", "hold")

    def try_grammar(trial: Trial, source: str, is_wanted: Callable[[], bool]) -> int:
        tried.append(source)
        if source == hold and not given_up.is_set():
            wait_until(lambda: not is_wanted())
            given_up.set()
            raise NotWanted
        return 0

    monkeypatch.setattr(Trial, "try_grammar", try_grammar)
    table = Grammars(lambda: tokenizer, tokenizer.vocab_size, (2,))
    first = table.constraint(Grammar("regex", hold))
    waiting = table.constraint(Grammar("regex", REGEX))
    wait_until(lambda: tried == [hold])
    del waiting, first
    gc.collect()
    assert given_up.wait(DEADLINE_S)
    wait_until(lambda: not table._known)
    assert tried == [hold]
    again = [table.constraint(Grammar("regex", source)) for source in (hold, REGEX)]
    wait_until(lambda: all(each.is_ready for each in again))
    assert all(each.failure() is None for each in again) and tried == [hold, hold, REGEX]
    table.close()


def test_large_grammars_are_kept_within_a_limit(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "try_grammar", lambda *_: grammars.MAX_BYTES // 2)
    table = Grammars(lambda: tokenizer, tokenizer.vocab_size, (2,))
    sources = [grammar_from("regex", f"a{{{n}}}") for n in range(1, 5)]
    for source in sources:
        constraint = table.constraint(Grammar("regex", source))
        wait_until(lambda constraint=constraint: constraint.is_ready)
    table.constraint(Grammar("regex", sources[-1]))
    assert list(table._known) == sources[-2:]
    table.close()


# -- on trial ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def trial() -> Iterator[Trial]:
    found = Trial(300, {290: "<|mark|>"}, [2], max_cpu_s=1.0, max_bytes=128 * 2**20)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (chain(5000), "nested too deeply"),
        (patterns(60), "takes more than (1 s|128 MB)"),
        (grammar_from("lark", "start: <|other|>"), "token"),
        (grammar_from("regex", "("), "regex"),
    ],
    ids=["deep", "large", "unknown token", "wrong"],
)
def test_grammar_that_cannot_be_compiled_ends_no_other(trial: Trial, source: str, words: str) -> None:
    with pytest.raises(TrialFailed, match=words):
        trial.try_grammar(source)
    assert trial.try_grammar(REGEX) >= 0
    assert trial.try_grammar(grammar_from("lark", 'start: "a" <[290]> <|mark|>')) >= 0
    assert trial.try_grammar(chain(100)) >= 0


def test_time_of_a_processor_is_limited() -> None:
    trial = Trial(300, {}, [2], max_cpu_s=0.05, max_bytes=2**34)
    with pytest.raises(TrialFailed, match=r"more than 0\.05 s"):
        trial.try_grammar(patterns(60))
    trial.close()


@pytest.mark.parametrize("stopped", [False, True])
def test_trial_without_a_request_ends(trial: Trial, stopped: bool) -> None:
    """Also where the process reads nothing, and the grammar is longer than a pipe holds."""
    trial.try_grammar(REGEX)
    process, source = trial._process, patterns(60)
    assert process is not None
    if stopped:
        process.send_signal(signal.SIGSTOP)
        source = grammar_from("choice", json.dumps([f"{number:06}" for number in range(20_000)]))
    with pytest.raises(NotWanted):
        trial.try_grammar(source, lambda: False)
    assert process.poll() is not None
    assert trial.try_grammar(REGEX) >= 0


def test_process_that_is_killed_says_nothing_of_the_grammar(trial: Trial) -> None:
    trial.try_grammar(REGEX)
    process = trial._process
    assert process is not None
    checks = iter([process.kill])

    def is_wanted() -> bool:
        next(checks, lambda: None)()
        return True

    with pytest.raises(TrialBroken, match=r"return code -9|BrokenPipeError"):
        trial.try_grammar(patterns(60), is_wanted)
    assert trial.try_grammar(REGEX) >= 0


def test_process_ends_with_its_pipe(trial: Trial) -> None:
    """So none is left behind when a worker is killed."""
    trial.try_grammar(REGEX)
    process = trial._process
    assert process is not None and process.stdin is not None
    process.stdin.close()
    assert process.wait(DEADLINE_S) == 0
