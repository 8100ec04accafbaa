"""Jobs from files: both shapes, what is made of prompts that shrink, and files that are damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.entrypoints.simulate.work.job import SYSTEM_IDS, Turn
from baton.entrypoints.simulate.work.traces import TraceError, read_pools, read_trace
from baton.runtime.job_records import JobTraceFile
from baton.runtime.pool_sizes import PoolSizes
from tests.doubles.simulated import crowd, simulation, talk


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def turn(prompt: int, output: int, tool: str | None = None, tool_s: float = 0.0) -> dict[str, object]:
    return {"prompt_tokens": prompt, "output_tokens": output, "tool": tool, "tool_s": tool_s}


def test_plain_job_traces_are_read(tmp_path: Path) -> None:
    later = {"job_id": "late", "arrival": 12.5, "turns": [turn(5, 1)], "model": "any"}
    first = {
        "job_id": "first",
        "arrival": 10.0,
        "system_tokens": 30,
        "turns": [turn(50, 10, "ls", 0.5), turn(80, 5, "make", 3.0), turn(40, 2, "ls", 9.0)],
    }
    jobs = read_trace(write(tmp_path / "t.jsonl", later, "", first))
    assert [(job.name, job.arrival) for job in jobs] == [("first", 0.0), ("late", 2.5)]
    assert jobs[0].turns == (
        Turn(30, 20, 10, "ls", 0.5),
        Turn(59, 21, 5, "make", 3.0),  # 50 + 10 - 1 were known
        Turn(30, 10, 2),  # it shrank: all but the system prompt is new; and nothing follows its tool
    )
    assert [job.first_id for job in jobs] == [SYSTEM_IDS, SYSTEM_IDS + 20 + 9 + 21 + 4 + 10 + 1]


def test_scheduler_trace_reproduces_its_jobs(tmp_path: Path) -> None:
    made = crowd(6, rate=0.2)
    played = simulation(made, pool=20_000)
    played.scheduler.trace_jobs()
    played.run()
    read = read_trace(write(tmp_path / "t.jsonl", *played.scheduler.take_job_events()))
    assert len(read) == 6
    for before, after in zip(made, read):
        assert after.name == before.name
        assert [(t.prompt, t.output, t.tool) for t in after.turns] == [
            (t.prompt, t.output, t.tool) for t in before.turns
        ]
        for real, noted in zip(before.turns, after.turns):
            assert real.tool_s <= noted.tool_s <= real.tool_s + 1.0  # it is noted when the next step begins


def test_scheduler_trace_events_become_turns(tmp_path: Path) -> None:
    events = [
        {"event": "arrival", "job_id": "a", "time": 5.0, "rid": "1", "prompt_tokens": 20},
        {"event": "arrival", "job_id": "b", "time": 6.0, "rid": "2", "prompt_tokens": 9},
        {
            "event": "departure",
            "job_id": "a",
            "time": 7.0,
            "rid": "1",
            "hit_tokens": 8,
            "output_tokens": 3,
            "tool": "x",
        },
        {"event": "pinned", "job_id": "a", "time": 7.0, "ttl": 2.0},
        {"event": "unpinned", "job_id": "a", "time": 9.0, "reason": "expired"},
        {"event": "arrival", "job_id": "a", "time": 10.5, "rid": "3", "prompt_tokens": 30},
        {"event": "departure", "job_id": "a", "time": 12.0, "rid": "3", "output_tokens": 2, "is_last_step": True},
        {"event": "arrival", "job_id": "a", "time": 13.0, "rid": "4", "prompt_tokens": 50},
        {"event": "departure", "job_id": "a", "time": 13.5, "rid": "4", "reason": "abort"},
    ]
    (job,) = read_trace(write(tmp_path / "t.jsonl", *events))
    assert job.name == "a" and job.arrival == 0.0
    assert job.turns == (Turn(8, 12, 3, "x", 3.5), Turn(22, 8, 2))


def test_overlapping_requests_of_a_job_become_sequential(tmp_path: Path) -> None:
    """The time of the first one's tool ends with the first that comes then."""
    events = []
    for rid, came, left in (("1", 0.0, 1.0), ("2", 3.0, 8.0), ("3", 4.0, 6.0)):
        events.append({"event": "arrival", "job_id": "a", "time": came, "rid": rid, "prompt_tokens": 9})
        events.append({"event": "departure", "job_id": "a", "time": left, "rid": rid, "output_tokens": 2})
    events.sort(key=lambda event: event["time"])
    (job,) = read_trace(write(tmp_path / "t.jsonl", *events))
    assert [turn.tool_s for turn in job.turns] == [2.0, 0.0, 0.0]


def test_first_finished_output_of_a_request_is_replayed(tmp_path: Path) -> None:
    first = {"event": "arrival", "job_id": "a", "time": 0.0, "rid": "1", "prompt_tokens": 9}
    ends = [
        {"event": "departure", "job_id": "a", "time": left, "rid": "1", "index": index, "output_tokens": size}
        for left, index, size in ((2.0, 1, 5), (2.5, 0, 6), (3.0, 2, 7))
    ]
    again = [{**first, "time": 6.0}, {**ends[0], "time": 7.0}]  # ids are used again
    (job,) = read_trace(write(tmp_path / "t.jsonl", first, *ends, *again))
    assert [(turn.output, turn.tool_s) for turn in job.turns] == [(5, 4.0), (5, 0.0)]
    with pytest.raises(TraceError, match="line 5: request '1' of job 'a' departs, but has not arrived"):
        read_trace(write(tmp_path / "t.jsonl", first, *ends, ends[1]))


