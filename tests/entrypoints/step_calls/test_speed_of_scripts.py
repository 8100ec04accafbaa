"""What is read from a script is what the scheduler's rules go by."""

from __future__ import annotations

import pytest

from baton.entrypoints.step_calls.shell import effective_command
from baton.scheduler.jobs.speed import Speed, by_rules


@pytest.mark.parametrize(
    ("script", "speed"),
    [
        ("echo 'a && make'", Speed.FAST), ("FOO=1 sudo timeout 60 make", Speed.SLOW), ("python -m pytest", Speed.SLOW),
        ("cd a && cat <<EOF > x\nmake\nEOF", Speed.FAST), ("bash -c 'cd a; make'", Speed.SLOW),
        ("/bin/ls", Speed.FAST), ("git -C a status", Speed.FAST), ("for f in *; do wc $f; done", Speed.FAST),
        ("git commit-graph x", Speed.UNCERTAIN), ("ls && sudo make", Speed.SLOW), ("ls | ./run", Speed.UNCERTAIN),
    ],
)  # fmt: skip
def test_speed_rules_apply_to_the_effective_command(script: str, speed: Speed) -> None:
    command = effective_command(script)
    assert command is not None and by_rules((command,)) is speed
