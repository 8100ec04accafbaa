"""Quality of sparse decodes: decodes a text's tokens one by one after a long beginning of it, in full and with each
number of tokens and channels.

    python -m benchmarks.models.sparse_quality --model-path MODEL --channel-file channels.json --text FILE

perplexity: of the decoded tokens. same: share of them for which the likeliest token is the one of full attention.
The channels should come from another text (`baton ds-channels`).
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from baton.attention.double_sparse import DoubleSparseBackend
from baton.memory_pool.req_to_token import ReqToTokenPool
from baton.runtime.config import ModelArgs
from baton.runtime.runner.model_runner import ModelRunner
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.batch import ForwardMode, KVCopies, ScheduleBatch
from benchmarks.common.measured import RESULTS, about_this_run

CHUNK = 512
"""Tokens of the beginning in one step."""


@dataclass
class Found:
    """The figures of one setting."""

    perplexity: float
    likeliest: list[int]
    """After each decoded token."""


class ForcedText:
    """A model runner with one sequence, the tokens of a text."""

    def __init__(self, args: ModelArgs, ids: list[int]) -> None:
        self._ids = np.array(ids, dtype=np.int32)
        self.runner = ModelRunner(
            args, context_length=0, num_rows=1, page_size=1, max_total_tokens=len(ids), chunked_prefill_size=CHUNK
        )
        self._pool = ReqToTokenPool(*self.runner.req_to_token.shape)
        row = self._pool.alloc()
        assert row is not None, "the only one"
        self._row = row
        self._pool.write(self._row, 0, 1 + np.arange(len(ids), dtype=np.int32))

    def compute(self, start: int, end: int, *, is_output: bool) -> torch.Tensor:
        """Logits after token end - 1, float32 [vocab_size]."""
        count = np.full(1, end - start, dtype=np.int32)
        output = self.runner.forward(
            ScheduleBatch(
                step_id=0,
                mode=ForwardMode.DECODE if is_output else ForwardMode.EXTEND,
                opened=[],
                closed=[],
                serials=np.zeros(1, dtype=np.int64),
                input_ids=self._ids[start:end],
                out_cache_loc=1 + np.arange(start, end, dtype=np.int32),
                req_pool_indices=np.full(1, self._row, dtype=np.int32),
                prefix_lens=np.full(1, start, dtype=np.int32),
                extend_lens=count,
                samples=np.ones(1, dtype=bool),
                output_positions=np.full(1, is_output, dtype=np.int32),
                logprob_starts=count,
                logprob_targets=[],
                row_updates=self._pool.take_updates(),
                copies=KVCopies.join([]),
            )
        )
        return output.logits[0]

    def decode(self, start: int) -> Found:
        """Decode all tokens from ``start`` on but the last."""
        loss, likeliest = 0.0, []
        for position in range(start, len(self._ids) - 1):
            logprobs = self.compute(position, position + 1, is_output=True).log_softmax(-1)
            loss -= float(logprobs[int(self._ids[position + 1])])
            likeliest.append(int(logprobs.argmax()))
        return Found(math.exp(loss / len(likeliest)), likeliest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--channel-file", required=True)
    parser.add_argument("--text", type=Path, required=True, help="not the text that the channels come from")
    parser.add_argument("--kind", choices=("qk", "q", "k"), default="qk", help="as --ds-heavy-channel-type")
    parser.add_argument("--beginning", type=int, default=5632, help="tokens before those that are decoded")
    parser.add_argument("--decoded", type=int, default=200, help="tokens that are decoded")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[64, 128, 256, 512], help="numbers of tokens that decodes attend to"
    )
    parser.add_argument(
        "--channels", type=int, nargs="+", default=[8, 16, 32], help="numbers of channels that choose them"
    )
    parser.add_argument("--dtype", default="float32", help="as the server's flag")
    args = parser.parse_args()
    ids = Tokenizer.load(args.model_path).encode(args.text.read_text())[: args.beginning + args.decoded + 1]
    if len(ids) <= args.beginning + args.decoded:
        raise SystemExit(f"{args.text} has only {len(ids)} tokens")
    forced = ForcedText(
        ModelArgs(
            model_path=args.model_path,
            dtype=args.dtype,
            enable_double_sparsity=True,
            ds_channel_config_path=args.channel_file,
            ds_heavy_channel_type=args.kind,
            ds_heavy_channel_num=max(args.channels),
            ds_sparse_decode_threshold=len(ids) + 1,
        ),
        ids,
    )
    runner = forced.runner
    in_full, sparsity = runner.attention, runner.sparsity
    assert isinstance(in_full, DoubleSparseBackend) and sparsity is not None
    for start in range(0, args.beginning, CHUNK):
        forced.compute(start, min(start + CHUNK, args.beginning), is_output=False)
    full, results = forced.decode(args.beginning), []
    print(f"{'tokens':>8}{'channels':>10}{'perplexity':>12}{'same':>8}")
    print(f"{'all':>8}{'':>10}{full.perplexity:>12.2f}{1:>8.1%}", flush=True)
    for tokens in args.tokens:
        for channels in args.channels:
            chosen = replace(sparsity, channels=channels, tokens=tokens, threshold=1)
            runner.attention = DoubleSparseBackend(runner.kv_pool, in_full.inner, chosen)
            found = forced.decode(args.beginning)
            same = float(np.mean([mine == other for mine, other in zip(found.likeliest, full.likeliest, strict=True)]))
            print(f"{tokens:>8}{channels:>10}{found.perplexity:>12.2f}{same:>8.1%}", flush=True)
            results.append({"tokens": tokens, "channels": channels, "perplexity": found.perplexity, "same": same})
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "sparse_quality.json"
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    about = {"about": about_this_run(runner.device.type), "settings": settings, "perplexity_in_full": full.perplexity}
    path.write_text(json.dumps(about | {"results": results}, indent=1))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