def test_reused_job_id_is_another_job(tmp_path: Path) -> None:
    """After its last step, and after the server was started again."""
    events: list[dict[str, object]] = []
    for start, is_last in ((0.0, True), (50.0, False), (100.0, True)):
        if start == 100.0:
            events.append({"event": "start", "time": 90.0, "unix_time": 1e9})
        for rid, at in (("1", start), ("2", start + 3)):
            ends: dict[str, object] = {"is_last_step": is_last and rid == "2"}
            events.append({"event": "arrival", "job_id": "a", "time": at, "rid": rid, "prompt_tokens": 9} | ends)
            events.append({"event": "departure", "job_id": "a", "time": at + 1, "rid": rid, "output_tokens": 2} | ends)
    jobs = read_trace(write(tmp_path / "t.jsonl", *events))
    assert [(job.arrival, [turn.tool_s for turn in job.turns]) for job in jobs] == [
        (start, [2.0, 0.0]) for start in (0.0, 50.0, 100.0)
    ]


def test_truncated_last_line_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "t.jsonl", GOOD)
    with path.open("a") as file:
        file.write('{"job_id": "b", "arr')  # a server was killed
    assert len(read_trace(path)) == 1 and "t.jsonl, line 2 was cut off" in capsys.readouterr().err


GOOD = {"job_id": "a", "arrival": 0.0, "turns": [turn(5, 1)]}
BAD = {"job_id": "b", "arrival": 1, "turns": [turn(1, 1), turn(0, 1)]}
ARRIVAL = {"event": "arrival", "job_id": "a", "time": 0.0, "rid": "1", "prompt_tokens": 3}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([GOOD, '{"job_id": "b", "arr', GOOD], "line 2: "),
        ([GOOD, {"job_id": "b", "turns": [turn(1, 1)]}], "line 2: .*arrival"),
        (
            [GOOD, "", {"job_id": "b", "arrival": 1, "turns": [turn(1, 1), turn(0, 1)]}],
            r"line 3: prompt_tokens is 0 .*turns\[1\]",
        ),
        ([GOOD, {"job_id": "b", "arrival": 1, "turns": [turn(3, 1, "ls", -1.0)]}], "line 2: tool_s is -1"),
        ([GOOD, {"job_id": "b", "arrival": 1, "turns": []}], "line 2: turns is empty"),
        ([GOOD, {"job_id": "b", "arrival": 1, "turns": [turn(3, 1)], "system_tokens": -4}], "system_tokens is -4"),
        ([GOOD, GOOD], "line 2: job_id 'a' is that of line 1"),
        ([[1]], "line 1: "),
        ([{"job_id": "a"}], "line 1: neither"),
        ([ARRIVAL, {"event": "departure", "job_id": "b", "rid": "1"}], "line 2: job 'b' departs"),
        ([ARRIVAL, {"event": "departure", "job_id": "a", "rid": "9"}], "line 2: request '9' of job 'a' departs"),
        ([ARRIVAL, {"event": "departure", "job_id": "a", "time": "noon"}], r"line 2: .*\$.time"),
        ([ARRIVAL], "no job in it has a turn that ended"),
        ([], "no line"),
    ],
)
def test_malformed_trace_lines_are_named(tmp_path: Path, lines: list[object], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        read_trace(write(tmp_path / "t.jsonl", *lines))


def test_pools_of_a_trace_are_read_as_the_server_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    sizes = PoolSizes(tokens=640, page_size=16, bytes_per_token=0, states=9, bytes_per_state=96, host_states=20)
    for tokens in (320, 640):  # the server was started again
        file = JobTraceFile(str(path), 1.0)
        file.write_pools(PoolSizes(tokens=tokens, page_size=16, bytes_per_token=8) if tokens == 320 else sizes, 2.0)
        file.write([ARRIVAL, ARRIVAL | {"event": "departure", "output_tokens": 2}])
        file.close()
    assert read_pools(path) == sizes
    assert [job.name for job in read_trace(path)] == ["a", "a"]
    assert read_pools(write(tmp_path / "old.jsonl", ARRIVAL)) is None
    assert read_pools(write(tmp_path / "plain.jsonl", GOOD | {"job_id": "pools"})) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": 0}, "line 2: tokens and page_size are 1 or more"),
        ({"states": -1}, "other sizes 0 or more"),
        ({"page_size": "x"}, r"line 2: .*\$\.page_size"),
        ({"window": 64, "window_tokens": 32}, "window_tokens is 32, but window 64"),
    ],
)
def test_malformed_pools_are_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    pools = {"event": "pools", "time": 0.0, "tokens": 64, "page_size": 1, "bytes_per_token": 8} | change
    with pytest.raises(TraceError, match=said):
        read_pools(write(tmp_path / "t.jsonl", ARRIVAL, pools))


def test_missing_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")


def test_job_without_tools_is_simulated(tmp_path: Path) -> None:
    jobs = read_trace(write(tmp_path / "t.jsonl", GOOD))
    (record,) = simulation(jobs).run()
    assert record.duration == 1.0 and talk("a", 0.0, (5, 1, 0.0)).turns[0].prompt == 5
