"""Programs as SGLang's documentation has them, only the import changed: they run, and what they say is what plain calls
say that send the same ids."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from math import exp, isclose
from pathlib import Path
from typing import Any

import pytest

from baton.entrypoints.engine import Engine
from baton.entrypoints.lang import RuntimeEndpoint, set_default_backend
from tests.doubles.server_under_test import ServerUnderTest

FOLDER = Path(__file__).parent / "sglang_programs"
COUNT = "How many lines are in poem.txt?"
SYSTEM = "<|im_start|>system\nYou are a shell agent. Do not think aloud.<|im_end|>\n"


def run(name: str) -> dict[str, Any]:
    """The result of a program's ``main``."""
    spec = importlib.util.spec_from_file_location(f"sglang_program_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main()


@pytest.fixture(autouse=True)
def no_default() -> Iterator[None]:
    yield
    set_default_backend(None)


@pytest.fixture
def plain(toy_engine: Engine) -> Plain:
    """The Engine is the default backend, and starts out with an empty cache."""
    toy_engine.flush_cache()
    set_default_backend(toy_engine)
    return Plain(toy_engine)


class Plain:
    """The same by plain calls: each prompt is sent as a whole, as the ids of what was written and generated."""

    def __init__(self, engine: Engine, text: str = "", ids: list[int] | None = None) -> None:
        self.engine, self.text, self.ids = engine, text, ids or []

    def copy(self) -> Plain:
        return Plain(self.engine, self.text, list(self.ids))

    def write(self, text: str) -> Plain:
        """Piece by piece, as a program does between two steps."""
        self.ids = self.ids + self.engine.encode(text, add_special_tokens=False)
        self.text += text
        return self

    def ask(self, question: str) -> Plain:
        return self.write(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")

    def generate(self, max_tokens: int, **fields: Any) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": max_tokens}
        answer = self.engine.generate(input_ids=self.ids, sampling_params=sampling, **fields)
        ends = answer["meta_info"]["finish_reason"]["type"] == "stop"
        self.ids = self.ids + (answer["output_ids"][:-1] if ends else answer["output_ids"])
        self.text += answer["text"]
        return answer

    def say(self, max_tokens: int) -> str:
        return self.generate(max_tokens)["text"]

    def logprobs(self, choice: str) -> list[float]:
        """The logprobs of the choice's tokens after the text."""
        ids = self.engine.encode(choice, add_special_tokens=False)
        answer = self.engine.generate(
            input_ids=self.ids + ids,
            sampling_params={"max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=len(self.ids),
        )
        return [row[0] for row in answer["meta_info"]["input_token_logprobs"]]


def close(found: Any, expected: list[float]) -> bool:
    return len(found) == len(expected) and all(isclose(a, b, abs_tol=1e-4) for a, b in zip(found, expected))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_multi_turn(plain: Plain) -> None:
    result = run("multi_turn")
    plain.write(SYSTEM).ask(COUNT)
    first = plain.say(32)
    plain.write("<|im_end|>\n").ask("Count the lines of notes.md.")
    second = plain.say(32)
    assert result["answers"] == [first, second] and "wc -l poem.txt" in first and "notes.md" in second
    assert result["text"] == plain.write("<|im_end|>\n").text
    assert [message["content"] for message in result["messages"]][1:] == [
        COUNT,
        first,
        "Count the lines of notes.md.",
        second,
    ]


def test_tip_suggestion(plain: Plain) -> None:
    result = run("tip_suggestion")
    plain.ask(COUNT)
    tips = [plain.copy().write(f"{i + 1}. ").say(12) for i in range(2)]
    assert all(tips) and tips[0] != tips[1]
    plain.write(f"1. {tips[0]}\n2. {tips[1]}\nThere")
    assert result["summary"] == plain.say(12)
    assert result["text"] == plain.text


def test_tool_use(plain: Plain) -> None:
    result = run("tool_use")
    for name, question, tool, rest in [
        ("counted", COUNT, "wc", " -l poem.txt"),
        ("found", "Can you grep amber in manual.md?", "grep", " candle -n manual.md"),
    ]:
        state = plain.copy().write(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n```bash\n")
        scores = [mean(state.logprobs(choice)) for choice in ("wc", "grep", "cat")]
        taken = ("wc", "grep", "cat")[scores.index(max(scores))]
        assert result[name][0] == taken == tool and close(result[name][2], scores)
        assert result[name][1] == state.text + tool + rest
        state.write(tool).write(" -l" if tool == "wc" else "")
        assert (state.text + state.say(12)).startswith(result[name][1] + "\n")
    assert result["variables"] == [True, False, True]


def test_select_routing(plain: Plain) -> None:
    result = run("select_routing")
    choices = ["There is no file poem.txt.", "```bash\nwc -l poem.txt\n```", "I"]
    plain.ask(COUNT)
    logprobs = [plain.logprobs(choice) for choice in choices]
    for route, text, found in result.values():
        assert route == choices[1] and text == plain.text + route + "<|im_end|>\n"
        assert all(close(a, b) for a, b in zip(found, logprobs, strict=True))


def test_tree_of_thought(plain: Plain) -> None:
    result = run("tree_of_thought")
    question = f"<|im_start|>user\n{COUNT}<|im_end|>\n"
    draft = plain.copy().ask(COUNT).say(6)
    plans, results = [], []
    for tool in ("wc", "cat"):
        branch = plain.copy().write(question).write(f"<|im_start|>assistant\n```bash\n{tool}")
        plans.append(branch.say(6))
        results.append(branch.write("<|im_end|>\n").ask("Count the lines of notes.md.").say(10))
    assert plans[0] != plans[1]
    joined = [[each] * 2 for each in results]
    assert result == {"draft": [draft], "plans": plans, "results": joined, "text": question}


def test_batching(plain: Plain, capsys: pytest.CaptureFixture[str]) -> None:
    result = run("batching")
    assert "5/5" in capsys.readouterr().err
    commands = []
    for file in ("poem.txt", "notes.md", "letter.csv", "manual.md", "poem.md"):
        commands.append(plain.copy().write(SYSTEM).ask(f"How many lines are in {file}?").say(24))
        assert f"wc -l {file}" in commands[-1]
    assert result == {"by_name": commands, "by_position": commands, "one_by_one": commands, "nothing": []}


def test_streaming(plain: Plain) -> None:
    tries = 20  # on a busy machine a reader falls behind and reads several pieces at once
    while not (result := run("streaming"))["in_pieces"] and tries:
        tries -= 1
    plain.write(SYSTEM).ask(COUNT).say(24)
    plain.write("<|im_end|>\n").ask("Count the lines of notes.md.")
    answer = plain.generate(24)
    assert result == {
        "everything": plain.write("<|im_end|>\n").text,
        **dict.fromkeys(("second", "async", "known"), answer["text"]),
        "tokens": answer["meta_info"]["completion_tokens"],
        "in_pieces": True,
    }


def test_chat_roles(plain: Plain) -> None:
    result = run("chat_roles")
    plain.write(SYSTEM).ask(COUNT).write("```bash\n")
    command = plain.say(12)
    turn = "```bash\n" + command
    again = plain.write("<|im_end|>\n").ask("Count the lines of notes.md.").say(12)
    plain.write("<|im_end|>\n")
    assert result["command"] == command and result["turn"] == turn and result["returned"] == turn.upper()
    assert result["set"] == ["poem.txt", len(turn)] and result["shown"] == f"ProgramState({plain.text})"
    assert [(message["role"], message["content"]) for message in result["messages"]] == [
        ("system", "You are a shell agent. Do not think aloud."),
        ("user", COUNT),
        ("assistant", turn),
        ("user", "Count the lines of notes.md."),
        ("assistant", again),
    ]


def test_parallel_sample(plain: Plain) -> None:
    result = run("parallel_sample")
    plain.ask(COUNT)
    path = plain.copy().write("```bash\n")
    command = path.say(12).split("\n")[0]
    assert command == "wc -l poem.txt" and result["commands"] == [command] * 3
    path = plain.copy().write("```bash\n").write(command).write("\n``` ")
    scores = [mean(path.logprobs(choice)) for choice in ("yes", "no")]
    assert result["sure"] == [("yes", "no")[scores.index(max(scores))]] * 3
    assert result["text"] == plain.text, "forks leave the text as it was"


def test_concatenation(plain: Plain) -> None:
    result = run("concatenation")
    plain.write(SYSTEM)
    prefix = plain.copy()
    for file in ("poem.txt", "notes.md", "letter.csv"):
        part = prefix.copy().ask(f"Count the lines of {file}.")
        part.say(16)
        part.write("<|im_end|>\n")
        plain.ids = plain.ids + part.ids[len(prefix.ids) :]
        plain.text += part.text[len(prefix.text) :]
    assert result["last"] == plain.ask("How long is manual.md?").say(16)
    assert result["text"] == plain.write("<|im_end|>\n").text and result["variables"] is False


def test_likely_paths(plain: Plain) -> None:
    result = run("likely_paths")
    plain.ask(COUNT)
    asked = {"return_logprob": True, "top_logprobs_num": 3, "return_text_in_logprobs": True}
    first = plain.copy().generate(1, **asked)["meta_info"]["output_top_logprobs"][0]
    assert len({text for _, _, text in first}) == 3
    for (text, likelihood, gap, rest), (logprob, _, expected) in zip(result["paths"], first, strict=True):
        path = plain.copy().write(expected).generate(8, return_logprob=True, top_logprobs_num=2)
        assert (text, rest) == (expected, path["text"]) and isclose(likelihood, exp(logprob), rel_tol=1e-3)
        gaps = [exp(best[0]) - exp(second[0]) for best, second in path["meta_info"]["output_top_logprobs"]]
        assert isclose(gap, mean(gaps), abs_tol=1e-3)


def test_every_program_has_a_test() -> None:
    assert {file.stem for file in FOLDER.glob("*.py")} == {
        name.removeprefix("test_") for name in globals() if name.startswith("test_")
    } - {"every_program_has_a_test", "the_same_on_a_server"}


@pytest.mark.process
def test_the_same_on_a_server(toy_server: ServerUnderTest, toy_engine: Engine) -> None:
    """Its record holds two finished requests beside the leased ones."""
    for name in ("tree_of_thought", "concatenation", "streaming", "likely_paths", "tool_use"):
        set_default_backend(RuntimeEndpoint(toy_server.url, "secret"))
        there = run(name)
        set_default_backend(toy_engine)
        here = run(name)
        for result in (there, here):
            result.pop("in_pieces", None)  # how many there are depends on how busy the machine is
        assert there == roughly(here)
    toy_server.wait_until(lambda: toy_server.metric("leased_tokens") == 0, "all leases are released")


def roughly(result: Any) -> Any:
    """With logprobs that may differ in the last digits."""
    if isinstance(result, dict):
        return {name: roughly(value) for name, value in result.items()}
    if isinstance(result, list | tuple):
        return type(result)(roughly(value) for value in result)
    return pytest.approx(result, abs=1e-4) if isinstance(result, float) else result
