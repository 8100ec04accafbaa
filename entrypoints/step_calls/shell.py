"""The commands that a shell script is about: what takes its time, not what stands around it.

    cd /repo && FOO=1 timeout 60 python3 -m pytest -q 2>&1 | tail     ->    pytest, "pytest -q | tail"

The first that does anything names the call. Changes of folder, settings, tests, and files written from a here-document
only prepare; a script of nothing else is about these. A command that runs another (sudo, time, bash -c) is replaced by
that one. ``python -m x`` is x; folders and versions are left out of a name. Redirections are left out, and an argument
that holds an operator or a line break (a pattern, a program) stands as "…": so the text can be split at operators.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from ...scheduler.jobs.calls import MAX_COMMAND, ToolCall

MAX_NAME = 128
"""Characters of a tool's name."""

MAX_SCRIPT = 100_000
"""Characters of a script that are looked at."""

_MAX_DEPTH = 4
"""Scripts within scripts: bash -c "bash -c ...\""""

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
_OPERATOR = re.compile(r"[|;&\n]")
_JOINTS = {"&&": " && ", "||": " || ", "|": " | ", "|&": " | ", "&": " & "}
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


class _Run(NamedTuple):
    """One command, its name first in the text. ends_with: the operator behind it."""

    tool: str
    text: str
    prepares: bool
    ends_with: str


def effective_command(script: str) -> ToolCall | None:
    """The commands that the script is about; their first one names the call. None if there is no command."""
    acts: list[_Run] = []
    prepares: list[_Run] = []
    size = 0
    for run in _runs(script[:MAX_SCRIPT], _MAX_DEPTH):
        (prepares if run.prepares else acts).append(run)
        size += 0 if run.prepares else len(run.text)
        if size >= MAX_COMMAND:
            break
    runs = acts or prepares
    if not runs:
        return None
    text = "".join(run.text + _JOINTS.get(run.ends_with, "; ") for run in runs[:-1]) + runs[-1].text
    return ToolCall(runs[0].tool, sendable(text))


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


def _runs(script: str, depth: int) -> Iterator[_Run]:
    """The commands that the script runs, in order, those of scripts that it passes to a shell included."""
    for command in split_commands(script):
        inner = _script_of(command.words) if depth else None
        if inner is not None:
            yield from _runs(inner, depth - 1)
        elif (run := _read(command)) is not None:
            yield run


def _read(command: Command) -> _Run | None:
    """The command that a simple command runs in the end. None for a loop's header, a function's name, assignments."""
    at = _name_place(command.words) if command.ends_with != "(" else None
    if at is None:
        return None
    words = command.words
    tool = clean_name(unquoted(words[at]))
    if tool in _PYTHONS and (module := _module_place(words, at + 1)) is not None:
        at, tool = module, clean_name(unquoted(words[module].removeprefix("-m")))
    arguments = words[at + 1 :]
    prepares = (
        tool in _PREPARES
        or tool.startswith("((")
        or (tool in _ACTIVATES and bool(arguments) and arguments[0] in _ACTIVATING)
        or (tool in _WRITES_DOCUMENTS and command.has_here_document)
    )
    text = " ".join([tool, *("…" if _OPERATOR.search(word) else word for word in arguments)])
    return _Run(tool, text, prepares, command.ends_with) if tool else None


def _name_place(words: list[str]) -> int | None:
    """Where the name of the command stands that is run in the end; None if there is none."""
    at, wrapper = _past_keywords(words), None
    while at is not None and at < len(words):
        inner = _past_wrapper(words, at, clean_name(unquoted(words[at])))
        if inner is None:
            return at
        wrapper = at if wrapper is None else wrapper
        at = inner
    return wrapper


def _past_keywords(words: list[str]) -> int | None:
    """Where the command begins behind keywords and assignments; None in a header."""
    at = 0
    while at < len(words):
        word = words[at]
        if word in _HEADERS:
            return None
        if word == "function":
            at += 2
        elif word in _KEYWORDS or _ASSIGNMENT.match(word):
            at += 1
        else:
            break
    return at


def _past_wrapper(words: list[str], at: int, name: str) -> int | None:
    """Where the command begins that this one runs; None if it runs no other."""
    wrapper = _WRAPPERS.get(name)
    at += 1
    following = words[at] if at < len(words) else ""
    if wrapper is None or (wrapper.second and following != wrapper.second):
        return None
    if name == "command" and following in ("-v", "-V"):
        return None
    at += bool(wrapper.second)
    while at < len(words) and (option := words[at]).startswith("-"):
        at += 2 if option in wrapper.with_value else 1
    at += wrapper.words
    while at < len(words) and _ASSIGNMENT.match(words[at]):
        at += 1
    return at


def _script_of(words: list[str]) -> str | None:
    """The script that a shell is given with -c; None if this is no shell, or has none."""
    at = _name_place(words)
    if at is None or clean_name(unquoted(words[at])) not in _SHELLS:
        return None
    for option, following in itertools.pairwise(words[at + 1 :]):
        if _SCRIPT_OPTION.fullmatch(option):
            return unquoted(following)
        if not option.startswith("-"):
            break
    return None


def _module_place(words: list[str], at: int) -> int | None:
    """The word that names the module which Python is to run, if it is to run one."""
    while at < len(words) and (option := words[at]).startswith("-"):
        if option == "-m":
            return at + 1 if at + 1 < len(words) else None
        if option.startswith("-m"):
            return at
        at += 2 if option in ("-X", "-W") else 1
    return None


