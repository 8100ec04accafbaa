"""Chats with a server that answers by rule, in each scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from benchmarks.hybrids.__main__ import chat_in_turns
from benchmarks.hybrids.chat import CALM, EDITED, PRESSURE, RESTART, SCENARIOS, Chat, Completions, Sizes, Turn
from benchmarks.hybrids.engines import Contender, all_engines
from benchmarks.hybrids.servers import ChatServer

SIZES = Sizes(turns=3, first=5, user=2, answer=2, others=2, other=4)


class RuledServer:
    """Answers with the length of the prompt, twice. log: what its clients did, prompts by their length."""

    def __init__(self, engine: Contender | None = None, log: list[Any] | None = None) -> None:
        self.engine = engine
        self.prompts: list[list[int]] = []
        self.log: list[Any] = [] if log is None else log
        self.completions = cast(Completions, self)

    def complete(self, ids: list[int], tokens: int, fields: Mapping[str, Any]) -> Turn:
        self.prompts.append(ids)
        self.log.append(len(ids) if self.engine is None else self.engine.name)
        output = [len(ids)] * tokens
        return Turn(name=f"r{len(ids)}", ttft=0.1, total=0.2, prompt=len(ids), computed=len(ids), output=output)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self.log.append((path, body["rid"]))
        return {}

    def restart(self) -> None:
        self.log.append("restart")


def chat_through(scenario: str, fields: Mapping[str, Any] = {}) -> tuple[RuledServer, Chat]:
    server = RuledServer()
    chat = Chat(server, SIZES, 100, (7,), fields)
    for turn in range(SIZES.turns):
        SCENARIOS[scenario](chat, turn)
    chat.end()
    return server, chat


def test_each_turn_of_a_chat_continues_the_answer_before() -> None:
    server, chat = chat_through(CALM)
    assert server.log == [5, 9, 13]
    assert server.prompts[1][:7] == [*server.prompts[0], 5, 5] and server.prompts[2][:11] == [*server.prompts[1], 9, 9]
    assert [turn.prompt for turn in chat.turns] == [5, 9, 13]


def test_prompts_of_others_come_between_turns_under_pressure() -> None:
    server, _ = chat_through(PRESSURE)
    assert server.log == [5, 4, 4, 9, 4, 4, 13]


def test_edited_message_continues_where_the_first_attempt_did() -> None:
    server, chat = chat_through(EDITED)
    first, turn, edit, later, _ = server.prompts
    assert turn[:7] == edit[:7] == [*first, 5, 5] and turn[7:] != edit[7:]
    assert later[:11] == [*edit, 9, 9]
    assert (len(chat.turns), len(chat.edits)) == (3, 2)


def test_server_is_restarted_before_each_later_turn() -> None:
    server, _ = chat_through(RESTART)
    assert server.log == [5, "restart", 9, "restart", 13]


def test_each_lease_ends_once_the_next_turn_has_been_answered() -> None:
    server, _ = chat_through(CALM, {"retain_ttl": 60})
    assert server.log == [5, 9, ("/release", "r5"), 13, ("/release", "r9"), ("/release", "r13")]


@pytest.mark.parametrize("scenario", [CALM, PRESSURE, RESTART])
def test_order_of_the_servers_is_swapped_by_turn_and_by_round(scenario: str, tmp_path: Any) -> None:
    engines = [each for each in all_engines(100, tmp_path, "python", "python") if scenario in each.scenarios]
    names = [engine.name for engine in engines]
    assert len(names) == {CALM: 3, PRESSURE: 6, RESTART: 3}[scenario]
    sizes = Sizes(turns=2, first=5, user=2, answer=2, others=0, rest_s=0)
    for seed, order in (0, names + names[::-1]), (1, names[::-1] + names):
        log: list[Any] = []
        servers = cast(Sequence[ChatServer], [RuledServer(engine, log) for engine in engines])
        chats = chat_in_turns(servers, scenario, sizes, 100, seed, {})
        assert [name for name in log if name in names] == order
        assert [chat["engine"] for chat in chats] == names
        assert {len(chat["turns"]) for chat in chats} == {2}


class FailingServer(RuledServer):
    def complete(self, ids: list[int], tokens: int, fields: Mapping[str, Any]) -> Turn:
        if len(self.prompts) == 1:
            raise RuntimeError("out of blocks")
        return super().complete(ids, tokens, fields)


def test_server_of_others_that_fails_is_left_out_from_then_on(tmp_path: Any) -> None:
    engines = [each for each in all_engines(100, tmp_path, "python", "python") if CALM in each.scenarios]
    sizes, skipped, log = Sizes(turns=3, first=5, user=2, answer=2, rest_s=0), {}, []
    failing = engines[-1].name
    servers = [(FailingServer if engine.name == failing else RuledServer)(engine, log) for engine in engines]
    for seed in range(2):
        chats = chat_in_turns(cast(Sequence[ChatServer], servers), CALM, sizes, 100, seed, skipped)
        assert [chat["engine"] for chat in chats] == [engine.name for engine in engines[:-1]]
    assert skipped == {failing: "calm, turn 2: out of blocks"}
    assert log.count(failing) == 1
    ours = FailingServer(engines[0], log)
    with pytest.raises(RuntimeError, match="out of blocks"):
        chat_in_turns(cast(Sequence[ChatServer], [ours]), CALM, sizes, 100, 0, {})
