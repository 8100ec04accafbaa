"""``python -m baton.entrypoints.convert_weights FOLDER --output DIR``: another folder of the same model, made once.

For model folders that have their weights as pytorch_model*.bin or another file of torch.save only, which the server
never loads: see `runtime/checkpoint/pickled_weights.py`. With ``--quantization``, for weights in few bits that are not
to be made anew at every start: see `runtime/runner/quantized_folder.py`.
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
        "Only tensors are read from the pickles; a file that would run code is refused. Or, with --quantization, one "
        "of float safetensors to a folder with weights in few bits.",
    )
    parser.add_argument("folder", type=Path, help="model folder to read; it is left as it is")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="new folder to write")
    parser.add_argument(
        "--quantization",
        choices=("int8", "int4", "fp8"),
        help="write weights in few bits, as `baton serve` makes them with this flag; the folder has safetensors",
    )
    args = parser.parse_args(argv)
    return run_program("baton convert", lambda: _convert(args))


def _convert(args: argparse.Namespace) -> int:
    from ..runtime.checkpoint.load_errors import ModelLoadError  # imports torch, as the others do: not for --help
    from ..runtime.checkpoint.new_folder import ConversionError
    from ..runtime.checkpoint.pickled_weights import convert_folder

    try:
        if args.quantization is not None:
            from ..runtime.runner.quantized_folder import quantize_folder

            files = quantize_folder(args.folder, args.output, args.quantization)
        else:
            files = convert_folder(args.folder, args.output)
    except (ConversionError, ModelLoadError) as error:
        print(f"baton: {error}", file=sys.stderr)
        return 1
    print(f"wrote {len(files)} file(s) of weights; serve them with --model-path {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
