"""``baton ds-channels``: finds the channels of a model's keys that decide most, for ``--enable-double-sparsity``.

Computes one prompt, such as a page of the text that the model will read, and writes for each layer and KV head its
channels in the order of their mean size: of queries, of keys, and of both together (``runtime/double_sparsity.py``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .flag_types import COUNT
from .program import run_program

CHARACTERS = 64
"""Read of the text for each token at most, so that a corpus of any size may be given."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 if the model, the text or the file cannot be used (the reason is on stderr)."""
    parser = argparse.ArgumentParser(
        prog="baton ds-channels",
        description="Find the channels of a model's keys that decide most, for --enable-double-sparsity.",
    )
    parser.add_argument("--model-path", required=True, metavar="MODEL", help="the model, as for baton serve")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text such as the model reads")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON file to write")
    parser.add_argument(
        "--num-tokens",
        type=COUNT,
        default=4096,
        metavar="N",
        help="most tokens of the text that are read; never more than the model's context (default: 4096)",
    )
    served = "as for baton serve (default: %(default)s)"
    parser.add_argument("--tokenizer-path", default="", metavar="FOLDER", help="as for baton serve")
    parser.add_argument("--model-impl", choices=("auto", "baton", "transformers"), default="auto", help=served)
    parser.add_argument("--trust-remote-code", action="store_true", help="as for baton serve")
    parser.add_argument("--dtype", choices=("auto", "float32", "float16", "bfloat16"), default="auto", help=served)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=served)
    args = parser.parse_args(argv)
    return run_program("baton ds-channels", lambda: _find_channels(args))


def _find_channels(args: argparse.Namespace) -> int:
    # Here, not for --help: they import torch.
    from torch import OutOfMemoryError

    from ..runtime.checkpoint.model_files import resolve_model_folder
    from ..runtime.config import ModelArgs
    from ..runtime.runner.model_runner import ModelRunner
    from ..runtime.text.tokenizer import Tokenizer

    model = ModelArgs(
        model_path=args.model_path,
        model_impl=args.model_impl,
        trust_remote_code=args.trust_remote_code,
        dtype=args.dtype,
        device=args.device,
        disable_cuda_graph=True,
    )
    try:
        if args.output.is_dir() or not args.output.parent.is_dir():  # known before the model has run
            raise ValueError(f"--output {args.output}: give a file in a folder that exists")
        text = _beginning(args.text, min(CHARACTERS * args.num_tokens, sys.maxsize))
        ids = Tokenizer.load(resolve_model_folder(args.tokenizer_path or args.model_path)).encode(text)
        if not ids:
            raise ValueError(f"--text {args.text} is empty; give a text such as the model will read")
        ids = ids[: args.num_tokens]
        runner = ModelRunner(
            model, context_length=0, num_rows=1, page_size=1, max_total_tokens=len(ids), chunked_prefill_size=512
        )
        ids = ids[: runner.config.context_length]
        channels = runner.find_heavy_channels(ids)
        args.output.write_text(json.dumps(channels))
    except (OSError, ValueError, MemoryError, OutOfMemoryError) as error:
        print(f"baton: {error}", file=sys.stderr)
        return 1
    print(f"wrote {len(channels)} lists of channels, from {len(ids)} tokens, to {args.output}")
    return 0


def _beginning(file: Path, characters: int) -> str:
    """Raises OSError, and ValueError if the file is not UTF-8."""
    try:
        with file.open(encoding="utf-8") as text:
            return text.read(characters)
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {file} is not UTF-8 text: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
