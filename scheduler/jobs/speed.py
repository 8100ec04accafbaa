"""Is a tool call fast or slow? What its words alone say, before anything was measured.

The tables are meant to grow. An entry is a program, or a program and one of its arguments (git:status), and the latter
goes first. What is listed nowhere is unknown: what nobody has met, and what takes a moment here and an hour there
(find, curl, a script).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from .calls import ToolCall
from .shell import programs


class Speed(IntEnum):
    """Ordered: of calls that run side by side, or one after the other, the largest counts."""

    FAST = 0
    UNCERTAIN = 1
    SLOW = 2


FAST_S, SLOW_S = 2.0, 10.0
"""Calls are fast up to the first and slow from the second, in seconds: the first is how long the fixed rule waits, and
the second about what it takes to compute the KV of a whole pool again (DESIGN §5)."""

FAST = """
ls cat pwd head tail grep egrep fgrep rg ag echo printf cd pushd popd wc sed awk cut sort uniq tr tee nl tac rev paste
diff cmp comm touch mkdir rmdir rm cp mv ln chmod chown stat file basename dirname realpath readlink which whereis type
whoami id hostname uname date printenv export set unset source . alias true false test [ [[ seq expr let read xxd od jq
yq tree df free ps kill uptime history for case select done fi esac } exit return less more bat base64 md5sum sha256sum
view open edit str_replace insert create undo_edit read_file write_file edit_file view_file open_file list_files
list_dir list_directory goto scroll_up scroll_down search_file get_time get_current_time calculator
git:status git:diff git:log git:show git:branch git:add git:rev-parse git:config git:remote git:tag git:stash git:blame
git:checkout git:switch git:restore git:reset git:init git:ls-files git:grep git:mv git:rm git:describe git:reflog
pip:list pip:show pip:freeze pip3:list pip3:show pip3:freeze npm:list npm:ls npm:config docker:ps docker:images
docker:inspect kubectl:get systemctl:status cargo:metadata apt:list conda:list go:env go:version
"""

SLOW = """
make cmake ninja bazel mvn gradle gradlew ant scons meson msbuild xcodebuild mypy pyright pylint pre-commit
pytest tox nox unittest jest mocha vitest cypress playwright rspec phpunit ctest mutmut
apt apt-get aptitude dnf yum apk pacman brew snap docker-compose terraform ansible-playbook vagrant packer
ffmpeg torchrun accelerate deepspeed watch
pip:install pip:download pip:wheel pip3:install uv:sync uv:pip uv:add uv:lock poetry:install poetry:add poetry:lock
poetry:update pipenv:install conda:install conda:create conda:update mamba:install mamba:create
npm:install npm:i npm:ci npm:run npm:test npm:start yarn:install yarn:add yarn:build yarn:test pnpm:install pnpm:i
pnpm:add pnpm:build pnpm:test bun:install docker:build docker:pull docker:push docker:run docker:compose
cargo:build cargo:test cargo:run cargo:check cargo:clippy cargo:install cargo:bench go:build go:test go:install go:get
dotnet:build dotnet:test dotnet:restore bundle:install gem:install composer:install helm:install kubectl:wait
git:clone git:submodule git:lfs setup.py:install manage.py:test tail:-f tail:-F journalctl:-f
"""

RULES: dict[str, Speed] = {
    **dict.fromkeys(FAST.split(), Speed.FAST),
    **dict.fromkeys(SLOW.split(), Speed.SLOW),
}

SCRIPTED = frozenset({"python", "python3"})
"""Programs that are known by the file they run: `python setup.py install` is judged as `setup.py install`."""

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Rule(NamedTuple):
    """What the tables say."""

    speed: Speed
    by_name: bool
    """Only the name of the one tool was looked at: durations that were measured under that name say more."""


def rule_of(calls: tuple[ToolCall, ...]) -> Rule | None:
    """Slow if anything in the calls is, fast if all is; None where the tables do not say."""
    parts = [(call.tool, words) for call in calls for words in _programs(call)]
    if not parts:
        return None
    found = [_rule_of_program(words) for _, words in parts]
    slowest = max(rule.speed for rule in found)
    if slowest is Speed.UNCERTAIN:
        return None
    tool, words = parts[0]
    return Rule(slowest, len(parts) == 1 and found[0].by_name and words[0] == _base(tool))


def _programs(call: ToolCall) -> list[list[str]]:
    """What a call runs. Arguments of what is no shell command may look like anything: there the name is all."""
    name, parts = _base(call.tool), programs(call.command)
    if call.command.startswith(call.tool) or any(words[0] == name for words in parts):
        return parts
    return [[name]]


def _base(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def _rule_of_program(words: list[str]) -> Rule:
    name, arguments = words[0], words[1:]
    if name in SCRIPTED and arguments and arguments[0].endswith(".py"):
        name, arguments = _base(arguments[0]), arguments[1:]
    if arguments and arguments[0] in ("--version", "--help"):
        return Rule(Speed.FAST, by_name=False)
    if name == "sleep":
        return Rule(_speed_of_sleep(arguments), by_name=False)
    for argument in arguments:
        if (speed := RULES.get(f"{name}:{argument}")) is not None:
            return Rule(speed, by_name=False)
    return Rule(RULES.get(name, Speed.UNCERTAIN), by_name=True)


def _speed_of_sleep(arguments: list[str]) -> Speed:
    seconds = 0.0
    for argument in arguments:
        number = argument.rstrip("smhd")
        try:
            seconds += float(number) * UNITS[argument[len(number) :]]
        except (ValueError, KeyError):
            return Speed.UNCERTAIN
    return speed_between(seconds, seconds)


def speed_between(low_s: float, high_s: float) -> Speed:
    """Of what most likely takes between low_s and high_s."""
    if high_s <= FAST_S:
        return Speed.FAST
    return Speed.SLOW if low_s >= SLOW_S else Speed.UNCERTAIN
