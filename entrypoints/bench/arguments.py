"""The command line of the benchmark. Flags have the names of SGLang's bench_serving and vLLM's ``bench serve``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..flag_types import COUNT, POSITIVE, RATE, WHOLE, file_refusal
from .apis import APIS, CONTINUATION, PREFIX

DESCRIPTION = """Send random prompts to a server and measure it: any server with OpenAI's API, or Baton's /generate.
Throughput and latencies are printed as a table, and written as JSON with --output-file."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="baton bench", description=DESCRIPTION, allow_abbrev=False)
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", default="http://127.0.0.1:30000", help="default: %(default)s")
    server.add_argument(
        "--backend",
        choices=APIS,
        default="openai",
        help="openai: /v1/completions; openai-chat: /v1/chat/completions; baton: /generate (default: %(default)s)",
    )
    server.add_argument("--model", help="name of the model in requests (default: the first of the server's /v1/models)")
    server.add_argument("--api-key", help="sent as Authorization: Bearer (default: $OPENAI_API_KEY)")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--num-prompts", type=COUNT, default=100, help="prompts; with --turns, conversations (default: %(default)s)"
    )
    load.add_argument(
        "--request-rate",
        type=RATE,
        default=float("inf"),
        help="arrivals a second of prompts, or of conversations: a Poisson process; inf: all at once (default: inf)",
    )
    load.add_argument("--max-concurrency", type=COUNT, help="requests under way at once (default: no limit)")
    load.add_argument(
        "--random-input-len",
        type=COUNT,
        default=512,
        help="tokens of a prompt, or of the user's text in each turn, approximately (default: %(default)s)",
    )
    load.add_argument("--random-output-len", type=COUNT, default=128, help="tokens of an answer (default: %(default)s)")
    load.add_argument(
        "--turns",
        type=COUNT,
        default=1,
        help="turns of a conversation, each with those before it as its prefix (default: %(default)s)",
    )
    load.add_argument(
        "--turns-by",
        nargs="+",
        choices=(PREFIX, CONTINUATION),
        help="prefix: each turn sends the whole conversation; continuation: each names the one before it, as only "
        "Baton's /generate can (default: with --backend baton one after the other, else prefix)",
    )
    load.add_argument("--seed", type=WHOLE, default=0, help="seed of prompts and arrivals (default: %(default)s)")
    load.add_argument(
        "--disable-ignore-eos",
        action="store_true",
        help="let the model end its answers early; needed by servers that refuse the field ignore_eos",
    )
    load.add_argument(
        "--flush-cache", action="store_true", help="empty the server's cache before each run (Baton, SGLang)"
    )
    load.add_argument(
        "--timeout", type=POSITIVE, default=600.0, help="seconds until a request has failed (default: %(default)g)"
    )
    parser.add_argument("--output-file", type=Path, help="write the report and each request to this file, as JSON")
    args = parser.parse_args(argv)
    if args.api_key is None:
        args.api_key = os.environ.get("OPENAI_API_KEY", "")
    if not args.api_key.isprintable() or not args.api_key.isascii():
        parser.error("--api-key: a key has only printable ASCII characters")
    if args.turns_by is not None and args.turns == 1:
        parser.error("--turns-by needs --turns of at least 2")
    if args.turns_by is None:
        args.turns_by = [PREFIX, CONTINUATION] if args.turns > 1 and args.backend == "baton" else [PREFIX]
    if CONTINUATION in args.turns_by and args.backend != "baton":
        parser.error(f"--turns-by continuation needs --backend baton; --backend {args.backend} resends conversations")
    args.turns_by = list(dict.fromkeys(args.turns_by))
    if args.output_file is not None and (wrong := file_refusal(args.output_file)):
        parser.error(f"--output-file {args.output_file}: {wrong}")
    return args
