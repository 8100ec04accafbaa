"""Engines take turns, and one that fails does not keep the others from going on."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import session
from benchmarks.peers.engines import (
    DRIVERS,
    DTYPES,
    LARGE,
    SMALL,
    VLLM,
    Baton,
    BatonGGUF,
    BatonQ4KM,
    Engine,
    LlamaCpp,
    LlamaCppQ4KM,
    OpenVINO,
    Room,
)
from benchmarks.peers.plan import QUICK, units
from benchmarks.peers.results import Results
from benchmarks.peers.session import Session, Settings

DOUBLES = Path(__file__).parents[2] / "doubles"
ABOUT: dict[str, Any] = {"commit": "abc", "processor": "A fast one", "cores": [0], "seed": 0, "quick": True}
UNITS = units(QUICK)


@dataclass(frozen=True, kw_only=True)
class Fake(Engine):
    """`tests/doubles/fake_peer.py` under another's name."""

    name: str  # type: ignore[assignment]
    trace: Path
    misbehaves: dict[str, Any] = field(default_factory=dict)
    python: str | None = sys.executable
    dtypes: tuple[str, ...] = DTYPES  # type: ignore[misc]
    searches: bool = True  # type: ignore[misc]

    def environment(self, cores: list[int], work: Path) -> dict[str, str]:
        return {"PYTHONPATH": str(DOUBLES)}

    def command(self, model: Path, dtype: str, cores: list[int], room: Room = LARGE) -> list[str]:
        settings = {"trace": str(self.trace), "name": self.name, "rows": room.rows, **self.misbehaves}
        return [str(self.python), str(DRIVERS / "serve.py"), "fake_peer", json.dumps(settings)]


class Scene:
    def __init__(self, work: Path) -> None:
        folder = work / "models" / "tiny"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"vocab_size": 500}')
        self.work, self.trace = work, work / "trace"
        self.results = Results(work / "peers.json", ABOUT, resume=False)

    def fake(self, name: str, at: str = "", what: str = "") -> Fake:
        return Fake(name=name, trace=self.trace, misbehaves={"at": at, "what": what})

    def run(
        self, names: Sequence[str], *engines: Engine, rounds: int = 1, limit_s: float = 60, dtype: str = "float32"
    ) -> None:
        settings = Settings([0], self.work, rounds, 0, limit_s)
        Session("tiny", dtype, engines, settings, self.results).run([UNITS[name] for name in names])

    def lines(self) -> list[str]:
        """Calls of the engines after the last warm-up, which ends with a search."""
        calls = self.trace.read_text().splitlines()
        return calls[max(place for place, call in enumerate(calls) if call.endswith(" beam")) + 1 :]

    def rows(self, engine: str) -> list[tuple[str, int]]:
        return [(row["unit"], row["round"]) for row in self.results.report["rows"] if row["engine"] == engine]

    def failures(self) -> list[tuple[str, str, str]]:
        return [(one["engine"], one["unit"], one["reason"]) for one in self.results.report["failures"]]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(session, "SETTLE_S", 0)
    return Scene(tmp_path)


def test_engine_order_alternates_between_rounds(scene: Scene) -> None:
    scene.run(["4x32"], scene.fake("baton"), scene.fake("other"), rounds=3)
    *_, a, b, c, d = scene.lines()
    assert [a, b, c, d] == ["other generate 4", "baton generate 4", "baton generate 4", "other generate 4"]
    assert scene.rows("baton") == scene.rows("other") == [("4x32", 0), ("4x32", 1), ("4x32", 2)]
    report = json.loads((scene.work / "peers.json").read_text())
    assert [row["equal"] for row in report["agreement"]] == [1.0] * 3 and report["agreement"][0]["engine"] == "other"
    assert report["warnings"] == ["tiny, float32: this library greets on stdout", *report["warnings"][1:]], "of ours"
    assert report["engines"] == {"baton": {"version": "1.2.3"}, "other": {"version": "1.2.3"}}


@pytest.mark.parametrize(("what", "reason"), [("raise", "RuntimeError: no room"), ("die", "ended with status 3")])
def test_failed_unit_is_skipped_and_others_still_run(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, what: str, reason: str
) -> None:
    """Not tried again in the next round; the engine is started anew for the next unit."""
    monkeypatch.setattr(session, "warm_up", lambda *_: None)
    scene.run(["beam-1", "prefill"], scene.fake("baton"), scene.fake("other", "beam", what), rounds=2)
    ((engine, unit, said),) = scene.failures()
    assert (engine, unit) == ("other", "beam-1") and reason in said
    assert scene.rows("other") == [("prefill", 0), ("prefill", 1)]
    assert scene.rows("baton") == [("beam-1", 0), ("prefill", 0), ("beam-1", 1), ("prefill", 1)]
    assert scene.results.report["failures"][0]["last_lines"]
    starts = [line for line in scene.trace.read_text().splitlines() if line.endswith("start")]
    assert sorted(starts) == ["baton start", "other start", "other start"]


def test_hung_unit_fails_and_next_unit_runs(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "warm_up", lambda *_: None)
    scene.run(["4x32", "prefill"], scene.fake("other", "generate", "hang"), limit_s=5)
    assert scene.failures() == [("other", "4x32", "no answer within 5 s")]
    assert scene.rows("other") == [("prefill", 0)]


def test_engine_that_fails_to_start_fails_every_unit(scene: Scene) -> None:
    scene.run(["prefill", "4x32"], scene.fake("other", "start", "die"), scene.fake("baton"))
    assert {(engine, unit) for engine, unit, _ in scene.failures()} == {("other", ""), ("other", "prefill")}
    assert scene.rows("baton") == [("prefill", 0), ("4x32", 0)] and not scene.rows("other")


