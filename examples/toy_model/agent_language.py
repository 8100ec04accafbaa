"""Agent transcripts: task, ```bash block, tool output, ..., final answer.

Each assistant turn follows from the text before it, and nearly always copies a number or a name from the tool's last
output or from the user, so that a wrong or missing KV slot changes the answer. A system prompt that says "Think first."
makes the assistant write a thought before every answer.
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


def _number(rng: random.Random) -> int:
    return rng.randrange(10, 100)


def _numbers(rng: random.Random, count: int) -> list[int]:
    return rng.sample(range(10, 100), count)


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
        ("I know the count.", f"{lines} lines are in {file}.", None),
    ]


def _find_word(rng: random.Random, max_listing: int) -> tuple[str, list[Step]]:
    file, word = _file(rng), rng.choice(WORDS)
    ask = rng.choice((f"Please grep {word} in {file}.", f"Can you grep {word} in {file}?"))
    thought, command = f"I grep {word} in {file}.", f"grep {word} -n {file}"
    if rng.random() < 0.15:
        return ask, [
            (thought, command, "(no output)"),
            ("Nothing was found.", f"{file} does not mention it.", None),
        ]
    line, sentence = _number(rng), _sentence(rng, word)
    return ask, [
        (thought, command, f"{line}: {sentence}"),
        ("I found it.", f"{file}:{line}: {sentence}", None),
    ]


def _largest_file(rng: random.Random, max_listing: int) -> tuple[str, list[Step]]:
    folder, file, sentence = rng.choice(FOLDERS), _file(rng), _sentence(rng)
    ask = rng.choice((f"What does the largest file in {folder} say?", f"Show the largest file of {folder}."))
    return ask, [
        (f"I look for the largest file in {folder}.", f"ls -S {folder} | head -n 1", file),
        (f"It is {file}. I read it.", f"cat {folder}/{file}", sentence),
        (f"Now I know what {file} says.", f"The largest file is {file}. It says:\n{sentence}", None),
    ]


def _add_numbers(rng: random.Random, max_listing: int) -> tuple[str, list[Step]]:
    first, second, (a, b) = _file(rng), _file(rng), _numbers(rng, 2)
    ask = rng.choice((f"Add the numbers in {first} and {second}.", f"What is the sum of {first} and {second}?"))
    return ask, [
        (f"I read {first}.", f"cat {first}", f"{a}"),
        (f"{a} is the first number. I read {second}.", f"cat {second}", f"{b}"),
        (f"{b} is the second number. I add both.", f"echo $(({a}+{b}))", f"{a + b}"),
        ("I know the sum.", f"{a}+{b}={a + b}", None),
    ]


def _read_setting(rng: random.Random, max_listing: int) -> tuple[str, list[Step]]:
    file = f"{rng.choice(CONFIGS)}.conf"
    path = f"./{'/'.join(rng.sample(FOLDERS, rng.randint(1, 2)))}/{file}"
    keys = rng.sample(KEYS, rng.randint(2, min(max_listing, 8)))
    values = [rng.choice(WORDS) if rng.random() < 0.3 else number for number in _numbers(rng, len(keys))]
    wanted = rng.randrange(len(keys))
    key, value = keys[wanted], values[wanted]
    listing = "\n".join(f"set {key} {value}" for key, value in zip(keys, values))
    ask = rng.choice((f"Look up the value of {key} in {file}.", f"What is the value of {key} in {file}?"))
    return ask, [
        (f"I must find {file}.", f"find . -name {file}", path),
        (f"It is at {path}. I read it.", f"cat {path}", listing),
        (f"I need the value of {key}.", f"I found the value of {key} {value} in {path}.", None),
    ]


def _file_size(rng: random.Random, max_listing: int) -> tuple[str, list[Step]]:
    folder, count = rng.choice(FOLDERS), rng.randint(2, max_listing)
    files, sizes = rng.sample(STEMS, count), _numbers(rng, count)
    wanted = rng.randrange(count)
    file, size = files[wanted], sizes[wanted]
    listing = "\n".join(f"- {file} {size}" for file, size in zip(files, sizes))
    ask = rng.choice((f"What is the size of {file} in {folder}?", f"Tell me the size of {file} in {folder}."))
    return ask, [
        (f"I list the sizes in {folder}.", f"cd {folder} && stat -c '- %n %s' *", listing),
        (f"I need the size of {file}.", f"I found the size of {file} {size} in the list.", None),
    ]


def _write_words(rng: random.Random, max_listing: int) -> tuple[str, list[Step]]:
    file, words = _file(rng), _sentence(rng, length=rng.randint(1, 8))
    ask = rng.choice((f"Please echo {words} into {file}.", f"Let echo {words} go into {file}."))
    return ask, [
        (f"I write to {file}.", f"echo {words} > {file}", "(no output)"),
        ("I check the file.", f"cat {file}", words),
        ("It worked.", f"Done. {file} now says:\n{words}", None),
    ]


def _last_error(rng: random.Random, max_listing: int) -> tuple[str, list[Step]]:
    log, service, code, line = f"{rng.choice(STEMS)}.log", rng.choice(SERVICES), _number(rng), _number(rng)
    error = f"{line}: error {code} in {service}"
    ask = rng.choice((f"What is the last error in {log}?", f"Check {log} for errors."))
    return ask, [
        (f"I look for errors in {log}.", f"grep error -n {log} | tail -n 1", error),
        ("I read around that line.", f"tail -n +{line} {log} | head -n 2", _sentence(rng)),
        ("I know the last error.", f"The last error of {log}:\n{error}", None),
    ]


def _remember(rng: random.Random, messages: list[Message], think: bool) -> dict[str, int]:
    """A first turn that gives codes to repeat, and to recall later: the longest-range dependency of the language."""
    count = rng.randint(2, 10)
    codes = dict(zip(rng.sample(WORDS, count), _numbers(rng, count)))
    listing = " ".join(f"{word} {code}" for word, code in codes.items())
    messages.append(Message("user", f"Remember these codes: {listing}"))
    messages.append(Message("assistant", _say(think, "I repeat the codes.", f"I will remember: {listing}")))
    return codes


def _recall(rng: random.Random, word: str, code: int) -> tuple[str, list[Step]]:
    ask = rng.choice((f"What is the code of {word}?", f"Tell me the code of {word}."))
    return ask, [(f"I need the code of {word}.", f"You gave me the code of {word} {code} before.", None)]


TASKS: tuple[Callable[[random.Random, int], tuple[str, list[Step]]], ...] = (
    _count_lines,
    _find_word,
    _largest_file,
    _add_numbers,
    _read_setting,
    _file_size,
    _write_words,
    _last_error,
)
