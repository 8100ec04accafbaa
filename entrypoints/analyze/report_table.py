"""Prints a report as text."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import wrap
from typing import Any

from .wording import counted, human_memory, human_size

_PARTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)
"""Shares of all hits; for each the table has the smallest size that finds it."""

Report = dict[str, Any]


def show(report: Report) -> None:
    for section in (_about, _misses, _sharing, _hit_rate, _states, _windows, _working_set, _turns, _recommended):
        if lines := list(section(report)):
            print("\n".join(lines), end="\n\n")


def _about(report: Report) -> Iterable[str]:
    log, requests = report["log"], report["requests"]
    span = f" in {_time(requests['span_s'])}" if requests["span_s"] else ""
    number, kind = counted(requests["requests"], "request"), f"format {log['format']}, {report['units']['what']}"
    yield f"{log['name']}: {number}{span} ({kind})"
    yield (
        f"  prompts {requests['prompt_tokens']:,} tokens, median {requests['prompt_tokens_median']:,.0f}; outputs "
        f"{requests['output_tokens']:,}; longest request {requests['longest']:,}"
    )
    if requests["running_requests_peak"]:
        size = human_size(requests["running_tokens_peak"], requests["running_gib_peak"])
        yield f"  at most {requests['running_requests_peak']:,} ran at once, with {size}"
    if log["bad"]:
        yield f"  {log['bad']:,} of {log['items']:,} items are broken and were skipped; the first:"
        yield from (f"    number {number}: {reason}" for number, reason in log["first_bad"])
    yield from (f"  note: {note}" for note in log["notes"])


def _misses(report: Report) -> Iterable[str]:
    if not report["misses"]:
        return
    yield "Prompt tokens that the recording server computed, by reason (cache_report)"
    yield f"  {'reason':<16}{'tokens':>14}{'of these':>10}{'requests':>12}"
    for row in report["misses"]:
        yield f"  {row['reason']:<16}{row['tokens']:>14,}{row['share']:>10.1%}{row['requests']:>12,}"
    for paragraph in report["advice"]:
        yield from wrap(paragraph, 118, initial_indent="  ", subsequent_indent="    ")


def _sharing(report: Report) -> Iterable[str]:
    sharing, count = report["sharing"], report["requests"]["requests"]
    yield "Shared with an earlier request"
    for title, name in (
        ("tokens", "requests_by_shared_tokens"),
        ("of the prompt", "requests_by_shared_part_of_prompt"),
    ):
        classes = sharing[name].items()
        yield f"  {title:<14}" + "".join(f"{label:>13}" for label, _ in classes)
        yield f"  {'requests':<14}" + "".join(f"{number / count:>13.1%}" for _, number in classes)
    if sharing["top_prefixes"]:
        yield f"  {'prefix, tokens':>16}{'requests':>12}{'tokens saved':>16}{'of all prompts':>16}"
    for prefix in sharing["top_prefixes"]:
        part = prefix["saved_tokens"] / report["requests"]["prompt_tokens"]
        yield f"  {prefix['tokens']:>16,}{prefix['requests']:>12,}{prefix['saved_tokens']:>16,}{part:>16.1%}"


def _hit_rate(report: Report) -> Iterable[str]:
    rates = report["hit_rate"]
    yield "Prompt tokens found, by size of a cache (least recently used first)"
    for point in _thinned(rates["by_size"]):
        yield f"  {human_size(point['tokens'], point['gib']):>40}{point['hit_rate']:>9.1%}"
    yield f"  {'infinite':>40}{rates['endless']:>9.1%}"
    if rates["distinct_tokens"] is not None:
        yield f"  everything ever used: {human_size(rates['distinct_tokens'], rates['distinct_gib'])}"
    if rates["recorded"] is not None:
        yield f"  the recording server found {rates['recorded']:.1%}"
    if rates["exact_up_to_tokens"] is not None:
        exact = human_size(rates["exact_up_to_tokens"], rates["exact_up_to_gib"])
        yield f"  exact up to {exact}, the limit of the tree's memory (--memory-gb);"
        yield "  larger sizes find at least the rate shown, and at most that of an infinite cache, which is"
        false_share = f"{rates['endless_false_share']:.1e}"
        yield f"  rounded down to chunks of 64 tokens and takes {false_share} of the new ones for known"


def _thinned(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The smallest size for each share of the hits in `_PARTS`."""
    most, chosen = points[-1]["hit_rate"], []
    for part in _PARTS if most else ():
        found = next((point for point in points if point["hit_rate"] >= part * most), points[-1])
        if found not in chosen:
            chosen.append(found)
    return chosen


