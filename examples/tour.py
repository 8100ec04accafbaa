"""The figures of docs/tour.md: one request in two stages, followed through the real scheduler, pools, tree and model.

    python examples/tour.py            print every figure
    python examples/tour.py --write    put them into docs/tour.md, each below its mark `<!-- figure: NAME -->`

It is here with the other programs that run on the toy model; docs/ holds pages only. The event loop is left out:
`Worker.step` does the work of one turn, on a CPU, with no step in flight.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from pathlib import Path

import numpy as np

from baton.memory_pool.allocator import Allocator
from baton.memory_pool.req_to_token import ReqToTokenPool
from baton.radix.cache import RadixCache
from baton.radix.kv_sequence import KVSequence
from baton.radix.node import TreeNode
from baton.runtime.config import ModelArgs, WorkerConfig
from baton.runtime.text.tokenizer import Tokenizer
from baton.runtime.worker import build_worker
from baton.scheduler.batch import ScheduleBatch, StepResult
from baton.scheduler.config import SchedulerConfig
from baton.scheduler.request import Request, RequestEvent
from baton.scheduler.request_spec import ContinuationSpec, RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.scheduler import Scheduler
from baton.scheduler.token_buffer import pack_ids

ROOT = Path(__file__).resolve().parents[1]
TOY_MODEL = ROOT / "examples" / "toy_model"
PAGE = ROOT / "docs" / "tour.md"
FIGURE = re.compile(r"(<!-- figure: (\S+) -->\n```text\n)(.*?)(```\n)", re.DOTALL)
"""Groups: all before the figure, its name, the figure, the closing fence."""
WIDTH = 100

TASK = "<|im_start|>user\nHow many lines are in manual.md?<|im_end|>\n<|im_start|>assistant\n"
TOOL_OUTPUT = "<|im_end|>\n<|im_start|>tool\n12 manual.md<|im_end|>\n<|im_start|>assistant\n"
OTHER_TASK = "<|im_start|>user\nHow many lines are in notes.txt?<|im_end|>\n<|im_start|>assistant\n"
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20)


class Worker:
    """The parts of a worker, put together as `build_worker` does it, but where a figure can look into the pools."""

    def __init__(self, page_size: int, total_tokens: int) -> None:
        config = SchedulerConfig(
            context_length=64,
            max_total_tokens=total_tokens,
            max_running_requests=2,
            max_leased_requests=1,
            max_leased_ratio=1.0,
            page_size=page_size,
            schedule_policy="fcfs",  # leases are those that requests ask for
        )
        model = ModelArgs(model_path=str(TOY_MODEL), dtype="float32", device="cpu")
        worker = build_worker(WorkerConfig(model=model, scheduler=config))
        self.step_runner = worker.step_runner
        self.rows = ReqToTokenPool(config.num_rows, config.context_length)
        self.allocator = Allocator(total_tokens, page_size)
        self.cache = RadixCache(self.rows, self.allocator, page_size=page_size)
        self.scheduler = Scheduler(config, self.rows, self.allocator, self.cache, tuple(worker.info["eos_token_ids"]))
        self.tokenizer = Tokenizer.load(TOY_MODEL)

    def add_request(self, spec: RequestSpec, now: float) -> Request:
        (request,) = self.scheduler.add_request(spec, now)
        return request

    def form(self, now: float) -> ScheduleBatch:
        batch = self.scheduler.next_batch(now)
        assert batch is not None
        return batch

    def step(self, batch: ScheduleBatch, now: float) -> tuple[StepResult, RequestEvent]:
        """Compute a step and commit it; it holds one request here."""
        result = self.step_runner.run(batch).result
        (event,) = self.scheduler.process_result(result, now)
        return result, event

    def spec(self, rid: str, text: str, **fields) -> RequestSpec:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return RequestSpec(rid=rid, input_ids=pack_ids(ids), sampling=GREEDY, **fields)

    # -- what the figures show -----------------------------------------------------------------------------------------

    def text(self, ids: np.ndarray | list[int]) -> str:
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False).replace("\n", "↵")

    def tokens(self, ids: np.ndarray, first: int = 0) -> str:
        """Position, id and text of each token, side by side."""
        columns = [(str(first + n), str(i), self.text([i])) for n, i in enumerate(ids.tolist())]
        lines: list[str] = []
        while columns:
            taken: list[tuple[str, str, str]] = []
            widths: list[int] = []
            while columns and sum(widths) + 3 * len(widths) + max(map(len, columns[0])) <= WIDTH - 12:
                widths.append(max(map(len, columns[0])))
                taken.append(columns.pop(0))
            for label, cells in zip(("position", "id", "text"), zip(*taken)):
                lines.append(f"{label:10s}" + "   ".join(cell.ljust(w) for cell, w in zip(cells, widths)))
            lines.append("")
        return "\n".join(lines[:-1])

    def lengths(self, request: Request) -> str:
        """One character per token, as in the drawing of scheduler/request.py."""
        bar = "P" * request.prompt_len + "o" * request.num_output_tokens
        widest = max(len(bar), request.scheduled_len)
        numbers = f"prompt {request.prompt_len} + output {request.num_output_tokens}"
        return "\n".join(
            [
                f"request {request.serial}, rid {request.rid!r}: {request.status.value}",
                f"token_ids      {bar.ljust(widest)}  {len(bar)} = {numbers}",
                f"committed_len  {('#' * request.committed_len).ljust(widest)}  {request.committed_len}",
                f"scheduled_len  {('#' * request.scheduled_len).ljust(widest)}  {request.scheduled_len}"
                f"   (num_output_placeholders {request.num_output_placeholders})",
            ]
        )

    def sequence(self, kv: KVSequence | None) -> str:
        if kv is None:
            return "KVSequence: none"
        slots = runs(self.rows.rows[kv.row, : kv.length])
        return (
            f"KVSequence: row {kv.row}, node #{kv.node.serial if kv.node else '-'}, tree_len {kv.tree_len}, "
            f"length {kv.length}\nreq_to_token[{kv.row}][:{kv.length}] = {slots}"
        )

    def leases(self) -> str:
        return "\n".join(
            f"lease {lease.serial}: {lease.state.value}, {lease.tokens} tokens, "
            + (f"{lease.remaining:g} s left" if lease.state.value == "claimed" else f"until {lease.deadline:g}")
            for lease in self.scheduler.live_leases()
        )

    def tree(self) -> str:
        root = self.cache.tree.root
        return "\n".join([f"root   lock_ref {root.lock_ref}", *self._below(root, "")])

    def _below(self, node: TreeNode, indent: str) -> list[str]:
        lines: list[str] = []
        children = sorted(node.children.values(), key=lambda child: child.serial)
        for place, child in enumerate(children):
            is_last = place == len(children) - 1
            text = self.text(np.frombuffer(child.key, dtype=np.int32))
            text = text if len(text) <= 30 else f"{text[:14]} … {text[-13:]}"
            first = child.prefix_len - len(child)
            lines.append(
                f"{indent}{'└─' if is_last else '├─'} #{child.serial}  tokens {first}-{child.prefix_len - 1}  "
                f"slots {runs(child.value)}  lock_ref {child.lock_ref}  lease_ref {child.lease_ref}  {text!r}"
            )
            lines += self._below(child, indent + ("   " if is_last else "│  "))
        return lines

    def pool(self) -> str:
        """One character per slot, and the account."""
        page = self.allocator.page_size
        total = self.allocator.total_tokens + page
        slots = np.full(total, "p")
        slots[:page] = "="
        slots[(self.allocator.free_pages()[:, None] * page + np.arange(page)).ravel()] = "."
        for node in self.cache.tree.nodes():
            slots[node.value] = "L" if node.lock_ref else "e"
        lines = textwrap.wrap("".join(slots), 32 if page == 1 else page)
        if page > 1:
            lines = [" ".join(lines)]
        stats = self.scheduler.stats()
        return "\n".join(
            [f"slot {n * 32:2d}  {line}" for n, line in enumerate(lines)]
            + [
                f"free {stats.free_tokens} + evictable {stats.evictable_tokens} + protected {stats.protected_tokens}"
                f" + private {stats.private_tokens} = {stats.total_tokens}"
            ]
        )

    def memory(self) -> str:
        return f"{self.tree()}\n\n{self.pool()}"


def runs(slots: np.ndarray) -> str:
    """Slots as runs, upwards or downwards: [1 2 3 9 8] is "1-3 9-8"."""
    found: list[list[int]] = []
    for slot in slots.tolist():
        run = found[-1] if found else []
        if (len(run) == 1 and abs(slot - run[0]) == 1) or (len(run) > 1 and slot - run[-1] == run[1] - run[0]):
            run.append(slot)
        else:
            found.append([slot])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)


def order(batch: ScheduleBatch) -> str:
    """A step's order, without the fields that are empty in all of this tour (logprobs, beams, constraints)."""
    opened = [f"SequenceInfo(serial {info.serial}, temperature {info.sampling.temperature:g})" for info in batch.opened]
    updates = batch.row_updates
    changed = [
        f"row {row}, from position {start}: {runs(values)}"
        for row, start, values in zip(
            updates.rows, updates.starts, np.split(updates.values, np.cumsum(updates.lengths)[:-1])
        )
    ]
    fields = {
        "mode": batch.mode.name,
        "opened": ", ".join(opened) or "-",
        "closed": batch.closed or "-",
        "serials": batch.serials,
        "input_ids": " ".join(map(str, batch.input_ids)),
        "out_cache_loc": runs(batch.out_cache_loc),
        "req_pool_indices": batch.req_pool_indices,
        "prefix_lens": batch.prefix_lens,
        "extend_lens": batch.extend_lens,
        "samples": batch.samples,
        "output_positions": batch.output_positions,
        "row_updates": "; ".join(changed) or "-",
        "copies": f"{runs(batch.copies.source)} to {runs(batch.copies.target)}" if len(batch.copies) else "-",
    }
    lines = [f"ScheduleBatch, step_id {batch.step_id}"]
    for name, value in fields.items():
        lines += textwrap.wrap(str(value), WIDTH, initial_indent=f"  {name:17s} ", subsequent_indent=" " * 20)
    return "\n".join(lines)


