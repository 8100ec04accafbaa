"""Calls of a whole answer, in every format, in and behind thoughts."""

from __future__ import annotations

import random

import msgspec
import pytest

from baton.entrypoints.reasoning_parsers.registry import REASONING_PARSERS
from baton.entrypoints.step_calls.call_reader import MAX_ANSWER, MAX_CALLS, CallReader
from baton.entrypoints.tool_parsers.registry import TOOL_PARSERS
from baton.scheduler.jobs.calls import ToolCall

READ = ToolCall("read_file", '{"path": "a.txt"}')
PYTEST = ToolCall("pytest", "pytest -q")
BASH = '{"command": "cd /x && pytest -q"}'
READ_JSON = '{"name": "read_file", "arguments": {"path": "a.txt"}}'
BASH_JSON = f'{{"name": "bash", "arguments": {BASH}}}'
TAGGED = f"<tool_call>\n{READ_JSON}\n</tool_call>\n<tool_call>\n{BASH_JSON}\n</tool_call>"
CODER = (
    "<function=read_file>\n<parameter=path>\na.txt\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=bash>\n<parameter=command>\ncd /x && pytest -q\n</parameter>\n</function>\n</tool_call>"
)
DEEPSEEK_V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>read_file\n"
    '```json\n{"path": "a.txt"}\n```<｜tool▁call▁end｜>\n'
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n```json\n{BASH}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DEEPSEEK_V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>read_file<｜tool▁sep｜>{"path": "a.txt"}<｜tool▁call▁end｜>'
    f"<｜tool▁call▁begin｜>bash<｜tool▁sep｜>{BASH}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
GPT_OSS = (
    f"<|channel|>analysis<|message|>Not ```bash\nrm\n```.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.read_file <|constrain|>json<|message|>{"path": "a.txt"}<|call|>'
    f"<|start|>assistant<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{BASH}<|call|>"
)
LLAMA = READ_JSON.replace("arguments", "parameters") + "; " + BASH_JSON.replace("arguments", "parameters")
PYTHONIC = '[read_file(path="a.txt"), bash(command="cd /x && pytest -q")]'

FORMATS: dict[str, list[str]] = {
    "deepseekv3": [DEEPSEEK_V3],
    "deepseekv31": [DEEPSEEK_V31],
    "gpt-oss": [GPT_OSS],
    "hermes": [TAGGED, f"Let me see.\n{TAGGED}\nSo."],
    "llama3": [f"<|python_tag|>{LLAMA}", LLAMA, f"\n{LLAMA}"],
    "mistral": [f"[TOOL_CALLS] [{READ_JSON}, {BASH_JSON}]", f" [{READ_JSON}, {BASH_JSON}]"],
    "mistral-args": [f'[TOOL_CALLS]read_file[ARGS]{{"path": "a.txt"}}[TOOL_CALLS]bash[ARGS]{BASH}'],
    "pythonic": [PYTHONIC, f"<|python_start|>{PYTHONIC}<|python_end|>", f"Let me see.\n{PYTHONIC}"],
    "qwen": [TAGGED],
    "qwen25": [TAGGED],
    "qwen3_coder": [f"<tool_call>\n{CODER}", CODER, f"Let me see.\n<tool_call>\n{CODER}"],
}
SAMPLES = [(name, answer) for name, answers in FORMATS.items() for answer in answers]
UNMARKED = {PYTHONIC, f"Let me see.\n{PYTHONIC}", CODER}
"""Forms that cannot be told from words by the answer alone."""


def read(answer: str, tools: str | None = None, reasoning: str | None = None) -> tuple[ToolCall, ...]:
    return CallReader(tools, reasoning).read_calls(answer)


def test_every_call_format_has_a_sample() -> None:
    assert FORMATS.keys() == TOOL_PARSERS.keys()


@pytest.mark.parametrize(("name", "answer"), SAMPLES)
def test_calls_of_every_format_are_read(name: str, answer: str) -> None:
    assert read(answer, name) == (READ, PYTEST)


@pytest.mark.parametrize(("name", "answer"), [each for each in SAMPLES if each[1] not in UNMARKED])
def test_call_format_is_detected_from_the_answer(name: str, answer: str) -> None:
    assert read(answer) == (READ, PYTEST)


@pytest.mark.parametrize("name", [name for name in REASONING_PARSERS if name != "gpt-oss"])
def test_calls_inside_reasoning_are_ignored(name: str) -> None:
    start, end = REASONING_PARSERS[name].start, REASONING_PARSERS[name].end
    thought, asked = f"Not {TAGGED} nor\n```bash\nrm x\n```\n", "```bash\npytest -q\n```"
    for begun in (start, f"\n{start}\n", ""):  # "": the prompt has opened the thought
        assert read(f"{begun}{thought}{end}\n\n{asked}", None, name) == (PYTEST,)
        assert read(f"{begun}{thought}{end}\n\n{TAGGED}", "hermes", name) == (READ, PYTEST)
        assert read(f"{begun}{thought}{end}\n\nDone.", "hermes", name) == ()
    assert read(f"{start}{thought}", "hermes", name) == (), "a thought that does not end"
    assert read(asked, None, name) == (PYTEST,), "no thought"


@pytest.mark.parametrize("start", ["<think>", ""])
def test_reasoning_is_recognised_by_its_tags(start: str) -> None:
    assert read(f"{start}Not\n```bash\nrm x\n```\n</think>\n```bash\npytest -q\n```") == (PYTEST,)


def test_gpt_oss_reasoning_is_skipped() -> None:
    assert read(GPT_OSS, "gpt-oss", "gpt-oss") == read(GPT_OSS, "gpt-oss") == (READ, PYTEST)
    assert read(GPT_OSS.partition("<|start|>")[0], "gpt-oss", "gpt-oss") == ()


@pytest.mark.parametrize("tools", [None, *TOOL_PARSERS])
def test_code_block_is_read_for_every_format(tools: str | None) -> None:
    assert read("I test.\n```bash\ncd /x && pytest -q\n```", tools) == (PYTEST,)
    assert read("I am done.", tools) == read("", tools) == read("```json\n[]\n```", tools) == ()


def test_tool_calls_take_precedence_over_code_blocks() -> None:
    assert read(f"Not\n```bash\nrm x\n```\nbut\n{TAGGED}", "hermes") == (READ, PYTEST)


@pytest.mark.parametrize(
    "answer", ['{"name": "Ada", "age": 36}', '[{"name": "Ada"}]', '{"arguments": "none"}', '"name" "arguments"']
)
def test_json_answer_is_not_a_call(answer: str) -> None:
    assert read(answer) == read(answer, "hermes") == ()


def test_number_of_calls_is_limited() -> None:
    calls = read(TAGGED * MAX_CALLS, "hermes")
    assert len(calls) == MAX_CALLS and calls[:2] == (READ, PYTEST)


def test_end_of_a_long_answer_is_read() -> None:
    thought = "<think>" + "x " * MAX_ANSWER + "</think>"
    assert read(thought + TAGGED) == (READ, PYTEST)
    assert read("```bash\nls\n```" + "\n" * MAX_ANSWER) == ()


def test_unknown_parser_names_are_refused() -> None:
    with pytest.raises(ValueError, match="tool call parser"):
        CallReader(tools="quen")
    with pytest.raises(ValueError, match="reasoning parser"):
        CallReader(reasoning="quen3")


def test_random_input_never_raises() -> None:
    """Seeded pieces of all formats in any order, and cut off: nothing is raised, and every call can be sent."""
    rng = random.Random(20241124)
    parts = [answer for _, answer in SAMPLES] + [
        "<think>",
        "</think>",
        "```bash\n",
        "```",
        "\n",
        "{",
        "}",
        "[",
        '"',
        "x",
    ]
    readers = [
        CallReader(tools, reasoning) for tools in (None, *TOOL_PARSERS) for reasoning in (None, *REASONING_PARSERS)
    ]
    found = 0
    for _ in range(3000):
        pieces = [part[rng.randint(0, len(part) // 2) : rng.randint(len(part) // 2, len(part))] for part in parts]
        calls = rng.choice(readers).read_calls("".join(rng.choices(pieces + parts, k=rng.randint(1, 5))))
        found += bool(calls)
        assert len(calls) <= MAX_CALLS and all(call.tool for call in calls)
        msgspec.msgpack.encode(calls)
    assert found > 500
