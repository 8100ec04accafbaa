"""The command line of the analysis."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..flag_types import COUNT, POSITIVE, SHARE_ABOVE_0, file_refusal
from .advice import REACH
from .log.formats import FORMATS, MOONCAKE_BLOCK
from .log.prompt_text import BYTES_PER_TOKEN


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="baton analyze",
        description="Read a log of requests, and report the hit rate of a prefix cache by size, the size to choose, "
        "and the savings of continuations and leases.",
    )
    parser.add_argument("log", help="file of JSON lines or of one JSON array, gzipped or not; - for the standard input")
    reading = parser.add_argument_group("reading the log")
    reading.add_argument("--format", choices=FORMATS, help="format of the log (default: detected from its first item)")
    reading.add_argument(
        "--tokenizer", type=Path, help="folder with tokenizer.json, for logs of text (default: --model)"
    )
    reading.add_argument("--chat-template", type=Path, help="file of a chat template to use instead of the tokenizer's")
    reading.add_argument(
        "--bytes-per-token",
        type=COUNT,
        help=f"bytes of text per token, without a tokenizer (default: {BYTES_PER_TOKEN})",
    )
    reading.add_argument("--page-size", type=COUNT, help="tokens per KV page (default: 1, or the log's blocks)")
    reading.add_argument(
        "--block-tokens", type=COUNT, help=f"tokens per block of a mooncake log (default: {MOONCAKE_BLOCK})"
    )
    reading.add_argument("--max-line-mb", type=COUNT, default=32, help="skip longer lines (default: 32)")
    reading.add_argument("--max-requests", type=COUNT, help="stop after so many requests")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--model", type=Path, help="Hugging Face folder, for the sizes of a token's KV and of states")
    sizes.add_argument("--kv-bytes-per-token", type=COUNT, help="size of a token's KV, instead of --model")
    sizes.add_argument(
        "--bytes-per-state",
        type=COUNT,
        help="size of all recurrent states of a sequence, beside --kv-bytes-per-token (default: the model has none)",
    )
    sizes.add_argument(
        "--swa-full-tokens-ratio",
        type=SHARE_ABOVE_0,
        default=0.0,
        help="tokens of the pool for layers with a sliding window, as a share of those of the KV pool, as the server's "
        "flag of this name (default: as many as requests need, up to a fifth)",
    )
    pool = sizes.add_mutually_exclusive_group()
    pool.add_argument(
        "--pool-tokens", type=COUNT, help="size of the KV pool, to assess leases (default: as recommended)"
    )
    pool.add_argument("--pool-gb", type=POSITIVE, help="size of the KV pool in GiB")
    sizes.add_argument(
        "--reach",
        type=SHARE_ABOVE_0,
        nargs=3,
        default=REACH,
        metavar=("DEVICE", "HOST", "DISK"),
        help="share of an infinite cache's hits that each tier should reach (default: 0.8 0.95 0.99)",
    )
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=Path, help="also write the report to this file")
    out.add_argument(
        "--plot", type=Path, help="also plot the report to this PNG file; needs pip install 'baton-serve[bench]'"
    )
    out.add_argument(
        "--memory-gb",
        type=POSITIVE,
        default=1.0,
        help="memory of the prefix tree; beyond it the oldest entries are forgotten (default: 1)",
    )
    args = parser.parse_args(argv)
    if args.kv_bytes_per_token is None and args.model is None and args.pool_gb is not None:
        parser.error("--pool-gb needs --model or --kv-bytes-per-token")
    if args.bytes_per_state is not None and args.kv_bytes_per_token is None:
        parser.error("--bytes-per-state needs --kv-bytes-per-token; --model has both sizes")
    if args.swa_full_tokens_ratio and args.model is None:
        parser.error("--swa-full-tokens-ratio needs --model")
    if args.swa_full_tokens_ratio and args.kv_bytes_per_token is not None:
        parser.error("--swa-full-tokens-ratio needs sizes from --model; leave out --kv-bytes-per-token")
    if list(args.reach) != sorted(args.reach):
        parser.error("--reach: each tier finds at least what those above it do; give growing shares")
    if args.bytes_per_token is not None and (args.tokenizer or args.model):
        parser.error("--bytes-per-token is for text without a tokenizer; leave it out, or --tokenizer and --model")
    if args.chat_template is not None and not (args.tokenizer or args.model):
        parser.error("--chat-template needs --tokenizer, or --model")
    for name in ("json", "plot"):
        path = getattr(args, name)
        if path is not None and (wrong := file_refusal(path)):
            parser.error(f"--{name} {path}: {wrong}")
    return args