# -- words and operators -----------------------------------------------------------------------------------------------
#
# As much of the language as it takes to find where commands begin, as regular expressions. Text that a shell would
# refuse is read somehow: a part that is not closed ends with the script. Quantifiers are possessive, so the time is
# proportional to the length of the script.

MAX_TOKENS = 4096
"""Words and operators that are looked at. Quoted text and here-documents count as one."""

_KEPT_WORDS = 64
"""Words kept of one command: enough for what stands before its name, and the options behind it."""

_MAX_NESTING = 2
"""Substitutions and quotes within each other; deeper ones end at the first mark that may close them."""

_ESCAPED = r"\\(?s:.)?"
_SINGLE_QUOTED = r"'[^']*+'?"
_ANSI_QUOTED = r"\$'(?:[^'\\]|\\(?s:.))*+'?"
_BACKQUOTED = rf"`(?:[^\\`]|{_ESCAPED})*+`?"


def _nesting_parts(depth: int) -> tuple[str, str, str]:
    """Expressions for "...", (...) and {...}, which may hold each other ``depth`` times."""
    if depth == 0:
        return rf'"(?:[^"\\]|{_ESCAPED})*+"?', r"\([^()]*+\)?", r"\{[^}]*+\}?"
    quoted, parenthesised, braced = _nesting_parts(depth - 1)
    expansion = rf"\$(?:{parenthesised}|{braced})?"
    within = rf"{_ESCAPED}|{_SINGLE_QUOTED}|{quoted}|{_BACKQUOTED}|{expansion}"
    return (
        rf'"(?:[^\\"`$]|{_ESCAPED}|{_BACKQUOTED}|{expansion})*+"?',
        rf"\((?:[^\\'\"`$()]|{within}|{parenthesised})*+\)?",
        rf"\{{(?:[^\\'\"`$}}]|{within})*+\}}?",
    )


_QUOTED, _PARENTHESISED, _BRACED = _nesting_parts(_MAX_NESTING)
_WORD = re.compile(
    rf"(?:(?=\(\(){_PARENTHESISED}|[<>]{_PARENTHESISED})?"  # ((arithmetic)), <(process substitution)
    rf"(?:[=@?*+!]{_PARENTHESISED}"  # an array, or a pattern
    rf"|[^\\ \t\r\f\v\n'\"`$;&|<>()]|{_ESCAPED}|{_SINGLE_QUOTED}|{_QUOTED}|{_BACKQUOTED}|{_ANSI_QUOTED}"
    rf"|\$(?:{_PARENTHESISED}|{_BRACED})?)*+"
)
_BLANK = re.compile(r"(?:[ \t\r\f\v]|\\\r?\n)*+")
_COMMENT = re.compile(r"#[^\n]*+")
_CONTROL = re.compile(r"(?!\(\()(?:&&|\|\||;;&?|;&|[;|&()\n])")
_REDIRECT = re.compile(r"[0-9]*+(&>>?|<<<|<<-?|<>|>>|>\||[<>]&|[<>])(?!\()")


class Command(NamedTuple):
    """One simple command: its first words as written, quotes and all, without redirections. ends_with: the operator
    behind it, "" for none."""

    words: list[str]
    has_here_document: bool
    ends_with: str


def split_commands(script: str) -> Iterator[Command]:
    """The simple commands of a script, in order; those without a word are left out."""
    words: list[str] = []
    here_document_ends: list[re.Pattern[str]] = []
    """Ends of the here-documents that this line has announced; their text begins behind it."""
    has_here_document = in_test = False
    at = 0
    for _ in range(MAX_TOKENS):
        at = _match_end(_BLANK, script, at)
        if at >= len(script):
            break
        if comment := _COMMENT.match(script, at):
            at = comment.end()
        elif redirect := _REDIRECT.match(script, at):
            start = _match_end(_BLANK, script, redirect.end())
            at = _match_end(_WORD, script, start)
            if redirect[1] in ("<<", "<<-"):
                has_here_document = True
                tabs = r"\t*+" if redirect[1] == "<<-" else ""
                delimiter = re.escape(unquoted(script[start:at]))
                here_document_ends.append(re.compile(rf"^{tabs}{delimiter}\r?$", re.MULTILINE))
        elif control := _CONTROL.match(script, at):
            at = control.end()
            if control[0] == "\n":
                for end in here_document_ends:
                    found = end.search(script, at)
                    at = found.end() if found else len(script)
                here_document_ends.clear()
            if words and not in_test:
                yield Command(words, has_here_document, control[0])
                words, has_here_document = [], False
        else:
            start, at = at, _match_end(_WORD, script, at)
            word = script[start:at]
            in_test = (in_test or (not words and word == "[[")) and word != "]]"
            if len(words) < _KEPT_WORDS:
                words.append(word)
    if words:
        yield Command(words, has_here_document, "")


def _match_end(expression: re.Pattern[str], script: str, at: int) -> int:
    """The end of what matches here; ``at`` for nothing."""
    found = expression.match(script, at)
    return at if found is None else found.end()


def unquoted(word: str) -> str:
    """Its text without quotes and backslashes; what a shell would put in place of a variable stays as it is written."""
    if len(word) > 1 and word[0] == word[-1] == "'" and "'" not in word[1:-1]:
        return word[1:-1]
    if len(word) > 1 and word[0] == word[-1] == '"':
        return re.sub(r'\\([\\"$`])', r"\1", word[1:-1])
    return re.sub(r"\\\r?\n|[\"'\\]", "", word)
