"""Many runs: in parallel, in pieces, and resumed. Each run is a line of a file; runs that the file has are not
repeated.

Loads are given in percent of a cell's peak, which is found here: the highest rate at which fcfs completes jobs, at any
arrival rate. The arrival rate is doubled until less than nine tenths of the jobs are completed; the last doubling is
then tried in smaller steps. Completions count in the second half of the arrivals, with no host tier and seed 0.

How many recurrent states are enough is found likewise: their number is doubled until a run loses at most `LOST` of its
prompt tokens more to ``no_state`` than with a state for every place where one is left, and the last doubling is tried
in smaller steps. The KV pool stays as it is.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from .job_records import completion_rate
from .runs import Plan, make_simulation, run

Line = dict[str, Any]

STEPS_PER_DOUBLING = 4

LOST = 0.01
"""Share of the prompt tokens."""

LEAST_STATES = 4
STATES_PER_TURN = 4
"""A turn leaves one at its end, one before its last token or behind its last message, and perhaps one where it parts
from another; and a sequence that runs writes beside the one that it began from."""


class RunLines:
    """Results by key: in memory, and in a file if there is one."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[str, Line] = {}
        if path is not None and path.exists():
            self._read_lines(path)

    def _read_lines(self, path: Path) -> None:
        content, damaged = path.read_text(), 0
        for line in content.splitlines():
            try:
                found = json.loads(line)
                self._known[found["key"]] = found
            except (ValueError, KeyError, TypeError):
                damaged += 1
        if damaged:  # a run was cut short
            print(f"{damaged} lines of {path} are damaged; what they held is run again", file=sys.stderr)
        if content and not content.endswith("\n"):
            with path.open("a") as file:
                file.write("\n")

    def get_line(self, key: str) -> Line | None:
        return self._known.get(key)

    def add_line(self, key: str, line: Line) -> None:
        line = {"key": key, **line}
        self._known[key] = line
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def run_all(plans: Sequence[Plan], lines: RunLines, *, processes: int, most: int = 0) -> list[Line]:
    """The results of these plans that exist after this call, in the order of the plans. most: limit of new runs; 0:
    all."""
    missing = list({plan.key: plan for plan in plans if lines.get_line(plan.key) is None}.values())
    for plan, result in _each(run, missing[: most or None], processes, "simulating", "run"):
        lines.add_line(plan.key, result)
    return [line for plan in plans if (line := lines.get_line(plan.key)) is not None]


def find_peaks(plans: Iterable[Plan], minutes: float, lines: RunLines, *, processes: int) -> dict[str, float]:
    """The peak of each of these cells, in jobs/s, by the key of its `peak_plan`."""
    wanted = {plan.key: plan for plan in (peak_plan(plan, minutes) for plan in plans)}
    missing = [plan for key, plan in wanted.items() if lines.get_line("peak " + key) is None]
    for plan, found in _each(find_peak, missing, processes, "finding peaks", "cell"):
        lines.add_line("peak " + plan.key, found)
    return {key: line["peak"] for key in wanted if (line := lines.get_line("peak " + key)) is not None}


def peak_plan(plan: Plan, minutes: float) -> Plan:
    """The plan that identifies the search for the peak of a plan's cell. Its ``rate`` is the minutes of arrivals of
    each trial."""
    return msgspec.structs.replace(plan, arm="fcfs", seed=0, host_gb=0.0, num_jobs=0, rate=minutes, check_every=0)


def find_peak(plan: Plan) -> Line:
    """plan: a `peak_plan`."""
    minutes, tried = plan.rate, dict[float, float]()

    def keeps_up(rate: float) -> bool:
        count = jobs_in(minutes, rate)
        simulation = make_simulation(msgspec.structs.replace(plan, rate=rate, num_jobs=count))
        tried[rate], share = completion_rate(simulation.run())
        return share >= 0.9

    rate = 0.25
    while not keeps_up(rate) and rate > 1e-3:
        rate /= 4
    while keeps_up(2 * rate) and rate < 1e4:
        rate *= 2
    for step in range(1, STEPS_PER_DOUBLING):
        keeps_up(rate * 2 ** (step / STEPS_PER_DOUBLING))
    return {"peak": max(tried.values()), "tried": sorted(tried.items())}


def find_states(plans: Iterable[Plan], lines: RunLines, *, processes: int) -> list[Line]:
    """What `find_enough_states` returns for each of these runs, once for those that differ in states and seed alone."""
    wanted = {plan.key: plan for plan in map(states_plan, plans)}
    missing = [plan for key, plan in wanted.items() if lines.get_line("states " + key) is None]
    for plan, found in _each(find_enough_states, missing, processes, "finding states", "cell"):
        lines.add_line("states " + plan.key, found)
    return [line for key in wanted if (line := lines.get_line("states " + key)) is not None]


def states_plan(plan: Plan) -> Plan:
    """The plan that identifies the search for the states that are enough for a run."""
    return msgspec.structs.replace(plan, states=0, seed=0, check_every=0)


def find_enough_states(plan: Plan) -> Line:
    """plan: a `states_plan`. Returns the plan, the number of states, and (number, share of the prompt tokens that are
    lost to ``no_state``) for each that was tried, the last with a state for every place."""
    simulation, tried = make_simulation(plan), dict[int, float]()
    most = STATES_PER_TURN * sum(len(record.job.turns) for record in simulation.records)
    plan = msgspec.structs.replace(plan, pool=simulation.pools.tokens)

    def lost(states: int) -> float:
        figures = run(msgspec.structs.replace(plan, states=states))["figures"]
        tried[states] = figures["no_state_share"]
        return tried[states]

    limit = lost(most) + LOST
    enough = LEAST_STATES
    while enough < most and lost(enough) > limit:
        enough *= 2
    for step in range(1, STEPS_PER_DOUBLING):
        fewer = round(enough / 2 * 2 ** (step / STEPS_PER_DOUBLING))
        if LEAST_STATES < fewer < most and lost(fewer) <= limit:
            enough = fewer
            break
    return {"plan": msgspec.to_builtins(plan), "states": min(enough, most), "tried": sorted(tried.items())}


def jobs_in(minutes: float, rate: float) -> int:
    """Jobs that arrive in so many minutes, at least 100."""
    return max(100, round(60 * minutes * rate))


def _each(
    work: Callable[[Plan], Line], plans: Sequence[Plan], processes: int, what: str, unit: str
) -> Iterator[tuple[Plan, Line]]:
    """(plan, result) in order of completion. With one process or one plan the work is done in this process."""
    progress = tqdm(total=len(plans), desc=what, unit=unit, disable=None if plans else True)
    with progress:
        if processes <= 1 or len(plans) <= 1:
            for plan in plans:
                yield plan, work(plan)
                progress.update()
            return
        context = multiprocessing.get_context("spawn")
        count = min(processes, len(plans))
        with ProcessPoolExecutor(count, mp_context=context, initializer=_follow_parent) as pool:
            running: dict[Future[Line], Plan] = {pool.submit(work, plan): plan for plan in plans}
            try:
                for future in as_completed(running):
                    yield running[future], future.result()
                    progress.update()
            except BaseException:  # the pool would wait for the runs under way, for minutes
                for process in multiprocessing.active_children():
                    process.terminate()
                pool.shutdown(cancel_futures=True)  # its thread ends here: at exit, Python 3.11 may wake a closed one
                raise


def _follow_parent() -> None:
    """In a process of the pool: leave Ctrl-C to the parent, and end with it, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()