def decode(worker: Worker, request: Request, now: float) -> tuple[str, RequestEvent]:
    """Run one request to its end, a line per step."""
    lines = ["step  input_id            slot  prefix_len  sampled              committed_len  len(token_ids)"]
    while True:
        batch = worker.form(now)
        assert not batch.is_extend
        (given,) = batch.input_ids.tolist()
        prefix_len = int(batch.prefix_lens[0])
        result, event = worker.step(batch, now)
        (sampled,) = result.token_ids.tolist()
        before = f"{given} {worker.text([given])!r}"
        after = f"{sampled} {worker.text([sampled])!r}"
        committed = str(request.committed_len) if event.finish is None else "-"
        lines.append(
            f"{batch.step_id:4d}  {before:18s}  {int(batch.out_cache_loc[0]):4d}  {prefix_len:10d}  "
            f"{after:19s}  {committed:>13s}  {len(request.token_ids):14d}"
        )
        if event.finish is not None:
            lines.append(f"\nevent: token_ids {event.token_ids}, finish {event.finish.type}, {event.finish.matched}")
            return "\n".join(lines), event


def result_of(result: StepResult) -> str:
    return f"StepResult\n  token_ids         {result.token_ids}\n  counts            {result.counts}"


def whole_tour() -> dict[str, str]:
    """All figures by name, in the order of the page."""
    worker = Worker(page_size=1, total_tokens=95)
    figures = {"pools": worker.memory()}
    task = worker.spec("turn1", TASK, retain_ttl=30.0)
    figures["prompt"] = worker.tokens(task.token_ids)
    request = worker.add_request(task, now=100.0)
    figures["waiting"] = worker.lengths(request)

    batch = worker.form(100.0)
    figures["prefill-order"] = order(batch)
    figures["prefill-formed"] = join(worker.lengths(request), worker.sequence(request.kv), worker.memory())
    result, _ = worker.step(batch, 100.1)
    figures["prefill-result"] = join(result_of(result), worker.lengths(request))
    figures["prefill-done"] = join(worker.sequence(request.kv), worker.memory())

    batch = worker.form(100.1)
    figures["decode-order"] = order(batch)
    worker.step(batch, 100.2)
    figures["decode-done"] = join(worker.lengths(request), worker.sequence(request.kv), worker.memory())
    figures["decode-rest"], _ = decode(worker, request, 101.0)
    output = request.output_ids
    figures["answer"] = f"{len(output)} ids: {' '.join(map(str, output))}\ntext: {worker.text(output)!r}"
    figures["leased"] = join(
        f"request {request.serial}: {request.status.value}; retained {request.retained}",
        worker.leases(),
        worker.sequence(worker.scheduler.live_leases()[0].kv),
        worker.memory(),
    )

    suffix = worker.spec("turn2", TOOL_OUTPUT)
    figures["suffix"] = worker.tokens(suffix.token_ids, first=worker.scheduler.live_leases()[0].tokens)
    child = worker.add_request(continued(suffix, ContinuationSpec(parent_rid="turn1")), now=103.0)
    figures["claimed"] = join(worker.lengths(child), f"{inheritance(child)}\n{worker.leases()}", worker.tree())
    batch = worker.form(103.0)
    figures["handoff-order"] = order(batch)
    figures["handoff-formed"] = join(worker.lengths(child), worker.sequence(child.kv), worker.memory())
    result, _ = worker.step(batch, 103.1)
    figures["handoff-done"] = join(result_of(result), worker.sequence(child.kv), worker.tree())
    figures["second-rest"], _ = decode(worker, child, 103.5)
    figures["second-answer"] = join(f"text: {worker.text(child.output_ids)!r}\n{inheritance(child)}", worker.memory())

    other = worker.add_request(worker.spec("other", OTHER_TASK), now=104.0)
    batch = worker.form(104.0)
    figures["match"] = join(order(batch), worker.sequence(other.kv), worker.tree())
    figures |= paged_tour()
    return {name: "\n".join(line.rstrip() for line in text.splitlines()) for name, text in figures.items()}