def _states(report: Report) -> Iterable[str]:
    states = report["states"]
    if states is None:
        return
    size = human_memory(states["bytes_per_state"] / 2**30)
    yield f"Recurrent states of {size}, by their number beside those of running requests"
    yield f"  {'states':>12}{'memory':>14}{'turns that find':>18}{'prompt tokens found':>22}"
    rows = _thinned(states["by_number"]) or states["by_number"][:1]
    for point in rows:
        yield _state_row(f"{point['states']:,}", human_memory(point["gib"]), point)
    yield _state_row("infinite", "", states["endless"])
    yield f"  {states['turns']:,} turns continue an earlier request; states were left in {states['left']:,} places"
    if states["older_turns"]:
        returns = counted(states["older_turns"], "request")
        yield f"  {returns} went back to an earlier turn than the last (retain_states)"
    if states["max_states"] is None:
        yield f"  more than {states['by_number'][-1]['states']:,} are needed for {states['reach']:.0%} of these hits"
    else:
        beside, running = states["by_tier"]["device"], states["of_running_requests"]
        yield (
            f"  --max-states {states['max_states']:,} takes {human_memory(states['max_states_gib'])}: {beside:,} find "
            f"{states['reach']:.0%} of these hits, and running requests need {running:,}"
        )


def _state_row(number: str, size: str, point: dict[str, Any]) -> str:
    turns = "-" if point["turns_found"] is None else f"{point['turns_found']:.1%}"
    return f"  {number:>12}{size:>14}{turns:>18}{point['hit_rate']:>22.1%}"


def _windows(report: Report) -> Iterable[str]:
    found = report["windows"]
    if found is None:
        return
    yield f"Layers with a sliding window of {found['window']:,} tokens; sizes are of two pools, without a host tier"
    kv, of_windows = found["bytes_per_token"], found["bytes_per_window_token"]
    yield f"  a token takes {kv:,} bytes in the KV pool, and {of_windows:,} in the pool for windows"
    pool, one = human_size(found["pool_tokens"], found["gib"]), human_memory(found["shared_gib"])
    if found["window_tokens"]:
        yield f"  {pool}: with {found['window_tokens']:,} tokens for windows"
        yield f"  with a host tier all layers share one pool, which takes {one} for as many"
    else:
        yield f"  {pool}: so few that all layers share one pool, as with a host tier"


def _working_set(report: Report) -> Iterable[str]:
    found = report["working_set"]
    yield (
        "Working set: most tokens used within a time; "
        "a cache of this size keeps everything that is reused within that time"
    )
    for window, tokens, gib in zip(found["windows"], found["largest_tokens"], found["largest_gib"]):
        name = _time(window) if found["window_unit"] == "s" else f"{window:,.0f} requests"
        size = "the log is shorter" if tokens is None else human_size(tokens, gib)
        yield f"  {name:>20}  {size}"


def _turns(report: Report) -> Iterable[str]:
    turns, count = report["turns"], report["requests"]["requests"]
    yield "Turns: requests that continue an earlier one's prompt and output"
    if not turns["requests"]:
        yield "  none: continuations and leases would save nothing here"
        return
    yield (
        f"  {turns['requests']:,} ({turns['requests'] / count:.1%} of requests; {turns['named_parents']:,} named their "
        f"parent); {turns['requests_gone_on_from'] / count:.1%} of requests were continued"
    )
    yield (
        f"  as continuations: {turns['inherited_tokens']:,} tokens ({turns['inherited_share']:.1%} of all prompts) "
        "need not be sent, tokenised or looked up again"
    )
    yield (
        f"  leases would keep {turns['lost_to_eviction_tokens']:,} of these ({turns['lost_share']:.1%}), "
        f"which would otherwise be evicted from a pool of {human_size(turns['pool_tokens'], turns['pool_gib'])}"
    )
    gaps = turns["gap_s"]
    if gaps["p50"] is not None:
        half, most, all_ = (_time(gaps[name]) for name in ("p50", "p90", "p99"))
        yield f"  pause between turns: half within {half}, 90 % within {most}, 99 % within {all_}"
    if "retain_ttl_s" in turns:
        size = human_size(round(turns["leased_tokens_on_average"]), turns["leased_gib_on_average"])
        yield f"  retain_ttl {turns['retain_ttl_s']:.3g} on every request would lease {size} on average"


def _recommended(report: Report) -> Iterable[str]:
    yield "Recommended; each tier's size includes the tiers above it"
    for tier in report["recommended"]:
        if tier["tokens"] is None:
            yield f"  {tier['tier']:<8}{tier['why']}"
        else:
            size = human_size(tier["tokens"], tier["gib"])
            yield f"  {tier['tier']:<8}{size}: finds {tier['hit_rate']:.1%} ({tier['why']})"
        if tier.get("states") is not None:
            yield f"  {'':<8}with {tier['states']:,} states, {human_memory(tier['states_gib'])}"
    if report["kv_bytes_per_token"] is None:
        yield "  give --model FOLDER or --kv-bytes-per-token for sizes in bytes"
    if report["requests"]["hinted"]:
        yield f"  {counted(report['requests']['hinted'], 'request')} had no_reuse_from; these sizes do not rely on it"
    if report["flags"]:
        yield f"  flags: {report['flags']}"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    for size, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.3g} s"