def test_resumed_session_skips_measured_units(scene: Scene) -> None:
    scene.run(["prefill"], scene.fake("baton"))
    scene.results = Results(scene.work / "peers.json", ABOUT, resume=True)
    before = scene.trace.read_text()
    scene.run(["prefill"], scene.fake("baton"))
    assert scene.trace.read_text() == before, "nothing was even started"
    scene.run(["prefill"], scene.fake("baton"), rounds=2)
    assert scene.rows("baton") == [("prefill", 0), ("prefill", 1)]


def test_missing_peer_environments_are_named(tmp_path: Path) -> None:
    assert VLLM(python=None).missing() == "no --vllm names the python of its environment"
    gone = OpenVINO(python=str(tmp_path / "bin" / "python")).missing()
    assert gone is not None and gone.startswith("--openvino ") and gone.endswith("is no program")
    assert Baton().missing() is None


def test_engines_get_the_same_cores_and_dtype(tmp_path: Path) -> None:
    model = tmp_path / "models" / "A"
    for engine in (Baton(), VLLM(python="python"), OpenVINO(python="python")):
        settings = json.loads(engine.command(model, "bfloat16", [2, 3])[-1])
        assert settings["cores"] == [2, 3] and settings["dtype"] == "bfloat16" and settings["rows"] == 544
    assert Baton().environment([2, 3], tmp_path)["OMP_NUM_THREADS"] == "2"
    assert VLLM(python="python").environment([2, 3], tmp_path)["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert OpenVINO(python="python").weights(model, "float32") == tmp_path / "models" / "A-openvino"
    assert OpenVINO(python="python").weights(model, "int4") == tmp_path / "models" / "A-openvino-int4"


def test_units_about_weights_are_the_only_ones_of_small_weights_and_of_llama_cpp(scene: Scene) -> None:
    names = ["prefill", "decode", "prefill-48", "memory"]
    plain = Fake(name="other", trace=scene.trace, searches=False)
    scene.run(names, scene.fake("baton"), plain)
    assert [unit for unit, _ in scene.rows("other")] == ["decode"] * 2 + ["prefill-48"] + ["memory"] * 2
    assert [unit for unit, _ in scene.rows("baton")][:1] == ["prefill"]
    scene.run(names, scene.fake("baton"), Fake(name="floats", trace=scene.trace, dtypes=("float32",)), dtype="int4")
    units_of_int4 = {row["unit"] for row in scene.results.report["rows"] if row["dtype"] == "int4"}
    assert units_of_int4 == {"decode", "prefill-48", "memory"} and not scene.rows("floats")
    assert not scene.failures()


def test_decode_counts_tokens_of_all_streams_and_memory_is_the_process_tree(scene: Scene) -> None:
    scene.run(["decode", "memory"], scene.fake("baton"))
    figures = {row["metric"]: row["value"] for row in scene.results.report["rows"]}
    assert figures["decode, 1 stream"] == pytest.approx(1 / 0.003)
    assert figures["decode, 2 streams"] == pytest.approx(2 / 0.003)
    now, peak = figures["resident memory"], figures["resident memory, peak"]
    assert 5 < now <= peak < 2000, "a Python process"


def test_answers_without_ids_are_counted_and_not_compared(scene: Scene) -> None:
    other = Fake(name="other", trace=scene.trace, misbehaves={"without_ids": True})
    scene.run(["decode"], scene.fake("baton"), other)
    assert [unit for unit, _ in scene.rows("other")] == ["decode", "decode"]
    assert not scene.results.report["agreement"] and not scene.failures()


def test_formats_of_small_weights(tmp_path: Path) -> None:
    """Each engine is told its own word for a dtype, and nothing of what the others load."""
    model = tmp_path / "models" / "A"
    ours = json.loads(Baton().command(model, "int4", [0], SMALL)[-1])
    assert (ours["dtype"], ours["quantization"], ours["model"]) == ("float32", "int4", str(model))
    assert "quantization" not in json.loads(Baton().command(model, "bfloat16", [0])[-1])
    server = Baton().server(model, "int8", 1, SMALL)
    assert server[server.index("--quantization") + 1] == "int8" and server[server.index("--dtype") + 1] == "float32"
    folder = tmp_path / "models" / "A-gguf"
    files = {
        BatonGGUF().weights(model, "int8"): "Q8_0",
        BatonGGUF().weights(model, "int4"): "Q4_0",
        BatonQ4KM().weights(model, "int4"): "Q4_K_M",
    }
    assert files == {folder / f"{kind}.gguf": kind for kind in ("Q8_0", "Q4_0", "Q4_K_M")}
    peer = LlamaCpp(python="python")
    assert peer.weights(model, "bfloat16") == folder / "BF16.gguf" and LlamaCppQ4KM.dtypes == ("int4",)
    settings = json.loads(peer.command(model, "float32", [0, 1], SMALL)[-1])
    assert (settings["kv"], settings["n_ctx"], settings["n_parallel"]) == ("F32", SMALL.kv_tokens, SMALL.rows)
    assert "int8" not in VLLM.dtypes and set(OpenVINO.dtypes) == set(DTYPES)


def test_lowered_processor_holds_for_every_engine(tmp_path: Path) -> None:
    for engine in (Baton(level="avx2"), VLLM(python="p", level="avx2"), OpenVINO(python="p", level="avx2")):
        lowered = engine.environment([0], tmp_path)
        assert lowered["ONEDNN_MAX_CPU_ISA"] == "AVX2" and lowered["ATEN_CPU_CAPABILITY"] == "avx2"
        assert ("BATON_CPU_FEATURES" in lowered) == isinstance(engine, Baton)
    assert not {"ONEDNN_MAX_CPU_ISA", "BATON_CPU_FEATURES"} & Baton().environment([0], tmp_path).keys()
