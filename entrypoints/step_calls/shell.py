"""The command that a shell script is about: what takes its time, not what stands before it.

    cd /repo && FOO=1 timeout 60 python3 -m pytest -q     ->    pytest, "pytest -q"

It is the first that does anything: changes of folder, settings, tests, and files written from a here-document only
prepare it, and a script of nothing else is about the first of these. What runs another command (sudo, time, bash -c)
gives way to that one. ``python -m x`` is x; folders and versions are left out of a name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ...scheduler.jobs.calls import MAX_COMMAND, ToolCall
from .shell_words import Command, Word, commands, unquoted

MAX_NAME = 128
"""Characters of a tool's name."""

MAX_SCRIPT = 100_000
"""Characters of a script that are looked at."""

_MAX_DEPTH = 4
"""Of scripts in scripts: bash -c "bash -c ...\""""

_KEYWORDS = frozenset({"if", "then", "elif", "else", "while", "until", "do", "!", "{", "}", "fi", "done", "esac", "$"})
"""Words that a command may follow; "$" is the prompt that a copied line begins with."""

_HEADERS = frozenset({"for", "select", "case"})
_FOLDERS = frozenset({"cd", "pushd", "popd"})
_SETTINGS = frozenset(
    {"set", "shopt", "setopt", "export", "unset", "source", ".", "umask", "ulimit", "alias", "unalias"}
    | {"declare", "typeset", "local", "readonly", "read", "trap", "eval"}
)
_TESTS = frozenset({"test", "[", "[[", "true", ":", "wait", "return"})
_PREPARES = _FOLDERS | _SETTINGS | _TESTS
_ACTIVATES = frozenset({"conda", "mamba", "micromamba", "pyenv", "nvm", "module"})
_ACTIVATING = frozenset({"activate", "deactivate", "use", "load", "shell"})
_WRITES_DOCUMENTS = frozenset({"cat", "tee"})
_SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh", "ash"})
_PYTHONS = frozenset({"python", "pypy"})

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*+(?:\[[^\]]*\])?\+?=")
_SCRIPT_OPTION = re.compile(r"-[a-z]*c[a-z]*")
_SUBSTITUTED = re.compile(r"[`$\n]")
_VERSION = re.compile(r"(python|pypy|pip|perl|ruby|php|lua|node|java|gcc|g\+\+|clang|clang\+\+)-?[0-9][0-9.]*")


class _Wrapper(NamedTuple):
    """A command that runs another. with_value: its options that take the next word. words: that stand between its
    options and the other command. second: the word that makes it one, if not all it does is to run others."""

    with_value: frozenset[str] = frozenset()
    words: int = 0
    second: str = ""


def _wrapper(options: str = "", words: int = 0, second: str = "") -> _Wrapper:
    return _Wrapper(frozenset(options.split()), words, second)


_WRAPPERS = {
    "sudo": _wrapper("-u -g -h -p -C -D -R -T -r -t -U --user --group --host --prompt --chdir"),
    "doas": _wrapper("-u -C"),
    "env": _wrapper("-u -C --unset --chdir"),
    "time": _wrapper("-f -o --format --output"),
    "timeout": _wrapper("-k -s --kill-after --signal", 1),
    "gtimeout": _wrapper("-k -s --kill-after --signal", 1),
    "nohup": _wrapper(),
    "nice": _wrapper("-n --adjustment"),
    "ionice": _wrapper("-c -n --class --classdata"),
    "taskset": _wrapper("", 1),
    "stdbuf": _wrapper("-i -o -e --input --output --error"),
    "setsid": _wrapper(),
    "exec": _wrapper("-a"),
    "command": _wrapper(),
    "builtin": _wrapper(),
    "unbuffer": _wrapper(),
    "xvfb-run": _wrapper("-n -s -e -f -p -w --server-num --server-args --error-file"),
    "npx": _wrapper("-p --package"),
    "bunx": _wrapper(),
    "uvx": _wrapper("-p --python --from --with"),
    "uv": _wrapper("-p --python --with --extra --group --env-file --project --directory", second="run"),
    "poetry": _wrapper("-C -P --directory --project", second="run"),
    "pipenv": _wrapper("--python", second="run"),
    "pdm": _wrapper("-p --project", second="run"),
    "rye": _wrapper(second="run"),
    "hatch": _wrapper("-e --env", second="run"),
    "conda": _wrapper("-n -p --name --prefix --cwd", second="run"),
    "mamba": _wrapper("-n -p --name --prefix --cwd", second="run"),
    "micromamba": _wrapper("-n -p --name --prefix --cwd", second="run"),
    "bundle": _wrapper("--gemfile", second="exec"),
    "pnpm": _wrapper("-C --dir --filter", second="exec"),
}


