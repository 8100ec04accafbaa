"""Quality of KV pools of other types: computes a text in pieces, over a pool of the model's type and over others.

    python -m benchmarks.models.kv_quality --model-path MODEL --text FILE

perplexity: of all tokens of the pieces but the first of each. KL: mean divergence of the next token's distribution from
that over the pool of the model's type, in nats. same: share of positions at which the likeliest token is the same.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch

from baton.runtime.config import ModelArgs
from baton.runtime.runner.kv_dtype import KV_DTYPES
from baton.runtime.text.tokenizer import Tokenizer
from benchmarks.accuracy.engines import Baton
from benchmarks.common.measured import RESULTS, about_this_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--piece", type=int, default=1024, help="tokens of a piece")
    parser.add_argument("--pieces", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a step")
    parser.add_argument("--types", nargs="+", default=["bfloat16", "int8", "fp8", "fp8_e5m2"], choices=KV_DTYPES)
    parser.add_argument("--dtype", default="float32", help="as the server's flag")
    args = parser.parse_args()
    ids = np.array(Tokenizer.load(args.model_path).encode(args.text.read_text()), dtype=np.int32)
    pieces = [ids[at : at + args.piece] for at in range(0, len(ids) - args.piece + 1, args.piece)][: args.pieces]
    if not pieces:
        raise SystemExit(f"{args.text} has only {len(ids)} tokens; lower --piece")
    plain = Baton(ModelArgs(model_path=args.model_path, dtype=args.dtype), args.piece, args.chunk)
    expected = [plain.logprobs(piece) for piece in pieces]
    results = []
    print(f"{'type':<10}{'bytes a token':>14}{'perplexity':>12}{'KL':>12}{'same':>8}")
    for name in ("auto", *args.types):
        options = ModelArgs(model_path=args.model_path, dtype=args.dtype, kv_cache_dtype=name)
        reader = plain if name == "auto" else Baton(options, args.piece, args.chunk)
        loss = divergence = same = 0.0
        for piece, theirs in zip(pieces, expected, strict=True):
            ours = theirs if name == "auto" else reader.logprobs(piece)
            targets = torch.from_numpy(piece[1:]).long()[:, None]
            loss -= float(ours[:-1].gather(1, targets).double().sum())
            divergence += float((theirs.exp() * (theirs - ours)).sum(-1).double().sum())
            same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        tokens = args.piece * len(pieces)
        found = {
            "type": name,
            "bytes_per_token": reader.runner.kv_pool.bytes_per_token,
            "perplexity": math.exp(loss / (tokens - len(pieces))),
            "kl": divergence / tokens,
            "same": same / tokens,
        }
        results.append(found)
        print(
            f"{name:<10}{found['bytes_per_token']:>14}{found['perplexity']:>12.4f}{found['kl']:>12.6f}"
            f"{found['same']:>8.2%}",
            flush=True,
        )
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "kv_quality.json"
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    about = {"about": about_this_run(plain.runner.device.type), "settings": settings}
    path.write_text(json.dumps(about | {"results": results}, indent=1))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
