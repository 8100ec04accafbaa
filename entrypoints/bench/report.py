"""The report of a benchmark: a table to read, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .apis import CONTINUATION, PREFIX
from .load import Record, Run
from .statistics import QUANTITIES, TIMES, Summary, by_turn, e2e_s, itl_s, savings, summarize, ttft_s

_ERRORS_SHOWN = 5
_TITLES = {PREFIX: "each turn sends the whole conversation", CONTINUATION: "each turn continues the one before it"}
_LABELS = {"ttft": "TTFT, ms", "tpot": "TPOT, ms", "itl": "ITL, ms", "e2e_latency": "E2E, ms"}


def make_report(about: dict[str, Any], runs: dict[str, Run], requests: int, turns: int) -> dict[str, Any]:
    """runs: by way. about: the settings, without keys. Plain data for JSON."""
    report: dict[str, Any] = {**about, "runs": {}}
    for way, run in runs.items():
        part = summarize(run, requests)
        if turns > 1:
            part["turns"] = by_turn(run.records)
        part["requests"] = [_request(record, run.began) for record in run.records]
        report["runs"][way] = part
    if len(runs) > 1:
        report["savings"] = savings(runs[PREFIX], runs[CONTINUATION])
    return report


def _request(record: Record, began: float) -> dict[str, Any]:
    answer = record.answer
    found = {"conversation": record.conversation, "turn": record.turn + 1, "start": answer.started - began}
    if record.error is not None:
        return {**found, "error": record.error}
    return {
        **found,
        "input_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "output_tokens": answer.output_tokens,
        "ttft_ms": ttft_s(answer) * 1e3,
        "e2e_latency_ms": e2e_s(answer) * 1e3,
        "itl_ms": [gap * 1e3 for gap in itl_s(answer)],
    }


def table(report: dict[str, Any]) -> str:
    lines: list[str] = []
    for way, part in report["runs"].items():
        title = f"\n{way}: {_TITLES[way]}" if "turns" in part else ""
        lines += [*filter(None, [title]), *_totals(part), "", *_times(part)]
    if any("turns" in part for part in report["runs"].values()):
        lines += ["", *_turns(report["runs"])]
    if report.get("savings"):
        lines += ["", *_savings(report["savings"])]
    return "\n".join(lines)


def _totals(part: Summary) -> Iterable[str]:
    yield _row("completed requests", f"{part['completed']:,}")
    yield _row("failed requests", f"{part['failed']:,}")
    if part["not_sent"]:
        yield _row("not sent, after a failed turn", f"{part['not_sent']:,}")
    for error, count in list(part["errors"].items())[:_ERRORS_SHOWN]:
        yield f"  {count:,} × {error}"
    if (more := len(part["errors"]) - _ERRORS_SHOWN) > 0:
        yield f"  and {more:,} other errors"
    yield _row("duration, s", _number(part["duration"], 2))
    cached, read = part["total_cached_tokens"], part["total_input_tokens"]
    yield _row("input tokens", f"{read:,}")
    if cached is not None and read:
        yield _row("  of these cached", f"{cached:,} ({cached / read:.1%})")
    yield _row("output tokens", f"{part['total_output_tokens']:,}")
    yield _row("requests/s", _number(part["request_throughput"], 2))
    yield _row("input tokens/s", _number(part["input_throughput"], 1))
    yield _row("output tokens/s", _number(part["output_throughput"], 1))
    yield _row("input and output tokens/s", _number(part["total_throughput"], 1))
    yield _row("tokens per event", _number(part["tokens_per_event"], 2))


def _times(part: Summary) -> Iterable[str]:
    yield f"{'':<12}" + "".join(f"{quantity:>12}" for quantity in QUANTITIES)
    for name in TIMES:
        cells = (_number(part[f"{quantity}_{name}_ms"], 2) for quantity in QUANTITIES)
        yield f"{_LABELS[name]:<12}" + "".join(f"{cell:>12}" for cell in cells)


def _turns(runs: dict[str, Summary]) -> Iterable[str]:
    yield f"{'':<12}{'':>5}{'tokens per request':>30}{'TTFT, ms':>30}"
    heads = ("input", "cached", "computed", *QUANTITIES)
    yield f"{'by turn':<12}{'turn':>5}" + "".join(f"{head:>10}" for head in heads) + "  KV from"
    for way, part in runs.items():
        for row in part["turns"]:
            tokens = (_number(row[f"mean_{kind}_tokens"], 0) for kind in ("input", "cached", "computed"))
            times = (_number(row[f"{quantity}_ttft_ms"], 2) for quantity in QUANTITIES)
            paths = ", ".join(f"{path} {count}" for path, count in row["paths"].items())
            cells = "".join(f"{cell:>10}" for cell in (*tokens, *times))
            yield f"{way:<12}{row['turn']:>5}{cells}  {paths}".rstrip()


def _savings(found: Summary) -> Iterable[str]:
    one, other = found[PREFIX], found[CONTINUATION]
    yield "After the first turn, a continuation instead of the whole conversation:"
    for label, key, digits in (
        ("computed tokens per request", "computed_tokens_per_request", 1),
        ("median TTFT, ms", "median_ttft_ms", 2),
    ):
        change = f" ({other[key] / one[key] - 1:+.0%})" if one[key] else ""
        yield f"  {label:<28} {_number(other[key], digits)} instead of {_number(one[key], digits)}{change}"


def _row(label: str, value: str) -> str:
    return f"{label:<30}{value:>18}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
