"""What a dashboard's page is shown in tests: a server at work, an empty one, large and hostile trees."""

from __future__ import annotations

import random
from typing import Any

HOSTILE = [
    "<script>document.title='pwned'</script>",
    '<img src=x onerror="document.title=1">',
    "\u202eexe.gnp",
    "שלום עולם",
    "a\x00b\x1bc\u2028d",
    "👩‍👩‍👧‍👦🏽 emoji",
    "x" * 3000,
    "&lt;b&gt;&amp;",
]


def hello(**fields: Any) -> dict[str, Any]:
    return {
        "instance": "one",
        "version": "0.3.0",
        "model": "examples/toy_model",
        "page_size": 1,
        "total_tokens": 8192,
        "host_tokens": 16384,
        "text_allowed": True,
        "radix_cache": True,
        "t": 100.0,
    } | fields


def stats(**fields: Any) -> dict[str, Any]:
    return {
        "running": 0,
        "waiting": 0,
        "total": 8192,
        "free": 8192,
        "evictable": 0,
        "protected": 0,
        "private": 0,
        "leased": 0,
        "quarantined": 0,
        "queries": 0,
        "hits": 0,
        "evicted": 0,
        "prompt_tokens": 0,
        "output_tokens": 0,
        "host_used": 0,
        "host_total": 16384,
        "states_total": 0,
        "states_free": 0,
        "states_held": 0,
        "states_cached": 0,
        "states_kept": 0,
        "states_evicted": 0,
        "host_states_total": 0,
        "host_states_used": 0,
        "host_states_evicted": 0,
        "window_total": 0,
        "window_free": 0,
        "window_evictable": 0,
        "window_evicted": 0,
    } | fields


def update(**fields: Any) -> dict[str, Any]:
    return {
        "t": 100.0,
        "stats": stats(),
        "running": [],
        "waiting": [],
        "leases": [],
        "num_leases": 0,
        "jobs": [],
        "num_jobs": 0,
        "lives": [],
    } | fields


def life(rid: str, phases: list[list[Any]], **fields: Any) -> dict[str, Any]:
    return {"rid": rid, "index": 0, "prompt": 120, "cached": 0, "output": 16, "phases": phases} | fields


def span(id: int, parent: int, start: int, tokens: int, subtree: int, **fields: Any) -> list[Any]:
    named = {
        "nodes": 1,
        "tier": "device",
        "flags": "",
        "idle": 2.0,
        "uses": 1,
        "namespace": None,
        "text": None,
    } | fields
    if parent < 0 and named["namespace"] is None:
        named["namespace"] = ""
    order = ("nodes", "tier", "flags", "idle", "uses", "namespace", "text")
    return [id, parent, start, tokens, subtree, *(named[name] for name in order)]


def tree(spans: list[list[Any]], t: float = 100.0) -> dict[str, Any]:
    top = [each for each in spans if each[1] < 0]
    return {
        "t": t,
        "took": 0.001,
        "nodes": sum(each[5] for each in spans),
        "tokens": sum(each[4] for each in top),
        "complete": True,
        "spans": spans,
    }


def small_tree() -> dict[str, Any]:
    return tree(
        [
            span(1, -1, 0, 200, 1000, uses=40, text="<|im_start|>system\nYou are a helpful agent."),
            span(2, 0, 200, 300, 500, flags="L", text="user: How many lines are in manual.md?"),
            span(3, 1, 500, 200, 200, flags="S", text="tool: 12 manual.md"),
            span(4, 0, 200, 180, 180, tier="host", idle=800.0),
            span(5, 0, 200, 120, 120, flags="R", idle=90.0),
            span(6, -1, 0, 400, 400, namespace="tenant-b", tier="host", flags="I", idle=30.0),
            span(7, -1, 0, 250, 250, nodes=37, tier="mixed", namespace="tenant-b", idle=300.0),
        ]
    )


def large_tree(seed: int, count: int = 2000, hostile: bool = False) -> dict[str, Any]:
    """A tree of ``count`` spans as an agent server has: shared system prompts, jobs below them, turns below these."""
    draw = random.Random(seed)
    made: list[dict[str, Any]] = []

    def add(parent: int, tokens: int) -> int:
        start = 0 if parent < 0 else made[parent]["start"] + made[parent]["tokens"]
        made.append({"parent": parent, "start": start, "tokens": tokens, "children": []})
        if parent >= 0:
            made[parent]["children"].append(len(made) - 1)
        return len(made) - 1

    roots = [add(-1, draw.randint(300, 2000)) for _ in range(6)]
    open_ends = list(roots)
    while len(made) < count:
        parent = draw.choice(open_ends[-400:]) if draw.random() < 0.7 else draw.choice(roots)
        open_ends.append(add(parent, int(draw.lognormvariate(4.5, 1))))
    for node in reversed(made):
        node["subtree"] = node["tokens"] + sum(made[child]["subtree"] for child in node["children"])
    order, stack = [], sorted(roots, key=lambda index: made[index]["subtree"])
    while stack:
        index = stack.pop()
        order.append(index)
        stack.extend(sorted(made[index]["children"], key=lambda child: made[child]["subtree"]))
    place = {index: position for position, index in enumerate(order)}
    spans = []
    for index in order:
        node = made[index]
        parent = -1 if node["parent"] < 0 else place[node["parent"]]
        leaf = not node["children"]
        spans.append(
            span(
                index,
                parent,
                node["start"],
                node["tokens"],
                node["subtree"],
                nodes=draw.randint(2, 60) if leaf and draw.random() < 0.1 else 1,
                tier=draw.choices(["device", "host"], [4, 1 if leaf else 0])[0],
                flags=draw.choices(["", "L", "S", "LS", "R", "I"], [20, 3, 2, 1, 2, 0.3])[0] if leaf else "",
                idle=draw.lognormvariate(3, 2),
                uses=draw.randint(1, 90),
                namespace=("", "tenant-b", "tenant-c")[roots.index(index) % 3] if index in roots else None,
                text=draw.choice(HOSTILE)[:400] if hostile else f"turn {index}: how many lines are in manual.md?",
            )
        )
    return tree(spans)


