"""The HTTP client against a socket that answers bytes as they are given, and bad ones."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest

from baton.entrypoints.bench.apis import APIS, Answer, Turn
from baton.entrypoints.bench.connections import Connections, RequestFailed
from baton.entrypoints.bench.load import Load, Run, ask

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
UNTIL_EOF = OK + b"content-type: text/event-stream\r\n\r\n"
EVENT = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'
DONE = b"data: [DONE]\n\n"


def chunks(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


class Listener:
    """Answers the n-th request with the n-th reply, the last one for all others; keeps what it was sent."""

    def __init__(self, *replies: bytes, stall: bool = False) -> None:
        self._replies, self._stall = list(replies), stall
        self.heads: list[str] = []
        self.running = self.peak = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await asyncio.gather(*self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.append(task)
        self.running += 1
        self.peak = max(self.peak, self.running)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        self.heads.append(head + (await reader.readexactly(length)).decode())
        await asyncio.sleep(0.01)  # requests of one moment overlap
        self.running -= 1
        writer.write(self._replies.pop(0) if len(self._replies) > 1 else self._replies[0])
        await writer.drain()
        if self._stall:
            await reader.read()  # until the client gives up
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def complete(reply: bytes, *, stall: bool = False, timeout_s: float = 10) -> Answer:
    async def run() -> Answer:
        async with Listener(reply, stall=stall) as url:
            api, answer = APIS["openai"]("m", ignore_eos=True), Answer()
            await ask(Connections(url), api, api.request(Turn("a"), "prefix", 1), answer, timeout_s)
            return answer

    return asyncio.run(run())


@pytest.mark.parametrize(
    "reply",
    [
        CHUNKED + chunks(EVENT, USAGE, DONE),
        CHUNKED + chunks(EVENT[:20], EVENT[20:-1], EVENT[-1:] + USAGE + DONE),
        UNTIL_EOF + EVENT + USAGE + DONE,
        UNTIL_EOF + b": comment\r\n\r\n" + EVENT.replace(b"\n", b"\r\n") + USAGE.replace(b"data: ", b"data:") + DONE,
        OK + b"Content-Length: %d\r\n\r\n" % len(EVENT + USAGE + DONE) + EVENT + USAGE + DONE,
    ],
    ids=["chunked", "split", "until-eof", "crlf", "length"],
)
def test_streams_are_read_in_every_framing(reply: bytes) -> None:
    answer = complete(reply)
    assert (answer.text, answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == ("a", 3, 1, None)
    assert answer.started <= answer.arrivals[0] <= answer.ended and len(answer.arrivals) == 1


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"HTTP/1.1 429 Slow\r\n\r\n" + b'{"error":{"message":"too\\nmany"}}', "answered 429: too many"),
        (b"HTTP/1.1 404 No\r\nContent-Length: 22\r\n\r\n" + b'{"detail":"Not Found"}', "answered 404: Not Found"),
        (b"HTTP/1.1 502 Bad\r\n\r\n<html>\n" + b"x" * 5000, r"answered 502: <html> x{293}…$"),
        (CHUNKED + chunks(EVENT, USAGE), r"the stream ended before its \[DONE\]"),
        (CHUNKED + chunks(EVENT)[:-5], "broke off: the connection was closed"),
        (CHUNKED + chunks(b'data: {"error":{"message":"no\\nmemory"}}\n\n', DONE), "/v1/completions: no memory"),
        (CHUNKED + chunks(b"data: {broken\n\n"), "an event that is no JSON: {broken"),
        (CHUNKED + chunks(b"data: [1]\n\n"), "an event that is none of its API"),
        (CHUNKED + chunks(EVENT, DONE), "the stream has no usage"),
        (CHUNKED + chunks(USAGE.replace(b":1}", b":0}"), DONE), "the answer has no token"),
        (CHUNKED + b"zz\r\n", "broke off: ValueError"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "is no answer of an HTTP server"),
        (b"", "broke off: the connection was closed"),
    ],
)
def test_bad_answers_are_failures_of_one_line(reply: bytes, reason: str) -> None:
    with pytest.raises(RequestFailed, match=reason) as caught:
        complete(reply)
    assert "\n" not in str(caught.value)


def test_request_that_takes_too_long_has_failed() -> None:
    with pytest.raises(RequestFailed, match=r"no whole answer within 0\.2 s \(--timeout\)"):
        complete(CHUNKED + chunks(EVENT)[:-5], stall=True, timeout_s=0.2)


def test_server_that_never_answers_is_given_up() -> None:
    async def run() -> None:
        async with Listener(b"", stall=True) as url:
            await Connections(url, timeout_s=0.2).fetch("GET", "/v1/models")

    with pytest.raises(RequestFailed, match=r"/v1/models: no answer within 0\.2 s \(--timeout\)"):
        asyncio.run(run())


def test_tokens_without_text_arrive_at_the_end() -> None:
    answer = complete(CHUNKED + chunks(USAGE, DONE))
    assert answer.arrivals == [answer.ended]


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_base_url_may_end_as_openai_clients_have_it(path: str) -> None:
    async def run() -> str:
        listener = Listener(OK + b"Content-Length: 2\r\n\r\n{}")
        async with listener as url:
            assert await Connections(url + path, api_key="sesame").fetch("GET", "/v1/models") == {}
        return listener.heads[0]

    head = asyncio.run(run())
    assert head.startswith("GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:") and "Authorization: Bearer sesame" in head


@pytest.mark.parametrize("url", ["localhost:30000", "ftp://host", "http://", "http://host:port"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        Connections(url)


def load(
    reply: bytes, *more: bytes, conversations: list[list[str]], **settings: Any
) -> tuple[Run, Listener, list[int]]:
    async def run() -> tuple[Run, Listener, list[int]]:
        listener, done = Listener(reply, *more), []
        async with listener as url:
            given: dict[str, Any] = {"offsets": [0.0] * len(conversations), "max_concurrency": None, **settings}
            client = Load(
                api=APIS["openai-chat"]("m", ignore_eos=False),
                connections=Connections(url),
                output_tokens=1,
                timeout_s=10,
                **given,
            )
            return await client.run("prefix", conversations, done.append), listener, done

    return asyncio.run(run())


SAID = CHUNKED + chunks(b'data: {"choices":[{"delta":{"content":"yes"}}]}\n\n', USAGE, DONE)


def test_concurrency_is_limited() -> None:
    conversations = [["a"]] * 12
    run, listener, _ = load(SAID, conversations=conversations, max_concurrency=3)
    assert len(run.records) == 12 and listener.peak == 3
    run, listener, _ = load(SAID, conversations=conversations)
    assert listener.peak > 3


def test_conversations_start_at_their_offsets() -> None:
    run, _, _ = load(SAID, conversations=[["a"], ["b"]], offsets=[0.0, 0.3])
    first, second = (record.answer.started - run.began for record in run.records)
    assert first < 0.3 <= second and run.seconds > 0.3
    assert run.began <= time.perf_counter()


def test_later_turns_repeat_the_conversation() -> None:
    run, listener, done = load(SAID, conversations=[["a", "b", "c"]])
    assert [record.turn for record in run.records] == [0, 1, 2] and sum(done) == 3
    said = '{"role": "assistant", "content": "yes"}'
    assert listener.heads[2].count(said) == 2 and listener.heads[0].count(said) == 0
    assert '"content": "a"}, ' + said + ', {"role": "user", "content": "b"}' in listener.heads[1]
    assert "ignore_eos" not in listener.heads[0]


def test_failed_turn_ends_its_conversation() -> None:
    broken = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"
    run, listener, done = load(SAID, broken, SAID, conversations=[["a", "b", "c", "d"]])
    assert [record.error is None for record in run.records] == [True, False]
    assert len(listener.heads) == 2 and sum(done) == 4
