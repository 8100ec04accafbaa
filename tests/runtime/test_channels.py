"""Channels carry the messages they were given, in order, between threads and between processes, and nothing else."""

from __future__ import annotations

import asyncio
import pickle
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import uvloop
import zmq

from baton.runtime import messages
from baton.runtime.channels import (
    AsyncReceiver,
    ChannelError,
    Endpoints,
    Receiver,
    Sender,
    Waker,
    make_run_dir,
    run_dir_candidates,
)
from baton.scheduler.jobs.calls import ToolCall
from baton.scheduler.live_view.reports import RunningNow
from baton.scheduler.outcome import FinishReason, FoundTokens
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.token_buffer import pack_ids


class Number(msgspec.Struct, tag=True):
    value: int


class Word(msgspec.Struct, tag=True):
    value: str


@pytest.fixture(params=["threads", "unix sockets", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    run_dir = make_run_dir(run_dir_candidates())
    made = {
        "threads": Endpoints.for_threads,
        "unix sockets": lambda: Endpoints.for_processes(run_dir),
        "tcp": lambda: Endpoints.for_processes(tmp_path / ("x" * 120)),  # too long a path for a Unix socket
    }
    endpoints = made[request.param]()
    scheme = {"threads": "inproc", "unix sockets": "ipc", "tcp": "tcp"}[request.param]
    assert endpoints.to_worker.startswith(f"{scheme}://")
    assert len(set(msgspec.structs.astuple(endpoints))) == 3
    yield endpoints.to_worker
    shutil.rmtree(run_dir)


def collect(receiver: Receiver, count: int) -> list:
    got: list = []
    while len(got) < count:
        more = receiver.poll(5)
        assert more, f"only {len(got)} of {count} messages arrived"
        got += more
    return got


def test_messages_arrive_in_order(address: str) -> None:
    sender = Sender(address)  # before a receiver exists
    receiver: Receiver[Number | Word] = Receiver(address, Number | Word)
    sent = [Number(i) if i % 3 else Word("é" * i) for i in range(3000)]
    for message in sent:
        sender.send(message)
    assert collect(receiver, len(sent)) == sent
    assert receiver.poll() == []
    sender.close()
    receiver.close()


def test_a_sender_may_hold_its_messages(address: str) -> None:
    receiver: Receiver[Number] = Receiver(address, Number)
    sender = Sender(address)
    sender.send(Number(0))
    sender.holds = True
    sender.send(Number(1))
    sender.send(Number(2))
    assert collect(receiver, 1) == [Number(0)] and receiver.poll(0.05) == []
    sender.flush()
    sender.send(Number(3))
    assert collect(receiver, 2) == [Number(1), Number(2)]
    sender.close()
    assert collect(receiver, 1) == [Number(3)], "nothing is lost at the end"
    receiver.close()


def test_sleeping_receiver_wakes_on_message_or_wake_up(address: str) -> None:
    receiver: Receiver[Number] = Receiver(address, Number)
    sender = Sender(address)
    got: list = []
    first = threading.Event()

    def receive() -> None:
        got.append(receiver.poll(30))
        first.set()
        got.append(receiver.poll(30))

    thread = threading.Thread(target=receive)
    thread.start()
    sender.send(Number(1))
    assert first.wait(60)
    sender.wake()
    thread.join(60)
    assert not thread.is_alive()
    assert got == [[Number(1)], []]
    sender.close()
    receiver.close()


def test_asynchronous_receiver(address: str) -> None:
    async def run() -> list:
        receiver: AsyncReceiver[Number] = AsyncReceiver(address, Number)
        sender = Sender(address)
        got: list = []
        for start in range(0, 1000, 250):
            asyncio.get_running_loop().call_later(
                0.01, lambda s=start: [sender.send(Number(s + i)) for i in range(250)]
            )
            while len(got) < start + 250:
                got += await asyncio.wait_for(receiver.receive(), 5)
        sender.wake()
        assert await asyncio.wait_for(receiver.receive(), 5) == []
        sender.close()
        receiver.close()
        return got

    assert uvloop.run(run()) == [Number(i) for i in range(1000)]


def test_messages_sent_before_close_arrive(address: str) -> None:
    receiver: Receiver[Number] = Receiver(address, Number)
    sender = Sender(address)
    for i in range(100):
        sender.send(Number(i))
    sender.close()
    assert len(collect(receiver, 100)) == 100
    receiver.close()


def test_sender_does_not_block_on_closed_receiver(address: str) -> None:
    receiver: Receiver[Number] = Receiver(address, Number)
    sender = Sender(address)
    sender.send(Number(0))
    collect(receiver, 1)
    receiver.close()
    for i in range(100):
        sender.send(Number(i))
        sender.wake()
    sender.close()


@pytest.mark.parametrize("frame", [b"\xc1", pickle.dumps(Number), b"\x81\xa4type\xa4Nope", b"\x00" * 100])
def test_foreign_frames_are_refused(frame: bytes) -> None:
    address = Endpoints.for_threads().to_worker
    receiver: Receiver[Number] = Receiver(address, Number)
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(address)
    socket.send(frame)
    with pytest.raises(ChannelError, match=f"a frame of {len(frame)} bytes it does not accept"):
        receiver.poll(5)
    # It goes on with the next.
    socket.send(msgspec.msgpack.encode(Number(3)))
    assert receiver.poll(5) == [Number(3)]
    socket.close(linger=0)
    receiver.close()


def test_binding_an_address_twice_is_an_error() -> None:
    address = Endpoints.for_threads().to_worker
    first: Receiver[Number] = Receiver(address, Number)
    with pytest.raises(ChannelError, match="cannot bind inproc://"):
        Receiver(address, Number)
    first.close()


def test_run_dir_is_private() -> None:
    folder = make_run_dir(run_dir_candidates())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not list(folder.iterdir())
    folder.rmdir()


def test_run_dir_avoids_folders_where_a_socket_path_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 110)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path.parent.parent.parent))
    folder = make_run_dir(run_dir_candidates())
    assert folder.parent != deep and not list(deep.iterdir())
    folder.rmdir()


