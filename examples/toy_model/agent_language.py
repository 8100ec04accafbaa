"""Agent transcripts: task, ```bash block, tool output, ..., final answer.

Each assistant turn follows from what stands before it, and nearly always copies a number or a name from the tool's
last output or from the user, so that a wrong or missing KV slot changes the answer. A system prompt that says
"Think first." makes the assistant write a thought before every answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from .conversation import THINK_END, THINK_START, Conversation, Message
from .words import CONFIGS, EXTENSIONS, FOLDERS, KEYS, RULES, SERVICES, STEMS, WORDS

Step = tuple[str, str, str | None]
"""(thought, command or answer, tool output); the output is None for a final answer."""


def agent_conversation(rng: random.Random, rounds: int | None = None, max_listing: int = 12) -> Conversation:
    """One transcript. rounds: user tasks (drawn from 1 to 3 if None). max_listing: lines in the longest listing."""
    think = rng.random() < 0.5
    messages = [Message("system", system_prompt(rng, think))]
    codes = _remember(rng, messages, think) if rng.random() < 0.25 else {}
    for _ in range(rounds or rng.choices((1, 2, 3), (5, 3, 2))[0]):
        if codes and rng.random() < 0.5:
            word = rng.choice(list(codes))
            question, steps = _recall(rng, word, codes[word])
        else:
            question, steps = rng.choice(TASKS)(rng, max_listing)
        messages.append(Message("user", question))
        for thought, text, output in steps:
            command = output is not None
            messages.append(Message("assistant", _say(think, thought, _bash(text) if command else text)))
            if command:
                messages.append(Message("tool", output))
    return Conversation("agent", messages)


def system_prompt(rng: random.Random, think: bool) -> str:
    """From about 25 to about 150 tokens: an opening, some rules, and whether to think."""
    opening = rng.choice(
        ("You are a shell agent.", "You are a careful assistant with a shell.", "You help with files.")
    )
    rules = rng.sample(RULES, rng.choices((0, 2, 5, 10), (4, 3, 2, 1))[0])
    return " ".join([opening, *rules, "Think first." if think else "Do not think aloud."])


def _say(think: bool, thought: str, text: str) -> str:
    return f"{THINK_START}{thought}{THINK_END}\n{text}" if think else text


def _bash(command: str) -> str:
    return f"```bash\n{command}\n```"


def _file(rng: random.Random) -> str:
    return f"{rng.choice(STEMS)}.{rng.choice(EXTENSIONS)}"


def _files(rng: random.Random, count: int) -> list[str]:
    """Different stems, so that a listing never holds two names that differ in the extension alone."""
    return [f"{stem}.{rng.choice(EXTENSIONS)}" for stem in rng.sample(STEMS, count)]


def _number(rng: random.Random, digits: int = 4) -> int:
    length = rng.randint(2, digits)
    return rng.randrange(10 ** (length - 1), 10**length)


def _sentence(rng: random.Random, word: str | None = None, length: int = 4) -> str:
    words = rng.sample([other for other in WORDS if other != word], length)
    if word is not None:
        words[rng.randrange(length)] = word
    return " ".join(words)


def _missing(rng: random.Random, command: str, file: str, thought: str) -> list[Step]:
    program = command.split()[0]
    return [
        (thought, command, f"{program}: {file}: No such file"),
        ("The file does not exist.", f"There is no file {file}.", None),
    ]


def _count_lines(rng: random.Random, max_listing: int) -> tuple[str, list[Step]]:
    file, lines = _file(rng), _number(rng)
    ask = rng.choice((f"How many lines are in {file}?", f"Count the lines of {file}.", f"How long is {file}?"))
    thought = f"I count the lines of {file}."
    if rng.random() < 0.1:
        return ask, _missing(rng, f"wc -l {file}", file, thought)
    return ask, [
        (thought, f"wc -l {file}", f"{lines} {file}"),
        (f"The tool says {lines}.", f"{file} has {lines} lines.", None),
    ]


def _find_word(rng: random.Random, max_listing: int) -> tuple[str, list[Step]]:
    file, word = _file(rng), rng.choice(WORDS)
    ask = rng.choice(
        (f"Find the word {word} in {file}.", f"Where in {file} is {word}?", f"Does {file} mention {word}?")
    )
    thought, command = f"I search {file} for {word}.", f"grep -n {word} {file}"
    if rng.random() < 0.15:
        return ask, [
            (thought, command, "(no output)"),
            ("Nothing was found.", f"{file} does not mention {word}.", None),
        ]
    line, sentence = _number(rng), _sentence(rng, word)
    return ask, [
        (thought, command, f"{line}: {sentence}"),
        (f"It is on line {line}.", f"Line {line} of {file} says: {sentence}", None),
    ]


def _largest_file(rng: random.Random, max_listing: int) -> tuple[str, list[Step]]:
    folder, file, sentence = rng.choice(FOLDERS), _file(rng), _sentence(rng)
    ask = rng.choice((f"What does the largest file in {folder} say?", f"Show the largest file of {folder}."))
    return ask, [
        (f"I look for the largest file in {folder}.", f"ls -S {folder} | head -n 1", file),
        (f"It is {file}. I read it.", f"cat {folder}/{file}", sentence),
        (f"Now I know what {file} says.", f"The largest file is {file}. It says: {sentence}", None),
    ]


def _add_numbers(rng: random.Random, max_listing: int) -> tuple[str, list[Step]]:
    (first, second), a, b = _files(rng, 2), _number(rng, 3), _number(rng, 3)
    ask = rng.choice((f"Add the numbers in {first} and {second}.", f"What is the sum of {first} and {second}?"))
    return ask, [
        (f"I read {first}.", f"cat {first}", f"{a}"),
        (f"The first number is {a}. I read {second}.", f"cat {second}", f"{b}"),
        (f"The second number is {b}. I add {a} and {b}.", f"echo $(({a} + {b}))", f"{a + b}"),
        (f"The sum is {a + b}.", f"{a} + {b} = {a + b}", None),
    ]


def _read_setting(rng: random.Random, max_listing: int) -> tuple[str, list[Step]]:
    file = f"{rng.choice(CONFIGS)}.ini"
    path = f"./{'/'.join(rng.sample(FOLDERS, rng.randint(1, 2)))}/{file}"
    keys = rng.sample(KEYS, rng.randint(2, min(max_listing, 8)))
    values = [str(_number(rng)) if rng.random() < 0.7 else rng.choice(WORDS) for _ in keys]
    wanted = rng.randrange(len(keys))
    key, value = keys[wanted], values[wanted]
    listing = "\n".join(f"{key} = {value}" for key, value in zip(keys, values))
    ask = rng.choice(
        (f"What is the {key} in {file}?", f"Look up {key} in {file}.", f"Find {file} and tell me the {key}.")
    )
    return ask, [
        (f"I must find {file}.", f"find . -name {file}", path),
        (f"It is at {path}. I read it.", f"cat {path}", listing),
        (f"The {key} is {value}.", f"In {path} the {key} is {value}.", None),
    ]


def _file_size(rng: random.Random, max_listing: int) -> tuple[str, list[Step]]:
    folder, files = rng.choice(FOLDERS), _files(rng, rng.randint(2, max_listing))
    sizes = [_number(rng) for _ in files]
    wanted = rng.randrange(len(files))
    file, size = files[wanted], sizes[wanted]
    listing = "\n".join(f"{size} {file}" for size, file in zip(sizes, files))
    ask = rng.choice((f"How big is {file} in {folder}?", f"What is the size of {file} in {folder}?"))
    return ask, [
        (f"I list {folder}.", f"ls -s {folder}", listing),
        (f"The size of {file} is {size}.", f"{file} has {size} blocks.", None),
    ]


def _write_word(rng: random.Random, max_listing: int) -> tuple[str, list[Step]]:
    file, word = _file(rng), rng.choice(WORDS)
    ask = rng.choice((f"Write the word {word} to {file}.", f"Put {word} into {file}."))
    return ask, [
        (f"I write {word} to {file}.", f"echo {word} > {file}", "(no output)"),
        ("I check the file.", f"cat {file}", word),
        ("It worked.", f"Done. {file} now says {word}.", None),
    ]


def _last_error(rng: random.Random, max_listing: int) -> tuple[str, list[Step]]:
    log, service, code, line = f"{rng.choice(STEMS)}.log", rng.choice(SERVICES), rng.randrange(400, 600), _number(rng)
    ask = rng.choice((f"What is the last error in {log}?", f"Check {log} for errors."))
    return ask, [
        (f"I look for errors in {log}.", f"grep -n error {log} | tail -n 1", f"{line}: error {code} in {service}"),
        (f"I read around line {line}.", f"tail -n +{line} {log} | head -n 2", _sentence(rng)),
        (f"It was error {code}.", f"The last error is {code} in {service}, on line {line}.", None),
    ]


def _remember(rng: random.Random, messages: list[Message], think: bool) -> dict[str, int]:
    """A first turn that gives codes to recall later: the longest-range dependency of the language."""
    codes = {word: _number(rng) for word in rng.sample(WORDS, rng.randint(2, 10))}
    listing = "\n".join(f"{word}: {code}" for word, code in codes.items())
    messages.append(Message("user", f"Remember these codes.\n{listing}"))
    messages.append(Message("assistant", _say(think, "I keep the codes in mind.", "I will remember the codes.")))
    return codes


def _recall(rng: random.Random, word: str, code: int) -> tuple[str, list[Step]]:
    ask = rng.choice((f"What is the code of {word}?", f"Tell me the code for {word}."))
    return ask, [(f"The user gave {code} for {word}.", f"The code of {word} is {code}.", None)]


TASKS: tuple[Callable[[random.Random, int], tuple[str, list[Step]]], ...] = (
    _count_lines,
    _find_word,
    _largest_file,
    _add_numbers,
    _read_setting,
    _file_size,
    _write_word,
    _last_error,
)
