"""Measures the turns of an agent's conversation through /v1/chat/completions in three cases: the turn continues the
last one, its prefix is looked up in the cache, or all of it is computed again.

    python -m benchmarks.chat --model FOLDER [--agents 3] [--turns 5] [--rounds 2] [--answer 48] [--plot]

    goes on     a chat goes on from its last turn by itself: its KV is leased and handed over
    looks up    --no-auto-continue: the chat is rendered and tokenised from its first message, the tree finds the rest
    replays     and --disable-radix-cache: every prompt is computed from its first token, as by a server without a cache

Each case has its own server, one at a time, the order swapped every round. Agents take turns, so that others compute
between two turns of each; a tool's answer has about 150 words. TTFT is that of the stream, at the client. Prints a
table, writes chat.json, and with --plot the pictures from it; --draw FILE only draws.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from statistics import mean
from typing import Any

from tqdm import tqdm

from benchmarks.chat.pictures import draw
from benchmarks.common.measured import RESULTS, about_this_run
from benchmarks.common.servers import Server

WAYS: dict[str, tuple[str, ...]] = {
    "goes on": (),
    "looks up": ("--no-auto-continue",),
    "replays": ("--no-auto-continue", "--disable-radix-cache"),
}
FLAGS = ("--max-total-tokens", "16384")
WORDS = """
the file holds a list of names and numbers that were written by the last run of the program which reads every line
counts the words in it and prints what it has found to the log before it goes on with the next one
"""


def tool_answer(agent: int, turn: int) -> str:
    rng = random.Random(1000 * agent + turn)
    return " ".join(rng.choices(WORDS.split(), k=150))


def take_turn(server: Server, messages: list[dict[str, Any]], answer: int, began: float) -> dict[str, Any]:
    """Seconds since ``began``, and what the server says of the turn."""
    asked = {"messages": messages, "temperature": 0, "max_tokens": answer, "stream": True}
    first, text, last, usage = 0.0, "", {}, {}
    sent = time.perf_counter()
    with server.client.stream(
        "POST", "/v1/chat/completions", json=asked | {"stream_options": {"include_usage": True}}
    ) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise SystemExit(event["error"]["message"])
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                first = first or (time.perf_counter() if text else 0.0)
                last = choice.get("baton") or last
            usage = event.get("usage") or usage
    done = time.perf_counter()
    messages.append({"role": "assistant", "content": text})
    return {
        "sent": sent - began,
        "first": first - began,
        "done": done - began,
        "ttft": first - sent,
        "prompt": usage["prompt_tokens"],
        "cached": usage["prompt_tokens_details"]["cached_tokens"],
        "path": (last.get("continuation") or {}).get("path"),
        "said": text,
    }


def run_agents(server: Server, agents: int, turns: int, answer: int) -> list[list[dict[str, Any]]]:
    """By agent, its turns."""
    talks: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": f"Agent {n}: read my logs."}] for n in range(agents)
    ]
    found: list[list[dict[str, Any]]] = [[] for _ in talks]
    began = time.perf_counter()
    for turn in range(turns):
        for agent, messages in enumerate(talks):
            messages.append({"role": "tool", "tool_call_id": "1", "content": tool_answer(agent, turn)})
            found[agent].append(take_turn(server, messages, answer, began))
    return found


def measure(args: argparse.Namespace) -> dict[str, list[Any]]:
    """By way, the agents of each round."""
    rounds: dict[str, list[Any]] = {way: [] for way in WAYS}
    order = [way for n in range(args.rounds) for way in (WAYS if n % 2 == 0 else reversed(WAYS))]
    for way in tqdm(order, desc="Chatting", unit="server", disable=None):
        server = Server(args.model, (*FLAGS, *WAYS[way]))
        try:
            run_agents(server, 1, 1, 4)
            rounds[way].append(run_agents(server, args.agents, args.turns, args.answer))
        finally:
            server.close()
    return rounds


def by_turn(rounds: list[Any], name: str) -> list[float]:
    """Mean over agents and rounds, for each turn."""
    talks = [agent for agents in rounds for agent in agents]
    return [mean(turn[name] for turn in turns) for turns in zip(*talks, strict=True)]


def show(report: dict[str, Any]) -> None:
    rounds = report["rounds"]
    turns = report["work"]["turns"]
    print(f"\n{'mean TTFT, ms':<16}" + "".join(f"{f'turn {n}':>10}" for n in range(1, turns + 1)))
    for way, found in rounds.items():
        print(f"{way:<16}" + "".join(f"{1e3 * seconds:>10.0f}" for seconds in by_turn(found, "ttft")))
    print(f"{'prompt tokens':<16}" + "".join(f"{tokens:>10.0f}" for tokens in by_turn(rounds["goes on"], "prompt")))
    for way, found in rounds.items():
        new = [p - c for p, c in zip(by_turn(found, "prompt"), by_turn(found, "cached"), strict=True)]
        print(f"{'new, ' + way:<16}" + "".join(f"{tokens:>10.0f}" for tokens in new))
    paths = [turn["path"] for agents in rounds["goes on"] for agent in agents for turn in agent[1:]]
    print(f"handed over: {paths.count('handoff')} of {len(paths)} turns after the first")
    said = {way: [[turn["said"] for turn in agent] for agent in found[0]] for way, found in rounds.items()}
    print(f"same words everywhere: {all(words == said['goes on'] for words in said.values())}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/models/SmolLM2-135M-Instruct"))
    parser.add_argument("--agents", type=int, default=3)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--answer", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--plot", action="store_true", help="also chat_ttft.png and chat_timeline.png")
    parser.add_argument("--draw", type=Path, help="draw the pictures of this chat.json, and measure nothing")
    args = parser.parse_args()
    if args.draw:
        draw(json.loads(args.draw.read_text()), args.out)
        return
    about = about_this_run("cpu")
    work = {"model": args.model.name, "agents": args.agents, "turns": args.turns, "answer": args.answer}
    report = about | {"work": work, "rounds": measure(args)}
    show(report)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "chat.json").write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        draw(report, args.out)


if __name__ == "__main__":
    main()
