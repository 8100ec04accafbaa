"""A shell command, taken apart just far enough to see which programs it runs. Nothing here is ever executed.

No grammar: commands arrive cut at a length, with quotes left open, and a wrong guess costs a lease that is a little too
long or too short. Everything here is linear in the length of the command.
"""

from __future__ import annotations

import re
from itertools import pairwise

TOKEN = re.compile(
    r"""(?P<ends>\|\|?|&&|&(?!>)|;+|\n|\$\(|`|[()])"""  # what ends one command and begins the next
    r"""|(?P<redirect>\d?(?:&>|<<<|<<|>>|>&|<&|>|<)&?\d?)"""
    r"""|(?P<word>(?:"(?:\\.|[^"\\])*(?:"|\\?$)|'[^']*(?:'|$)|\\.|\\$|[^\s|&;()<>`"'\\$]|\$(?!\())+)""",
    re.DOTALL,
)

HEREDOC = re.compile(r"<<-?[ \t]*[\"']?(\w+)")

ASSIGNMENT = re.compile(r"\w+\+?=")

KEYWORDS = frozenset({"do", "then", "else", "elif", "if", "while", "until", "!", "{", "time", "exec", "command"})
"""Stand before a command and change nothing about how long it takes."""

WRAPPERS: dict[str, int] = {
    **dict.fromkeys(("sudo", "env", "nice", "nohup", "xargs", "stdbuf", "unbuffer", "npx", "doas", "ionice"), 0),
    "timeout": 1,
}
"""Programs that run the program named after their options, and how many words of their own come before it."""

RUNNERS = frozenset({"poetry", "uv", "pipenv", "pdm", "hatch", "conda", "rye"})
"""Programs that run another one as `NAME run PROGRAM`."""

SHELLS = frozenset({"bash", "sh", "zsh", "dash"})

VALUED = frozenset({"-n", "-u", "-c", "-s", "-k", "-P", "-I", "-L", "-p", "-e"})
"""Options of wrappers that are followed by a value."""


def programs(command: str, depth: int = 0) -> list[list[str]]:
    """The commands that this one consists of, whatever joins them (pipes, &&, ;, new lines, loops, $(…)), each as its
    words: first the program, without its folder, then the arguments. Wrappers such as sudo are left out, redirections
    and here-documents too."""
    found: list[list[str]] = []
    words: list[str] = []
    target = False  # does the next word belong to a redirection?
    for match in TOKEN.finditer(_without_heredocs(command)):
        text = match.group()
        if match["ends"]:
            found += _unwrapped(words, depth)
            words, target = [], False
        elif match["redirect"]:
            if words and words[-1].isdigit() and text[0] in "<>":
                words.pop()
            target = not text[-1].isdigit()
        elif target:
            target = False
        else:
            words.append(_unquoted(text))
    return found + _unwrapped(words, depth)


def _without_heredocs(command: str) -> str:
    """The command without the lines that it hands to a program as input."""
    kept, tag = [], ""
    for line in command.split("\n"):
        if tag:
            tag = "" if line.strip() == tag else tag
            continue
        kept.append(line)
        if (begun := HEREDOC.search(line)) and "<<<" not in line:
            tag = begun[1]
    return "\n".join(kept)


def _unquoted(word: str) -> str:
    if len(word) > 1 and word[0] in "\"'" and word[-1] == word[0]:
        return word[1:-1]
    return word


def _unwrapped(words: list[str], depth: int) -> list[list[str]]:
    """The programs that one simple command runs: none, one, or those of the script that is handed to a shell."""
    at = 0
    while at < len(words):
        word = words[at].rsplit("/", 1)[-1]
        if word in KEYWORDS or ASSIGNMENT.match(words[at]):
            at += 1
        elif word in WRAPPERS:
            at = _after_options(words, at + 1) + WRAPPERS[word]
        elif word in RUNNERS and words[at + 1 : at + 2] == ["run"]:
            at = _after_options(words, at + 2)
        elif word.startswith("python") and words[at + 1 : at + 2] == ["-m"]:
            at += 2
        elif word in SHELLS and (script := _script(words[at + 1 :])) is not None and depth < 2:
            return programs(script, depth + 1)
        else:
            return [[word, *words[at + 1 :]]]
    return []


def _after_options(words: list[str], at: int) -> int:
    while at < len(words) and (words[at].startswith("-") or ASSIGNMENT.match(words[at])):
        at += 2 if words[at] in VALUED else 1
    return at


def _script(arguments: list[str]) -> str | None:
    """Of `bash -lc SCRIPT` the script."""
    for option, value in pairwise(arguments):
        if not option.startswith("-"):
            return None
        if option.endswith("c") and not option.startswith("--"):
            return value
    return None
