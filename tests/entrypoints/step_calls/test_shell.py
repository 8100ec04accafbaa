"""The command that a script is about."""

from __future__ import annotations

import random
import sys

import msgspec
import pytest

from baton.entrypoints.step_calls.shell import MAX_NAME, MAX_SCRIPT, MAX_TOKENS, effective_command
from baton.scheduler.jobs.calls import MAX_COMMAND, ToolCall

SCRIPTS: dict[str, str | None] = {
    # script -> the commands, the name of the call first
    "ls -la": "ls -la",
    "\n\n  # why\n\nls": "ls",
    "ls # and why": "ls",
    "$ ls -l": "ls -l",
    "/usr/bin/git log": "git log",
    "./run_tests.sh --fast": "run_tests.sh --fast",
    "bin/tool/ x": "tool x",
    "python3.11 app.py": "python app.py",
    "pip3 install x": "pip install x",
    "g++-12 a.cc": "g++ a.cc",
    "sha256sum f": "sha256sum f",
    "base64 -d f": "base64 -d f",
    '"my tool" x': "my tool x",
    "a\\\nb c": "ab c",
    # what only prepares
    "cd /x && git status": "git status",
    "cd /x\r\nls\r\n": "ls",
    "cd /x &&\\\n  make all": "make all",
    "(cd x; make)": "make",
    "set -euo pipefail\ncd /x\nls": "ls",
    ". venv/bin/activate && pytest": "pytest",
    "export A=1; source env.sh; conda activate e && pytest": "pytest",
    "conda install x": "conda install x",
    '[ -f x ] && test -d y && [[ -n "$A" && -d b || $c == (d) ]] && rm a': "rm a",
    "((i++)); (( j = 1 ))\nseq 3": "seq 3",
    "A=1 B='c d' C=$(date +%s) D=(1 2 3) E[0]+=x cmake ..": "cmake ..",
    'A="$(cat "b c")" python x.py': "python x.py",
    "A=${B:-'x y'} python x.py": "python x.py",
    "A=$'it\\'s b' python x.py": "python x.py",
    "A=`date +%s` python x.py": "python x.py",
    "A=\\ b python x.py": "python x.py",
    "cd x": "cd x",
    "set -e; cd x": "set -e; cd x",
    "make && cd y && ls": "make && ls",
    # here-documents
    "cat > a.py <<'EOF'\nimport os\nit's\nEOF\npython a.py": "python a.py",
    "cat <<-E >f\n\tcd\n EOF\n\tE\nls": "ls",
    "tee f <<A <<B\n1\nB\nA\n2\nB\nls": "ls",
    "cat <<E | psql -c '1\n2'\nrm\nE\nls": "psql -c …; ls",
    "cat <<< word\nls": "cat; ls",
    "cat > f <<EOF\nls": "cat",
    "make 3<<E\nrm\nE\nls": "make; ls",
    "python - <<EOF\nls\nEOF": "python -",
    # what runs another command
    "sudo -u bob -E A=1 apt-get install -y foo": "apt-get install -y foo",
    "sudo -- ls": "ls",
    "env -i A=1 B=2 ls": "ls",
    "env": "env",
    "time -p nohup ./x.sh &": "x.sh",
    "timeout 30 make": "make",
    "timeout -k 5 --signal=KILL 30s make": "make",
    "timeout 30": "timeout 30",
    "nice -n 10 ionice -c2 stdbuf -oL make": "make",
    "command ls": "ls",
    "command -v git": "command -v git",
    "uv run --with x pytest -q": "pytest -q",
    "uv pip install x": "uv pip install x",
    "poetry run python -m pytest": "pytest",
    "npx -y jest": "jest",
    'bash -lc "cd /r && pytest -x \\"a b\\"" && ls': 'pytest -x "a b"; ls',
    "bash -c 'bash -c \"ls -l\"'": "ls -l",
    "bash -e -c 'ls'": "ls",
    "bash -c": "bash -c",
    "bash build.sh -c 1": "bash build.sh -c 1",
    "python3 -u -X dev -m pytest -q": "pytest -q",
    "python -mjson.tool f": "json.tool f",
    "python -m": "python -m",
    "python -c 'import os'": "python -c 'import os'",
    # the language around commands
    "if [ -f x ]; then cat x; else ls; fi": "cat x; ls",
    "! { grep -q x f; }": "grep -q x f",
    "for f in *.py; do wc -l $f; done": "wc -l $f",
    "while read l; do echo $l; done < f": "echo $l",
    "case $x in a) ls ;; esac": "ls",
    "f() { curl x; }; f": "curl x; f",
    "function f { wget x; }": "wget x",
    ">out 2>&1 <in &>>log 3<>f grep x": "grep x",
    "grep x>out": "grep x",
    "diff <(sort a) b": "diff <(sort a) b",
    "grep```bash\ngrep x\n": "grep",
    "<(sort a)/x y": "x y",
    "cat f | head |& tail || ls": "cat f | head | tail || ls",
    "grep -E 'a|b;c' f | awk '{print\n$1}'": "grep -E … f | awk …",
    "make > log 2>&1 && ls": "make && ls",
    "echo x & sleep 1": "echo x & sleep 1",
    "A=1|ls": "ls",
    # nobody closes these
    "cd 'x\nls": "cd …",
    'cd "x\nls': "cd …",
    "cd $(ls": "cd $(ls",
    "cd `ls": "cd `ls",
    "cd ${x ls": "cd ${x ls",
    "cd \\": "cd \\",
    # nothing to run
    "": None,
    " \n\t\n": None,
    "# only words": None,
    "A=1": None,
    "> f": None,
    "&& || ;": None,
    "fi; done": None,
    "for x in a b": None,
    "'' x": None,
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_effective_command_of_a_script(script: str) -> None:
    command = SCRIPTS[script]
    found = effective_command(script)
    if command is None:
        assert found is None
        return
    assert found is not None
    assert found.command == command
    assert command.startswith(found.tool) and command[len(found.tool) :][:1] in ("", " ", ";")


def test_command_substitution_is_kept_as_the_tool_name() -> None:
    assert effective_command("$(which python) x.py") == ToolCall("$(which python)", "$(which python) x.py")


def test_tool_name_and_command_are_truncated() -> None:
    found = effective_command("cd x && " + "y" * 1000 + " z" * 20 + " zzzzzzzzz" * 100)
    assert found is not None and found.tool == "y" * MAX_NAME and len(found.command) == MAX_COMMAND


def test_unencodable_characters_are_replaced() -> None:
    found = effective_command("a\ud83d\x00b \udc00c")
    assert found == ToolCall("ab", "ab ?c")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=ToolCall) == found