def paged_tour() -> dict[str, str]:
    """The same handoff where a page has 16 slots."""
    worker = Worker(page_size=16, total_tokens=80)
    request = worker.add_request(worker.spec("turn1", TASK, retain_ttl=30.0), now=100.0)
    while request.finish is None:
        worker.step(worker.form(100.0), 100.0)
    kv = worker.scheduler.live_leases()[0].kv
    figures = {"paged-lease": join(worker.leases() + "\n" + worker.sequence(kv), worker.memory())}
    suffix = worker.spec("turn2", TOOL_OUTPUT)
    child = worker.add_request(continued(suffix, ContinuationSpec(parent_rid="turn1")), now=103.0)
    worker.step(worker.form(103.0), 103.0)
    figures["paged-handoff"] = join(f"{inheritance(child)}\n{worker.sequence(child.kv)}", worker.memory())
    return figures


def continued(spec: RequestSpec, continuation: ContinuationSpec) -> RequestSpec:
    return RequestSpec(rid=spec.rid, input_ids=spec.input_ids, sampling=spec.sampling, continuation=continuation)


def inheritance(request: Request) -> str:
    got = request.inheritance
    assert got is not None
    return (
        f"inheritance: path {got.path}, inherited_tokens {got.inherited_tokens}, "
        f"recomputed_tokens {got.recomputed_tokens}, trimmed_tokens {got.trimmed_tokens}"
    )


def join(*parts: str) -> str:
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the figures of docs/tour.md.")
    parser.add_argument("--write", action="store_true", help="put them into the page")
    figures = whole_tour()
    if not parser.parse_args().write:
        for name, figure in figures.items():
            print(f"<!-- figure: {name} -->\n```text\n{figure}\n```\n")
        return
    page = PAGE.read_text()
    named = [match[2] for match in FIGURE.finditer(page)]
    if sorted(named) != sorted(figures):
        raise SystemExit(f"{PAGE} and this script differ in figures: {sorted(set(named) ^ set(figures))}")
    PAGE.write_text(FIGURE.sub(lambda match: f"{match[1]}{figures[match[2]]}\n{match[4]}", page))


if __name__ == "__main__":
    main()
