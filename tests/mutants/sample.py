"""Which mutants are drawn, and which of the tests that reach one are run on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b

SEED = "baton"


def place(name: str) -> int:
    """Where a mutant stands in the order in which they are drawn: by its name alone, so that it is the same each time,
    whatever other mutants there are."""
    return int.from_bytes(blake2b(f"{SEED}:{name}".encode(), digest_size=8).digest())


def drawn(names_by_folder: Mapping[str, Iterable[str]], size: int) -> set[str]:
    """size mutants of each folder, or all where it has no more. A larger sample contains every smaller one."""
    return {name for names in names_by_folder.values() for name in sorted(names, key=place)[:size]}


def within(seconds: float, tests: Iterable[str], took: Mapping[str, float], always: tuple[str, ...] = ()) -> list[str]:
    """The quickest of the tests, for as long as they take no more than the seconds together; at least one. took: the
    seconds of each. always: beginnings of names; such tests are taken first and count like others."""
    order = sorted(tests, key=lambda test: (not test.startswith(always), took[test], test))
    taken: list[str] = []
    left = seconds
    for test in order:
        left -= took[test]
        if taken and left < 0 and not test.startswith(always):
            break
        taken.append(test)
    return taken
