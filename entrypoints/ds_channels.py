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


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 if the model, the text or the file cannot be used (the reason is on stderr)."""
    parser = argparse.ArgumentParser(
        prog="baton ds-channels",
        description="Find the channels of a model's keys that decide most, for --enable-double-sparsity.",
    )
    parser.add_argument("--model-path", required=True, metavar="FOLDER", help="the model, as for baton serve")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="text such as the model will read")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON file to write")
    parser.add_argument(
        "--num-tokens", type=COUNT, default=4096, metavar="N", help="most tokens of the text (default: 4096)"
    )
    parser.add_argument("--model-impl", choices=("auto", "baton", "transformers"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "float16", "bfloat16"), default="auto")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args(argv)
    # Here, not for --help: they import torch.
    from ..runtime.checkpoint.model_files import resolve_model_folder
    from ..runtime.config import ModelArgs
    from ..runtime.runner.model_runner import ModelRunner
    from ..runtime.text.tokenizer import Tokenizer

    model = ModelArgs(
        model_path=args.model_path,
        model_impl=args.model_impl,
        dtype=args.dtype,
        device=args.device,
        disable_cuda_graph=True,
    )
    try:
        text = args.text.read_text()
        ids = Tokenizer.load(resolve_model_folder(args.model_path)).encode(text)[: args.num_tokens]
        if not ids:
            raise ValueError(f"{args.text} is empty; give a text such as the model will read")
        runner = ModelRunner(
            model, context_length=0, num_rows=1, page_size=1, max_total_tokens=len(ids), chunked_prefill_size=512
        )
        channels = runner.find_heavy_channels(ids)
        args.output.write_text(json.dumps(channels))
    except (OSError, ValueError) as error:
        print(f"baton: {error}", file=sys.stderr)
        return 1
    print(f"wrote the channels of {len(channels)} lists from {len(ids)} tokens to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
