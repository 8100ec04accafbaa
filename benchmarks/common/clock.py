"""The flag --cpu-time of benchmarks that compute in their own thread, and the clock that it selects."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable


def add_cpu_time(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the thread's CPU time instead of wall time: for a machine that has other work; needs --threads 1",
    )


def check_cpu_time(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """args: has ``threads``."""
    if args.cpu_time and args.threads != 1:
        parser.error("--cpu-time sees one thread only; say --threads 1")


def clock_of(args: argparse.Namespace) -> Callable[[], float]:
    """Seconds."""
    return time.thread_time if args.cpu_time else time.perf_counter
