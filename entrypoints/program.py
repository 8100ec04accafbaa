"""What programs have in common: how they end, and how many files they may open."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 and the number of the signal, as in a shell."""


def run_program(name: str, work: Callable[[], int]) -> int:
    """The exit status of ``work``, a program's body. Ctrl-C and a reader of its output that has left are no faults, so
    neither leaves a traceback. name: of the program, for its message."""
    try:
        status = work()
        sys.stdout.flush()  # here, not when the interpreter ends, where a closed pipe cannot be caught
        return status
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class ServerFailure(Exception):
    """A server must end; the message is the one line that the operator reads."""


def allow_open_files(wanted: int) -> int:
    """Raise the soft limit on open files to ``wanted``, as far as the hard limit lets. Returns how many of these may be
    open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    return possible
