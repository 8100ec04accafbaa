"""``python -m baton.entrypoints.convert_weights FOLDER --output DIR``: pickled weights -> safetensors, once.

For model folders that have their weights as pytorch_model*.bin or another file of torch.save only. The server never
loads those: see `runtime/checkpoint/pickled_weights.py`, which does the work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .program import run_program


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 if the folder cannot be converted (the reason is on stderr)."""
    parser = argparse.ArgumentParser(
        prog="baton convert",
        description="Convert a model folder whose weights are pickles (*.bin, *.pt) to a folder of safetensors. "
        "Only tensors are read from the pickles; a file that would run code is refused.",
    )
    parser.add_argument("folder", type=Path, help="model folder to read; it is left as it is")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="new folder to write")
    args = parser.parse_args(argv)
    return run_program("baton convert", lambda: _convert(args))


def _convert(args: argparse.Namespace) -> int:
    from ..runtime.checkpoint.pickled_weights import ConversionError, convert_folder  # imports torch: not for --help

    try:
        files = convert_folder(args.folder, args.output)
    except ConversionError as error:
        print(f"baton: {error}", file=sys.stderr)
        return 1
    print(f"wrote {len(files)} file(s) of weights; serve them with --model-path {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