def test_the_fallback_to_tcp_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    deep = tmp_path / ("x" * 110)
    deep.mkdir()
    endpoints = Endpoints.for_processes(deep / "run")
    assert all(address.startswith("tcp://127.0.0.1:") for address in msgspec.structs.astuple(endpoints))
    assert "loopback TCP" in caplog.text and str(deep) in caplog.text


def example(kind: type) -> msgspec.Struct:
    """A message with every field set to something that is not its default."""
    ids = pack_ids([1, 2, 3])
    chunk = messages.LogprobChunk(ids=ids, values=b"\0" * 12, top_ids=ids, top_values=b"\1" * 12)
    params = messages.DetokenizeParams(skip_special_tokens=False, stop=("a", "b"), no_stop_trim=True, stream=True)
    output = messages.TokenOutput(
        rid="r", index=2, new_ids=ids, prompt_tokens=5, found=FoundTokens(1, 2, 3, 4), completion_tokens=3,
        params=params, finish=FinishReason("stop", matched="x"), input_logprobs=chunk, output_logprobs=chunk,
        beam=messages.BeamOutput(sequence_score=-1.5, cumulative_logprob=-3.0, num_results=2, shortfall="few"),
    )  # fmt: skip
    sampling = SamplingParams(stop=("x",), logit_bias={3: 1.5}, beam_width=4, early_stopping="never", n=2)
    examples = {
        "RequestSpec": {"rid": "r", "input_ids": ids, "sampling": sampling, "namespace": "n", "stream": True},
        "AbortRequest": {"rid": None},
        "ControlRequest": {"call_id": 1, "verb": "info"},
        "LoadItemTrie": {"call_id": 1, "name": "t", "edges": b"\2" * 16, "num_items": 2, "min_depth": 1, "max_depth": 3,
                         "max_token": 9},
        "DeleteItemTrie": {"call_id": 1, "name": "t"},
        "LoadAdapter": {"call_id": 1, "name": "sql", "path": "/adapters/sql"},
        "UnloadAdapter": {"call_id": 1, "name": "sql"},
        "ReleaseRequest": {"call_id": 1, "rid": "a"},
        "StepCalls": {"rid": "r", "index": 1, "calls": (ToolCall("ls", "ls -l"), ToolCall("é"))},
        "PrepareTurn": {"rid": "r", "index": 1, "ids": ids},
        "EndJob": {"call_id": 1, "namespace": "n", "job_id": "j"},
        "DescribeJobs": {"call_id": 1, "namespace": "n", "job_id": "j"},
        "DescribeLeases": {"call_id": 1, "after": -1, "limit": 100},
        "WatchRequests": {"seconds": 2.5},
        "WalkTree": {"with_heads": True},
        "WatchReport": {
            "t": 1.5, "num_leases": 3, "is_last": True,
            "running": [RunningNow(rid="r", phase="decode", computed=3, total=4, output=5, job_id="j")],
        },
        "TreeRows": {"is_first": True, "rows": b"\3" * 8, "heads": ids, "names": ("", "n"),
                     "end": messages.WalkEnd(began=1.0, ended=2.0, complete=False, ticks=b"\4" * 8,
                                         seconds=b"\5" * 8, ended_at=3.0)},
        "TokenOutputs": {"items": [output]},
        "TextOutputs": {"items": [messages.TextOutput(output=output, text="é")]},
        "RequestError": {"rid": "r", "message": "m", "param": "p"},
        "ControlReply": {"call_id": 1, "ok": False, "payload": b"1"},
        "StartPhase": {"phase": "loading"},
        "WorkerReady": {"info": b"{}"},
        "SchedulerStats": {"steps": 5},
    }  # fmt: skip
    return kind(**examples[kind.__name__])


@pytest.mark.parametrize("union", [messages.ToWorker, messages.FromWorker, messages.ToManager])
def test_every_channel_message_round_trips(union: object) -> None:
    address = Endpoints.for_threads().to_worker
    receiver: Receiver = Receiver(address, union)
    sender = Sender(address)
    sent = [example(kind) for kind in get_args(union)]
    for message in sent:
        sender.send(message)
    assert collect(receiver, len(sent)) == sent
    sender.close()
    receiver.close()


def test_waker_works_once_the_socket_file_is_removed() -> None:
    """The run directory may vanish between the start of a child and its first poll."""
    run_dir = make_run_dir(run_dir_candidates())
    address = Endpoints.for_processes(run_dir).to_worker
    receiver: Receiver[Number] = Receiver(address, Number)
    shutil.rmtree(run_dir)
    waker = Waker(address)
    poll = threading.Thread(target=receiver.poll, args=[30.0])
    poll.start()
    waker.wake()
    poll.join(timeout=10.0)
    was_woken = not poll.is_alive()
    poll.join()
    waker.close()
    receiver.close()
    assert was_woken


def test_waker_ends_poll_and_is_inert_after_close() -> None:
    address = "inproc://woken"
    receiver: Receiver[Number] = Receiver(address, Number)
    waker = Waker(address)
    thread = threading.Thread(target=waker.wake)
    thread.start()
    assert receiver.poll(30.0) == []
    thread.join()
    waker.close()
    waker.close()
    waker.wake()
    assert receiver.poll(0.0) == []
    receiver.close()