def test_script_reading_is_bounded() -> None:
    near, far = "cd x;" * (MAX_TOKENS // 3 - 1), "cd x;" * (MAX_TOKENS // 3 + 1)
    assert effective_command(f"{near} ls") == ToolCall("ls", "ls")
    assert (found := effective_command(f"{far} ls")) is not None and found.tool == "cd"
    document = "cat >f <<E\n" + "x\n" * (MAX_SCRIPT // 2) + "E\nls"
    assert (found := effective_command(document)) is not None and found.tool == "cat"


HOSTILE = [
    "'", '"', "`", "$(", "$((", "${", '"$(', "(", "((", "<(", "$'", "a=(", "\\", "[[ ", "{ ", "if ", "A=1 ", "sudo ",
    "timeout ", "cd x;", "cd x\n", "bash -c 'cd x';", "bash -c \"", "<<E\n", "<<A <<B\n", "<<''\n\n", "cat <<E\nE\n",
    "# \n", "2>", "9", "python -X ", "for x;", "case ", "&", "A[", "\t",
]  # fmt: skip
"""What a script is made of again and again to cost time."""


def calls_made(script: str) -> int:
    """Calls of functions, built-in ones included, that reading it takes."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        effective_command(script)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("again", HOSTILE)
def test_work_is_linear_in_script_length_up_to_the_limit(again: str) -> None:
    few, many = 50, 200
    assert calls_made(again * many) <= many / few * 1.1 * calls_made(again * few)
    enough = MAX_SCRIPT // len(again) + 1
    # The interpreter may make a few calls of its own in between, as when it collects garbage.
    assert calls_made(again * enough * 20) <= 1.001 * calls_made(again * enough)


def test_random_input_never_raises() -> None:
    """Seeded fragments in any order: nothing is raised, and every call can be sent."""
    rng = random.Random(20241123)
    parts = [*HOSTILE, *(script for script in SCRIPTS if script), " ", "\n", "x", "ü", "\ud800", "|", ")", "}", ">&"]
    commands = 0
    for _ in range(3000):
        found = effective_command("".join(rng.choices(parts, k=rng.randint(1, 12))))
        commands += found is not None
        if found is not None:
            assert 0 < len(found.tool) <= MAX_NAME and len(found.command) <= MAX_COMMAND
            msgspec.msgpack.encode(found)
    assert commands > 2000


def test_command_before_deeply_nested_arguments_is_found() -> None:
    call = effective_command('pytest -q "$(ls $(dirname $(which $(cat "a; b"))))" && make')
    assert call is not None and call.tool == "pytest"
