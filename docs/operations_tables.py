"""Writes the tables of flags and metrics in operations.md. Run ``python -m docs.operations_tables`` in the root folder.

Everything comes from the code: the flags' names, values, defaults and help; the metrics' names, types, labels and help.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from baton.entrypoints.foreign_flags import FOREIGN, Alias, NoEffect
from baton.entrypoints.server_args import build_parser
from baton.entrypoints.server_config import ChatConfig, ServerConfig, flag_name
from baton.runtime.config import JobConfig, KVEventConfig, ModelArgs, RecordingConfig, TierConfig
from baton.runtime.metrics import ServerMetrics
from baton.scheduler.cache_stats import CacheStats, WindowStats
from baton.scheduler.config import SchedulerConfig
from baton.scheduler.outcome import CacheReport, MissedSpan
from baton.scheduler.stats import CopyStats, PreparationStats, SchedulerStats, TierStats

PAGE = Path(__file__).parent / "operations.md"


def flag_table() -> str:
    """One row for each flag, in the order of --help, with a row of its own for each group."""
    worker = [ModelArgs, SchedulerConfig, TierConfig, JobConfig, KVEventConfig]
    parts = [*worker, ChatConfig, RecordingConfig, ServerConfig]
    fields = {f.name: f for part in parts for f in dataclasses.fields(part)}
    lines = ["| flag | takes | default | |", "|---|---|---|---|"]
    for group in build_parser()._action_groups:
        actions = [action for action in group._group_actions if action.dest in fields]
        if actions:
            lines.append(f"| **{group.title}** | | | |")
        for action in actions:
            field = fields[action.dest]
            cells = [f"`{action.option_strings[0]}`", _values(action), _default(field.default), field.metadata["help"]]
            lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines)


def _values(action: argparse.Action) -> str:
    if action.choices:
        return ", ".join(f"`{choice}`" for choice in action.choices)
    if action.nargs == 0:
        others = "".join(f", or `{option}`" for option in action.option_strings[1:])
        return f"nothing{others}"
    kind = getattr(action.type, "__name__", "str")
    return {"int": "a whole number", "float": "a number", "str": "a string"}[kind]


def _default(value: Any) -> str:
    if value is False:
        return "off"
    if value is None:
        return "drawn"
    return "none" if value in ("", ()) else f"`{value}`"


def metric_table() -> str:
    """One row for each metric that /metrics renders, in its order."""
    metrics = ServerMetrics("any")
    metrics.output_finished("stop")  # those that have labels of their own show them with their first sample
    metrics.call_refused(400)
    metrics.count_misses(CacheReport(missed=(MissedSpan("unseen", 0, 1),)))
    metrics.prefix_normalized("rule", 1)
    metrics.conversation_diverged("kind")
    cache = CacheStats(windows=(WindowStats(60, query_tokens=1),))
    tiers = (TierStats("host", stores=CopyStats(tokens_per_s=1.0)),)
    preparations = PreparationStats(dropped={"reason": 1})
    metrics.worker_reported(SchedulerStats(tiers=tiers, cache=cache, preparations=preparations))
    lines = ["| metric | type | labels beside `model_name` | |", "|---|---|---|---|"]
    for family in metrics.registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"model_name", "le"}
        shown = ", ".join(f"`{label}`" for label in sorted(labels))
        lines.append(f"| `{name}` | {family.type} | {shown} | {family.documentation} |")
    return "\n".join(lines)


def foreign_flag_table() -> str:
    """One row for each flag of SGLang and vLLM that has a meaning, or a refusal, of its own."""
    lines = ["| flag | here |", "|---|---|"]
    for name, known in FOREIGN.items():
        if isinstance(known, Alias):
            value = "" if known.value in (None, True) else f" {known.value}"
            here = f"`{flag_name(known.to)}{value}`" + (f": {known.about}" if known.about else "")
            if known.values:
                here += "; " + ", ".join(f"`{theirs}` is `{ours}`" for theirs, ours in known.values.items())
        elif isinstance(known, NoEffect):
            only = ", ".join(f"`{value}`" for value in known.only)
            here = f"no effect{f' with {only}, refused otherwise' if only else ''}: {known.about}"
        else:
            here = f"refused: {known.instead}"
        lines.append(f"| `{flag_name(name)}` | {here.replace('|', '&#124;')} |")
    return "\n".join(lines)


TABLES = {"flags": flag_table, "flags of others": foreign_flag_table, "metrics": metric_table}


def between(page: str, name: str) -> str:
    """What stands between the two comments that mark a table."""
    begin, end = _marks(name)
    if begin not in page or end not in page:
        raise ValueError(f"{PAGE.name} has no comments that mark the table of {name}")
    return page.split(begin)[1].split(end)[0]


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"


def main() -> None:
    page = PAGE.read_text()
    for name, table in TABLES.items():
        begin, end = _marks(name)
        page = page.replace(begin + between(page, name) + end, begin + table() + end)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
