"""The detokenizer's bookkeeping: what passes, what waits, what is forgotten. What text looks like is OutputText's."""

from __future__ import annotations

import random
import threading

from baton.entrypoints.http_statuses import status_of
from baton.runtime.channels import Endpoints, Receiver, Sender
from baton.runtime.detokenizer import Detokenizer, run_detokenizer
from baton.runtime.messages import (
    ControlReply,
    DetokenizeParams,
    RequestError,
    TextOutputs,
    TokenOutput,
    TokenOutputs,
    ToManager,
    WorkerReady,
)
from baton.runtime.stop_signal import StopSignal
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.outcome import FinishReason
from baton.scheduler.stats import SchedulerStats
from baton.scheduler.token_buffer import pack_ids
from tests.doubles.byte_tokenizer import EOS_ID


def feed(detokenizer: Detokenizer, *outputs: TokenOutput) -> list[str]:
    (answer,) = detokenizer.handle_message(TokenOutputs(items=list(outputs)))
    assert isinstance(answer, TextOutputs)
    assert [item.output for item in answer.items] == list(outputs)
    return [item.text for item in answer.items]


def output(rid: str, ids: bytes | list[int], *, index: int = 0, first: bool = False, stream: bool = True,
           finish: FinishReason | None = None, stop: tuple[str, ...] = ()) -> TokenOutput:  # fmt: skip
    params = DetokenizeParams(stream=stream, stop=stop) if first else None
    return TokenOutput(rid=rid, index=index, new_ids=pack_ids(list(ids)), params=params, finish=finish)


LENGTH = FinishReason("length")


def test_interleaved_samples_keep_their_own_text(tokenizer: Tokenizer) -> None:
    seed = 3
    rng = random.Random(seed)
    detokenizer = Detokenizer(tokenizer)
    texts = {(f"r{i % 3}", i // 3): "".join(rng.choices("aé中😀 \n", k=30)) for i in range(9)}
    left = {key: list(text.encode()) for key, text in texts.items()}
    got = dict.fromkeys(texts, "")
    fresh = set(texts)
    while left:
        for key in [key for key in left if rng.random() < 0.5]:
            count = rng.randint(1, 5)
            ids, left[key] = left[key][:count], left[key][count:]
            finish = None if left[key] else LENGTH
            (text,) = feed(detokenizer, output(key[0], ids, index=key[1], first=key in fresh, finish=finish))
            fresh.discard(key)
            assert "\ufffd" not in text, seed
            got[key] += text
            if finish:
                del left[key]
    assert got == texts, seed
    assert detokenizer.num_open == 0


def test_non_streamed_text_comes_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert feed(detokenizer, output("r", "né".encode()[:2], first=True, stream=False)) == [""]
    assert feed(detokenizer, output("r", "né".encode()[2:], finish=LENGTH)) == ["né"]


def test_stops_are_trimmed_with_and_without_streaming(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    matched = FinishReason("stop", matched="END")
    assert feed(detokenizer, output("a", b"x END", first=True, stream=False, stop=("END",), finish=matched)) == ["x "]
    pieces = [feed(detokenizer, output("b", [b], first=i == 0, stop=("END",)))[0] for i, b in enumerate(b"x EN")]
    assert pieces == ["x", " ", "", ""]
    assert feed(detokenizer, output("b", b"D", finish=matched)) == [""]
    eos = FinishReason("stop", matched=EOS_ID)
    assert feed(detokenizer, output("c", [120, EOS_ID], first=True, finish=eos)) == ["x"]


def test_search_results_come_at_once_with_own_texts(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    ends = [FinishReason("stop", matched="item"), FinishReason("stop", matched="END"), FinishReason("abort")]
    results = [
        output("s", ids, index=rank, first=True, stop=("END",), stream=False, finish=finish)
        for rank, (ids, finish) in enumerate(zip((b"an item", b"x END", b""), ends))
    ]
    assert feed(detokenizer, *results) == ["an item", "x ", ""]
    assert detokenizer.num_open == 0


def test_an_abort_releases_the_held_back_text(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert feed(detokenizer, output("r", b"x EN", first=True, stop=("END",))) == ["x "]
    assert feed(detokenizer, output("r", b"", finish=FinishReason("abort"))) == ["EN"]


def test_an_error_forgets_all_samples_of_its_request(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    feed(detokenizer, *(output(rid, b"x", index=i, first=True) for rid in "ab" for i in range(3)))
    error = RequestError(rid="a", message="m")
    assert detokenizer.handle_message(error) == [error]
    assert detokenizer.num_open == 3


def test_detokenizer_failure_fails_only_its_request(tokenizer: Tokenizer) -> None:
    """A stop string the ids do not hold stands for any disagreement between worker and detokenizer."""
    detokenizer = Detokenizer(tokenizer)
    wrong = output("bad", b"abc", first=True, stop=("END",), finish=FinishReason("stop", matched="END"))
    answers = detokenizer.handle_message(TokenOutputs(items=[wrong, output("good", b"x", first=True, finish=LENGTH)]))
    texts, error = answers
    assert isinstance(texts, TextOutputs) and [item.text for item in texts.items] == ["x"]
    assert isinstance(error, RequestError) and (error.rid, status_of(error)) == ("bad", 500)
    assert detokenizer.num_open == 0


def test_other_messages_pass_detokenizer_in_order(tokenizer: Tokenizer) -> None:
    endpoints = Endpoints.for_threads()
    stop = StopSignal()
    thread = threading.Thread(target=run_detokenizer, args=(tokenizer, endpoints, stop))
    thread.start()
    inbox: Receiver[ToManager] = Receiver(endpoints.to_manager, ToManager)
    sender = Sender(endpoints.to_detokenizer)
    sent = [
        WorkerReady(info=b"{}"),
        SchedulerStats(steps=3),
        ControlReply(call_id=1),
        RequestError(rid="r", message="m"),
    ]
    for message in sent:
        sender.send(message)
    got: list[ToManager] = []
    while len(got) < len(sent):
        got += inbox.poll(5)
    assert got == sent
    stop.set()
    sender.wake()
    thread.join(60)
    assert not thread.is_alive()
    sender.close()
    inbox.close()
