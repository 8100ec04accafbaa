"""A model in one dtype: all its engines, or their servers, loaded together and taking turns unit by unit."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from benchmarks.peers.driver import Driver, EngineFailed, Process
from benchmarks.peers.engines import LARGE, OURS, SMALL, Engine, Room
from benchmarks.peers.http_load import serving
from benchmarks.peers.models import REAL_MODEL, make_for, make_model
from benchmarks.peers.plan import Unit, takes_part
from benchmarks.peers.results import Results, Row, agreement
from benchmarks.peers.work import Ask, Found, Ids, Prompts

SETTLE_S = 0.5
"""Before each turn: threads of the engine before may spin for a while."""


@dataclass(frozen=True)
class Settings:
    """Settings of a whole run. limit_s: time limit of an answer, and of a start."""

    cores: list[int]
    work: Path
    rounds: int
    seed: int
    limit_s: float
    llamacpp: str | None = None
    """The python of an environment with ggml, which quantises."""
    real_model: Path = REAL_MODEL


class Session:
    """Engines start when they are first needed, and anew after they failed; a unit that failed is not tried again."""

    def __init__(self, model: str, dtype: str, engines: Sequence[Engine], settings: Settings, results: Results) -> None:
        self._model, self._dtype = model, dtype
        self._engines, self._settings, self._results = engines, settings, results
        self._folder = make_model(model, settings.work, settings.real_model)
        self._vocab_size: int = json.loads((self._folder / "config.json").read_text())["vocab_size"]
        self._drivers: dict[str, Driver] = {}
        self._servers: dict[str, tuple[str, Process]] = {}
        self._room = LARGE

    def run(self, units: Sequence[Unit]) -> None:
        """All engines that the units of a kind need are loaded anew for them."""
        for room in (LARGE, SMALL):
            for over_http in (False, True):
                chosen = [unit for unit in units if unit.room is room and (unit.load is not None) == over_http]
                self._run([unit for unit in chosen if unit.suits(self._dtype)], room)

    def _run(self, units: Sequence[Unit], room: Room) -> None:
        self._room = room
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            self._rounds(units, stack)

    def _rounds(self, units: Sequence[Unit], stack: contextlib.ExitStack) -> None:
        if not units:
            return
        turns = list(itertools.product(range(self._settings.rounds), units))
        title = f"{self._model} {self._dtype}"
        for number, unit in tqdm(turns, title, unit="unit", disable=None):
            outputs: dict[str, list[Ids]] = {}
            engines = [engine for engine in self._engines if takes_part(engine, unit, self._dtype)]
            for engine in engines if number % 2 == 0 else engines[::-1]:
                place = {"model": self._model, "dtype": self._dtype, "unit": unit.name, "round": number}
                found = self._turn(unit, engine, place, stack)
                if found is not None:
                    outputs[engine.name] = found.greedy
            self._compare(outputs, {"model": self._model, "dtype": self._dtype, "unit": unit.name, "round": number})
            self._results.save()

    def _turn(self, unit: Unit, engine: Engine, place: Row, stack: contextlib.ExitStack) -> Found | None:
        failed = self._results.failed(self._model, self._dtype, unit.name, engine.name)
        if failed or self._results.done(place, engine.name):
            return None
        prompts = Prompts((self._settings.seed, place["round"], zlib.crc32(unit.name.encode())), self._vocab_size)
        process: Process | None = None
        try:
            if unit.run is not None:
                ask = self._ask(engine)
                time.sleep(SETTLE_S)
                found = unit.run(ask, prompts)
                held = self._drivers[engine.name].memory() if unit.memory else {}
            else:
                assert unit.load is not None
                url, process = self._server(engine, unit.name, stack)
                time.sleep(SETTLE_S)
                found = unit.load(url, prompts, self._settings.limit_s)
                held = process.memory() if unit.memory else {}
        except EngineFailed as failure:
            failure = process.failed(failure.reason) if process else failure
            if unit.run is not None:
                self._drop(engine)  # what it was doing may still be in it
            self._results.fail(place, engine.name, failure.reason, failure.last_lines)
            tqdm.write(f"{engine.name} failed at {unit.name}: {failure.reason}")
            return None
        figures = found.figures | dict(zip(unit.memory, (held.get("now", 0), held.get("peak", 0))))
        extra = found.extra | ({"proportional_mb": held["proportional"]} if held else {})
        self._results.add_figures(place, engine.name, figures, extra, os.getloadavg()[0])
        return found

    def _compare(self, outputs: dict[str, list[Ids]], place: Row) -> None:
        ours = outputs.pop(OURS, [])
        for name, theirs in outputs.items():
            if ours and theirs and all(theirs):  # some have no ids
                self._results.agree(place, name, agreement(ours, theirs))

    # -- engines -------------------------------------------------------------------------------------------------------

    def _log(self, engine: Engine, kind: str) -> Path:
        return self._settings.work / "logs" / f"{engine.name}-{self._model}-{self._dtype}-{kind}.log"

    def _ask(self, engine: Engine) -> Ask:
        driver = self._drivers.get(engine.name)
        if driver is None:
            with self._starting(engine):
                driver = self._start(engine)
        return functools.partial(driver.ask, limit_s=self._settings.limit_s)

    def _start(self, engine: Engine) -> Driver:
        settings = self._settings
        make_for(engine, self._folder, self._dtype, settings.llamacpp)
        command = engine.command(self._folder, self._dtype, settings.cores, self._room)
        environment = engine.environment(settings.cores, settings.work)
        driver = Driver(command, environment, self._log(engine, "engine"), settings.limit_s)
        self._drivers[engine.name] = driver
        self._results.report["engines"].setdefault(engine.name, {}).update(driver.about)
        ask = functools.partial(driver.ask, limit_s=settings.limit_s)
        warm_up(ask, self._vocab_size, self._room is LARGE)
        if engine.name == OURS:  # which logs warnings alone
            self._results.warn(f"{self._model}, {self._dtype}", driver.said())
        return driver

    def _server(self, engine: Engine, unit: str, stack: contextlib.ExitStack) -> tuple[str, Process]:
        if engine.name not in self._servers:
            settings = self._settings
            log, room = self._log(engine, "server"), self._room
            with self._starting(engine, unit):
                make_for(engine, self._folder, self._dtype, settings.llamacpp)
                server = serving(
                    engine, self._folder, self._dtype, settings.cores, settings.work, log, settings.limit_s, room
                )
                self._servers[engine.name] = stack.enter_context(server)
        return self._servers[engine.name]

    @contextlib.contextmanager
    def _starting(self, engine: Engine, unit: str = "") -> Iterator[None]:
        """An engine that cannot start has failed at all units, and not at the one that happened to be first."""
        try:
            yield
        except EngineFailed as failure:
            place = {"model": self._model, "dtype": self._dtype, "unit": unit, "round": 0}
            self._results.fail(place, engine.name, f"at its start: {failure.reason}", failure.last_lines)
            raise

    def _drop(self, engine: Engine) -> None:
        if (driver := self._drivers.pop(engine.name, None)) is not None:
            driver.close()

    def _close(self) -> None:
        for engine in self._engines:
            self._drop(engine)
        self._servers.clear()  # the stack that they are in ends them


def warm_up(ask: Ask, vocab_size: int, searches: bool) -> None:
    """Prompts and batches of both kinds, before anything is timed."""
    prompts = Prompts((0,), vocab_size)
    rng = prompts.rng()
    for number, length, tokens in ((4, 600, 8), (1, 60, 24), (32, 60, 8)):
        for seed in (None, 1):
            requests = [{"ids": ids, "tokens": tokens, "seed": seed} for ids in prompts.make(rng, number, length)]
            ask("generate", requests=requests, stream=True)
    if searches:
        (ids,) = prompts.make(rng, 1, 60)
        ask("beam", requests=[{"ids": ids, "tokens": 3}], width=4, steps=3)
