"""The workloads of agents: arrivals of jobs, messages, tool times. A seed determines all of them, so that every server
gets the same.

    mini      8 turns, the context grows from 92 to 2,915 tokens; tools take 0.05 to 0.3 s, but one 2 to 5 s
    heavy     the same contexts; tool times with a heavy tail: two thirds around 0.4 s, a fifth around 8 s, an eighth
              from 30 s on (Pareto); the command gives a hint
    coding    1,000 to 2,000 new tokens a turn behind a system prompt of 2,000 that all jobs share, answers of 150 to
              450 tokens, heavy tool times; a tenth of the jobs drops its history in the middle
    mixed     5 to 8 turns (as many as asked for, or up to three fewer); the contexts of mini, behind examples that all
              jobs share; tools of two speeds (0.2 or 6 s), tools with a heavy tail, and one that lies: most of its
              calls take 0.1 s, every fourth 20 s; the last answer calls nothing
    toy       tasks in the language of the model in examples/toy_model, which answers them with the right command

In mini, heavy and coding each message ends by asking for one command in a code block. If the model repeats it, the
server sees the tool for which the time was drawn. SmolLM2-135M-Instruct seldom does. In mixed each message quotes the
whole answer, and the examples show that it is to be repeated, which that model nearly always does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

MINI_CONTEXTS = (92, 469, 811, 1343, 1655, 2241, 2665, 2915)
"""Prompt tokens of each turn; past the last it grows as it did on average."""

MINI_TOOLS: tuple[tuple[str, float, float], ...] = (
    ("find . -name '*.py'", 0.05, 0.15),
    ("cat src/app.py", 0.05, 0.10),
    ("cat tests/test_app.py", 0.05, 0.10),
    ("grep -rn TODO .", 0.08, 0.20),
    ("python -m pytest -q", 2.0, 5.0),
    ("cat src/app.py", 0.05, 0.10),
    ("sed -i s/a/b/ src/app.py", 0.10, 0.30),
)
"""Command, and the least and the most seconds that it takes. They come again in this order."""

SYSTEM = "You are an agent with a shell. Answer with one ```bash code block and nothing else."
MAX_TOOL_S = 600.0
_ENOUGH_TOKENS = 24
"""For any of the commands in a code block."""

_ENOUGH_TO_QUOTE = 32
"""For any of the answers that are quoted, so that the model ends them by itself."""


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """says: the messages before the answer. prompt_tokens: what the prompt should have in all; words are added to the
    last message for that; 0: add none. command: what the model is to run; "" if it is to call nothing. tool_s: seconds
    until the next turn, 0 for the last. drops_history: begin again with the system prompt and these messages."""

    says: tuple[Message, ...]
    prompt_tokens: int = 0
    new_tokens: int = 0
    max_tokens: int = 64
    command: str = ""
    tool_s: float = 0.0
    drops_history: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """arrival: seconds after the start. system_tokens: as `Turn.prompt_tokens`, of the system prompt, which is the same
    in all jobs. examples: the messages behind it, also the same in all jobs; the turns' prompt_tokens include their
    example_tokens."""

    number: int
    arrival: float
    system: str
    turns: tuple[Turn, ...]
    system_tokens: int = 0
    examples: tuple[Message, ...] = ()
    example_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """turns: of a job. time, tokens: what tool times and lengths are multiplied with. longest_tool_s: no tool takes
    longer, after the multiplication."""

    turns: int
    time: float = 1.0
    tokens: float = 1.0
    longest_tool_s: float = math.inf

    def tool_time(self, seconds: float) -> float:
        return min(seconds * self.time, self.longest_tool_s)

    def scaled(self, tokens: float) -> int:
        return max(1, round(tokens * self.tokens))


def arrivals(rng: random.Random, jps: float, duration: float) -> Iterator[float]:
    """A Poisson process: seconds at which jobs arrive, ``jps`` of them a second, up to ``duration``."""
    at = rng.expovariate(jps)
    while at < duration:
        yield at
        at += rng.expovariate(jps)


def plan(workload: str, sizes: Sizes, *, jps: float, duration: float, seed: int) -> list[Job]:
    """The jobs that arrive, in order. Equal arguments give equal jobs; a job does not depend on how many there are."""
    times = arrivals(random.Random(f"{seed} arrivals"), jps, duration)
    return [_job(workload, sizes, seed, number, at) for number, at in enumerate(times)]


def plan_jobs(workload: str, sizes: Sizes, number: int, seed: int) -> list[Job]:
    """So many jobs, all there at once."""
    return [_job(workload, sizes, seed, each, 0.0) for each in range(number)]


def _job(workload: str, sizes: Sizes, seed: int, number: int, at: float) -> Job:
    return WORKLOADS[workload](random.Random(f"{seed} job {number}"), number, at, sizes)


def heavy_tool(rng: random.Random) -> tuple[str, float]:
    """A command and its seconds."""
    kind = rng.random()
    if kind < 0.67:
        commands = ("ls -la", "cat setup.py", "grep -rn main .", "git status", "git diff", "python app.py")
        seconds = rng.lognormvariate(math.log(0.4), 0.8)
    elif kind < 0.88:
        commands = ("python -m pytest -q", "pip install -e .", "npm test", "python app.py", "git clone https://x.org/y")
        seconds = rng.lognormvariate(math.log(8.0), 0.7)
    else:
        commands = ("make all", "docker build .", "python -m pytest -q")
        seconds = 30.0 * rng.paretovariate(1.2)
    return rng.choice(commands), min(seconds, MAX_TOOL_S)


def mini_job(rng: random.Random, number: int, at: float, sizes: Sizes) -> Job:
    def tool(turn: int) -> tuple[str, float]:
        command, least, most = MINI_TOOLS[turn % len(MINI_TOOLS)]
        return command, rng.uniform(least, most)

    return _growing_job(number, at, sizes, tool)


def heavy_job(rng: random.Random, number: int, at: float, sizes: Sizes) -> Job:
    return _growing_job(number, at, sizes, lambda turn: heavy_tool(rng))


def mixed_tool(rng: random.Random) -> tuple[str, float]:
    """A command and its seconds. The speed of the first kind cannot be told from its name, the last kind's name says
    that it is fast."""
    kind = rng.random()
    if kind < 0.4:
        command, seconds = "python app.py", rng.choice((0.2, 6.0)) * rng.uniform(0.8, 1.25)
    elif kind < 0.75:
        command, seconds = heavy_tool(rng)
    else:
        command, seconds = "cat log.txt", 20.0 if rng.random() < 0.25 else 0.1
    return command, seconds


def mixed_job(rng: random.Random, number: int, at: float, sizes: Sizes) -> Job:
    turns = max(1, sizes.turns - rng.randrange(4)) if sizes.turns > 4 else sizes.turns
    return _quoting(_growing_job(number, at, replace(sizes, turns=turns), lambda turn: mixed_tool(rng)))


def _growing_job(number: int, at: float, sizes: Sizes, tool: Callable[[int], tuple[str, float]]) -> Job:
    step = (MINI_CONTEXTS[-1] - MINI_CONTEXTS[0]) / (len(MINI_CONTEXTS) - 1)
    turns = []
    for turn in range(sizes.turns):
        beyond = turn - len(MINI_CONTEXTS) + 1
        tokens = MINI_CONTEXTS[turn] if beyond <= 0 else MINI_CONTEXTS[-1] + step * beyond
        command, seconds = tool(turn)
        is_last = turn == sizes.turns - 1
        turns.append(
            Turn(
                says=(_request(number, turn, command),),
                prompt_tokens=sizes.scaled(tokens),
                max_tokens=max(_ENOUGH_TOKENS, sizes.scaled(96)),
                command=command,
                tool_s=0.0 if is_last else sizes.tool_time(seconds),
            )
        )
    return Job(number=number, arrival=at, system=SYSTEM, turns=tuple(turns))


def coding_job(rng: random.Random, number: int, at: float, sizes: Sizes) -> Job:
    forgets = rng.randrange(1, max(2, sizes.turns)) if rng.random() < 0.1 else 0
    turns = []
    for turn in range(sizes.turns):
        command, seconds = heavy_tool(rng)
        turns.append(
            Turn(
                says=(_request(number, turn, command),),
                new_tokens=sizes.scaled(rng.uniform(1000, 2000)),
                max_tokens=max(_ENOUGH_TOKENS, sizes.scaled(rng.uniform(150, 450))),
                command=command,
                tool_s=0.0 if turn == sizes.turns - 1 else sizes.tool_time(seconds),
                drops_history=turn > 0 and turn == forgets,
            )
        )
    return Job(number=number, arrival=at, system=SYSTEM, system_tokens=sizes.scaled(2000), turns=tuple(turns))


def _request(job: int, turn: int, command: str) -> Message:
    """The user's message of a turn, which follows the tool's output. As it names the job, jobs share only the system
    prompt."""
    return Message("user", f"Job {job}, step {turn + 1}. Run this:\n```bash\n{command}\n```")


FINAL_ANSWER = "I am done, and there is nothing left to run."


def _calling_answer(command: str) -> str:
    return f"I need to know more, so I run this now:\n```bash\n{command}\n```"


def _quoted(answer: str) -> str:
    return f"Say this:\n{answer}"


EXAMPLES = tuple(
    Message(role, text)
    for answer in (_calling_answer("ls"), FINAL_ANSWER, _calling_answer("cat README.md"))
    for role, text in (("user", _quoted(answer)), ("assistant", answer))
)

EXAMPLE_TOKENS = 153
"""Length of the examples and the marks around them, in SmolLM2's tokens."""