class _Found(NamedTuple):
    tool: str
    rest: str
    """What follows its name in the script."""
    prepares: bool

    def call(self) -> ToolCall:
        return ToolCall(self.tool, sendable(self.tool + self.rest.rstrip()))


def effective_command(script: str) -> ToolCall | None:
    """The command that the script is about, with what follows it, its name first. None if there is no command."""
    found = _find(script[:MAX_SCRIPT], _MAX_DEPTH)
    return found.call() if found is not None else None


def sendable(text: str) -> str:
    """As much of it as a call holds; half characters, which JSON can write and UTF-8 cannot hold, as question marks."""
    return text[:MAX_COMMAND].encode("utf-8", "replace").decode("utf-8")


def clean_name(word: str) -> str:
    """A command's name without folders, version, what a shell puts in behind its beginning, and what cannot be
    printed."""
    name = word.rstrip("/").rpartition("/")[2][:MAX_NAME]
    name = _SUBSTITUTED.split(name, 1)[0] or name
    name = "".join(character for character in name if character.isprintable())
    version = _VERSION.fullmatch(name)
    return version[1] if version else name


def _find(script: str, depth: int) -> _Found | None:
    first: _Found | None = None
    for command in commands(script):
        found = _read(script, command, depth)
        if found is not None and not found.prepares:
            return found
        first = first or found
    return first


def _read(script: str, command: Command, depth: int) -> _Found | None:
    """What one simple command runs. None if it is no command: a loop's header, a function's name, assignments."""
    words = command.words
    if command.ends_with == "(":
        return None
    at, wrapper = _past_keywords(words), None
    while at is not None and at < len(words):
        name = clean_name(unquoted(words[at].text))
        inner = _past_wrapper(words, at, name)
        if inner is None:
            return _named(script, command, at, name, depth)
        wrapper = wrapper or _Found(name, _rest(script, words[at]), False)
        at = inner
    return wrapper


def _past_keywords(words: list[Word]) -> int | None:
    """Where the command begins behind keywords and assignments; None in a header."""
    at = 0
    while at < len(words):
        word = words[at].text
        if word in _HEADERS:
            return None
        if word == "function":
            at += 2
        elif word in _KEYWORDS or _ASSIGNMENT.match(word):
            at += 1
        else:
            break
    return at


def _past_wrapper(words: list[Word], at: int, name: str) -> int | None:
    """Where the command begins that this one runs; None if it runs no other."""
    wrapper = _WRAPPERS.get(name)
    at += 1
    following = words[at].text if at < len(words) else ""
    if wrapper is None or (wrapper.second and following != wrapper.second):
        return None
    if name == "command" and following in ("-v", "-V"):
        return None
    at += bool(wrapper.second)
    while at < len(words) and (option := words[at].text).startswith("-"):
        at += 2 if option in wrapper.with_value else 1
        if option == "--":
            break
    at += wrapper.words
    while at < len(words) and _ASSIGNMENT.match(words[at].text):
        at += 1
    return at


def _named(script: str, command: Command, at: int, name: str, depth: int) -> _Found | None:
    """The command whose name stands there."""
    words = command.words
    if name in _SHELLS and depth and (inner := _script_of(words, at)) is not None:
        return _find(inner, depth - 1)
    if name in _PYTHONS and (module := _module_place(words, at + 1)) is not None:
        text = words[module].text.removeprefix("-m")
        return _Found(clean_name(unquoted(text)), _rest(script, words[module]), False)
    prepares = (
        name in _PREPARES
        or name.startswith("((")
        or (name in _ACTIVATES and len(words) > at + 1 and words[at + 1].text in _ACTIVATING)
        or (name in _WRITES_DOCUMENTS and command.has_here_document)
    )
    return _Found(name, _rest(script, words[at]), prepares) if name else None


def _rest(script: str, word: Word) -> str:
    return script[word.end : word.end + MAX_COMMAND]


def _script_of(words: list[Word], at: int) -> str | None:
    """The script that a shell is given with -c."""
    for place in range(at + 1, len(words) - 1):
        option = words[place].text
        if _SCRIPT_OPTION.fullmatch(option):
            return unquoted(words[place + 1].text)
        if not option.startswith("-"):
            break
    return None


def _module_place(words: list[Word], at: int) -> int | None:
    """The word that names the module which Python is to run, if it is to run one."""
    while at < len(words) and (option := words[at].text).startswith("-"):
        if option == "-m":
            return at + 1 if at + 1 < len(words) else None
        if option.startswith("-m"):
            return at
        at += 2 if option in ("-X", "-W") else 1
    return None
