"""Shared by the benchmarks with --gpu: flags, a model with dummy weights, the engine's settings, a server, reports."""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.common import published
from benchmarks.common.measured import about_this_run
from benchmarks.common.models import SHAPES, write_dummy_model
from benchmarks.common.profile_table import plot_profiles, print_profiles


def add_gpu_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("on a GPU, dummy weights of a named shape")
    group.add_argument("--gpu", action="store_true", help="only this; everything below is for it")
    group.add_argument("--shape", choices=list(SHAPES), default=published.SHAPE)
    group.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu does the same, for a small shape")
    group.add_argument("--attention-backend", default="auto", help="as of the server")
    group.add_argument("--disable-cuda-graph", action="store_true")
    group.add_argument("--profile", action="store_true", help="also where the time of the steps goes")


OF_A_GPU = ("shape", "device", "attention_backend", "disable_cuda_graph", "profile")


def check_gpu_arguments(
    args: argparse.Namespace,
    parser: argparse.ArgumentParser,
    only_with: Iterable[str] = (),
    never_with: Iterable[str] = (),
) -> None:
    """Refuse flags that would be ignored, and --gpu without one. only_with, never_with: further flags that need --gpu,
    or do not go with it."""

    def given(names: Iterable[str]) -> str | None:
        return next((name.replace("_", "-") for name in names if getattr(args, name) != parser.get_default(name)), None)

    if args.gpu and (other := given(never_with)):
        parser.error(f"--{other} is not for a GPU; leave it out, or --gpu")
    if not args.gpu:
        if other := given((*OF_A_GPU, *only_with)):
            parser.error(f"--{other} is for a GPU; say --gpu, too")
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--gpu: this torch sees no CUDA device; --device cpu --shape llama-tiny does the same in small")


@contextlib.contextmanager
def dummy_model(shape: str) -> Iterator[str]:
    """The folder of a model without weights."""
    with tempfile.TemporaryDirectory() as made:
        write_dummy_model(Path(made), SHAPES[shape])
        yield made


def model_settings(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Fields of ModelArgs: flags of the server, keywords of the engine."""
    return {
        "model_path": folder,
        "load_format": "dummy",
        "device": args.device,
        "attention_backend": args.attention_backend,
        "disable_cuda_graph": args.disable_cuda_graph,
    }


@contextlib.contextmanager
def served(settings: dict[str, Any], log: Path) -> Iterator[str]:
    """The URL of a server with these settings, started for the purpose and stopped in the end. Its output goes to
    ``log``. Raises RuntimeError, with the end of that, if it does not get ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = []
    for name, value in (settings | {"port": port}).items():
        if value is not False:
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    command = [sys.executable, "-m", "baton.entrypoints.launch_server", *flags]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            while not _is_ready(url):
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended: {log.read_text()[-2000:]}")
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=2.0).status_code == 200
    except httpx.TransportError:
        return False


def describe_setup(args: argparse.Namespace, info: dict[str, Any]) -> str:
    """One line over a table: nothing that decides about speed is left to guess. info: what the worker tells."""
    about = about_this_run(args.device)
    return (
        f"{args.shape}, dummy weights, {info['dtype']}, on {about['device']}; attention {info['attention_backend']}, "
        f"CUDA graphs {'on' if info['cuda_graphs'] else 'off'}, overlap {'on' if info['overlap'] else 'off'}; "
        f"torch {about['torch']}, commit {about['commit']}"
    )


def has_goals(args: argparse.Namespace) -> bool:
    """Goals and published figures are of one shape on one kind of card."""
    return args.device == "cuda" and args.shape == published.SHAPE


def cell(value: float | None, width: int, digits: int = 2) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width},.{digits}f}".replace(",", " ")


def finish(
    args: argparse.Namespace,
    name: str,
    info: dict[str, Any],
    cells: list[dict[str, Any]],
    profiles: dict[str, Any],
    table: str,
) -> None:
    """Profiles (with --plot also in NAME.png), then the table (also in NAME.txt); everything in NAME.json."""
    args.out.mkdir(parents=True, exist_ok=True)
    if profiles:
        print_profiles(profiles)
        if args.plot:
            plot_profiles(profiles, args.out / f"{name}.png")
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    report = {
        **about_this_run(args.device),
        "setup": describe_setup(args, info),
        "peer": published.PUBLISHED,
        "settings": {key: value for key, value in settings.items() if key != "api_key"},
        "worker": {key: value for key, value in info.items() if key != "stats"},
        "cells": cells,
        "profiles": profiles,
    }
    (args.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.out / f"{name}.txt").write_text(table + "\n")
    print(f"written to {args.out / name}.json\n{table}")