def _quoting(job: Job) -> Job:
    """The job in a form that a model of 135 M parameters follows: each message quotes its answer, behind examples of
    such answers. A request in words (run this, say that you are done) does not do: a few turns on, the model calls a
    tool whatever it says. The last turn asks for no call, as with agents that end by themselves."""
    turns = []
    for number, turn in enumerate(job.turns, 1):
        command = turn.command if number < len(job.turns) else ""
        answer = _calling_answer(command) if command else FINAL_ANSWER
        turns.append(
            replace(
                turn,
                says=(Message("user", f"Job {job.number}, step {number}. {_quoted(answer)}"),),
                prompt_tokens=turn.prompt_tokens + EXAMPLE_TOKENS,
                max_tokens=max(_ENOUGH_TO_QUOTE, turn.max_tokens),
                command=command,
            )
        )
    system = "You are an agent with a shell."
    return replace(job, system=system, turns=tuple(turns), examples=EXAMPLES, example_tokens=EXAMPLE_TOKENS)


_TOY_TIMES = {"find": (1.0, 3.0), "tail": (2.0, 5.0), "grep": (0.3, 1.0)}
"""Least and most seconds; all other commands take 0.05 to 0.2 s. In this language the command tells it all."""


def toy_job(rng: random.Random, number: int, at: float, sizes: Sizes) -> Job:
    from examples.toy_model.agent_language import TASKS

    turns: list[Turn] = []
    while len(turns) < sizes.turns:
        question, steps = rng.choice(TASKS)(rng, 12)
        says = Message("user", question)
        for _, text, output in steps:
            command = text if output is not None else ""
            least, most = _TOY_TIMES.get(command.partition(" ")[0], (0.05, 0.2))
            turns.append(Turn(says=(says,), command=command, tool_s=sizes.tool_time(rng.uniform(least, most))))
            says = Message("tool", output or "")
    turns = turns[: sizes.turns]
    last = turns[-1]
    turns[-1] = Turn(says=last.says, command=last.command)
    return Job(number=number, arrival=at, system="You are a shell agent. Do not think aloud.", turns=tuple(turns))


WORKLOADS: dict[str, Callable[[random.Random, int, float, Sizes], Job]] = {
    "mini": mini_job,
    "heavy": heavy_job,
    "coding": coding_job,
    "mixed": mixed_job,
    "toy": toy_job,
}

DEFAULT_TURNS = {"mini": 8, "heavy": 8, "coding": 11, "mixed": 8, "toy": 8}