def handoff(t: float, ttl: float = 30.0) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A parent under its lease at time ``t``; then the parent whose KV has been taken over, and its child."""
    stage = [["queued", t - 6, t - 5.8, 0], ["prefill", t - 5.8, t - 5.0, 80], ["prefill", t - 5.0, t - 4.4, 40]]
    stage.append(["decode", t - 4.4, t - 2.5, 16])
    before = life("stage-1", [*stage, ["leased", t - 2.5, None, 136]], end="stop")
    after = life("stage-1", [*stage, ["leased", t - 2.5, t, 136]], end="stop", child="stage-2")
    phases = [["queued", t - 0.3, t, 0], ["prefill", t, t + 0.2, 12], ["decode", t + 0.2, None, 4]]
    child = life("stage-2", phases, parent="stage-1", path="handoff", prompt=148, cached=136, output=4)
    return before, after, child


def lease(serial: int, rid: str, expires_in: float | None, **fields: Any) -> dict[str, Any]:
    return {
        "serial": serial,
        "rid": rid,
        "tokens": 420,
        "idle": 1.0,
        "expires_in": expires_in,
        "claimed": expires_in is None,
    } | fields


def job(job_id: str, state: str, steps: int, pinned: int, expires_in: float | None) -> dict[str, Any]:
    return {"job_id": job_id, "state": state, "steps": steps, "pinned": pinned, "expires_in": expires_in}


def running(rid: str, phase: str, computed: int, total: int, output: int, **fields: Any) -> dict[str, Any]:
    return {"rid": rid, "phase": phase, "computed": computed, "total": total, "output": output} | fields


def waiting(rid: str, phase: str, total: int, waited: float, **fields: Any) -> dict[str, Any]:
    return {"rid": rid, "phase": phase, "total": total, "waited": waited} | fields


def agent_life(number: int, t: float) -> dict[str, Any]:
    """One of fourteen steps of four agents; some load, are retracted or aborted, keep their KV or hand it on."""
    at = begin = t - 52 + 3.4 * number
    phases: list[list[Any]] = []

    def phase(kind: str, seconds: float, tokens: int) -> None:
        nonlocal at
        phases.append([kind, at, at + seconds, tokens])
        at += seconds

    phase("queued", 0.4, 0)
    if number % 5 == 2:
        phase("loading", 1.1, 300)
    for chunk in range(1 + number % 3):
        phase("prefill", 0.7, 256 - 40 * chunk)
    phase("decode", 2.2, 40)
    if number % 6 == 4:
        phase("retracted", 1.5, 0)
        phase("prefill", 0.5, 90)
        phase("decode", 2.0, 30)
    fields: dict[str, Any] = {"job_id": f"agent-{number % 4}", "end": "abort" if number == 7 else "stop"}
    if number in (0, 4, 8):
        phases.append(["leased", at, begin + 13.9, 420])
        fields["child"] = f"agent-0/{number + 4}"
    elif number % 2 == 0:
        phases.append(["leased", at, min(at + 6, t) if number < 8 else None, 420])
    if number in (4, 8, 12):
        fields |= {"parent": f"agent-0/{number - 4}", "path": "handoff"}
    return life(f"agent-{number % 4}/{number}", phases, **fields)


def busy(t: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """An update and the lives of a server in full swing at time ``t``."""
    lives = [*handoff(t - 4)[1:], *(agent_life(number, t) for number in range(14))]
    shown = update(
        t=t,
        stats=stats(
            running=6,
            waiting=3,
            free=2300,
            evictable=2700,
            protected=2500,
            private=692,
            leased=1160,
            queries=90_000 + int(900 * t),
            hits=52_000 + int(610 * t),
            evicted=int(41 * t),
            prompt_tokens=int(900 * t),
            output_tokens=int(230 * t),
            host_used=6100,
        ),
        running=[
            running("chat-41", "prefill", 700, 1400, 0),
            running("agent-2/13", "prefill", 610, 1400, 0, job_id="agent-2"),
            running("agent-0/12", "decode", 520, 520, 34, job_id="agent-0"),
            running("rank-7", "beam", 430, 430, 51),
            running("chat-42", "decode", 340, 340, 68),
            running("batch-19", "decode", 250, 250, 85),
        ],
        waiting=[
            waiting("agent-1/14", "loading", 2210, 0.8, job_id="agent-1"),
            waiting("stage-3", "parent", 160, 2.1),
            waiting("batch-20", "queued", 3900, 4.4),
        ],
        leases=[
            lease(31, "agent-0/8", 4.0, job_id="agent-0"),
            lease(33, "stage-2", 22.0, tokens=320),
            lease(35, "agent-2/10", None, job_id="agent-2"),
        ],
        num_leases=3,
        jobs=[
            job("agent-0", "tool", 4, 420, 4.0),
            job("agent-1", "waiting", 3, 0, None),
            job("agent-2", "running", 4, 420, None),
        ],
        num_jobs=3,
    )
    return shown, lives
