"""The k best tokens in a total order: higher logit first, then lower token id.

`torch.topk` breaks ties as it likes, and differently for another k. bf16 models tie all the time, so an answer would
depend on what else is in the batch. Here logit and id are packed into one int64, so no two keys are equal.

Most of a vocabulary is far from the k best, so that packing and selecting among all of it is work for nothing. The k
best tokens lie in the k chunks with the best first tokens: one pass over the logits finds the best of each chunk, and
two small selections do the rest, with the same answer.
"""

from __future__ import annotations

import torch

SLICE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Logits to work on at once, by device type: bounds temporary memory, and keeps it in the cache of a CPU."""

CHUNK = 32
"""Tokens per chunk. About the square root of vocab / k, where there are as many chunks as gathered tokens."""

BEST_CHUNK = 64
"""Tokens per chunk where one token is looked for."""

MIN_CHUNKED = 16384
"""With fewer tokens the extra launches cost more than they save."""


def top_tokens(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``k`` tokens of each row: logits float32 [n, k], descending, and token ids int64 [n, k].

    logits: float32 [n, vocab]. k = vocab sorts. The rank of a NaN is undefined.
    """
    vocab_size = logits.shape[-1]
    k = min(k, vocab_size)
    if vocab_size < MIN_CHUNKED or 2 * k * CHUNK > vocab_size:
        ids = _select(logits, torch.arange(vocab_size, device=logits.device), k)
        return logits.gather(-1, ids), ids
    maxima = chunk_maxima(logits, CHUNK)
    chunks = _select(maxima, torch.arange(maxima.shape[-1], device=logits.device), k)
    ids = (chunks.unsqueeze(-1) * CHUNK + torch.arange(CHUNK, device=logits.device)).view(len(logits), -1)
    values = logits.gather(-1, ids.clamp(max=vocab_size - 1))
    ids = _select(values, ids, k, vocab_size)
    return logits.gather(-1, ids), ids


def best_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first token of each row: its logit, float32 [n], and its id, int64 [n]; of equal ones the first.

    logits: float32 [n, vocab]. A NaN counts as higher than all else. On a CPU torch finds a maximum ten times as
    fast as the place of one, so the place is looked for in one chunk alone.
    """
    if logits.device.type != "cpu" or logits.shape[-1] < MIN_CHUNKED:
        return logits.max(dim=-1)
    best, chunks = chunk_maxima(logits, BEST_CHUNK).max(dim=-1)
    ids = chunks.unsqueeze(-1) * BEST_CHUNK + torch.arange(BEST_CHUNK)
    # Past the end the last token stands again, behind itself.
    ids.clamp_(max=logits.shape[-1] - 1)
    return best, chunks * BEST_CHUNK + logits.gather(-1, ids).argmax(dim=-1)


def chunk_maxima(logits: torch.Tensor, chunk: int) -> torch.Tensor:
    """[n, vocab] -> the best logit of each ``chunk`` neighbouring tokens, [n, chunks]; the last chunk may be short."""
    whole = logits.shape[-1] // chunk * chunk
    maxima = logits[:, :whole].unflatten(1, (-1, chunk)).amax(dim=-1) if whole else logits[:, :0]
    if whole == logits.shape[-1]:
        return maxima
    return torch.cat([maxima, logits[:, whole:].amax(dim=-1, keepdim=True)], dim=-1)


def row_statistics(logits: torch.Tensor, chunk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chunk maxima [n, chunks], the best logit [n] and log(sum(exp(logit - best))) [n] of each row, all float32.

    The last two give (logit - best) - log_sum, which is NaN where the row holds a NaN or nothing but -inf.
    """
    maxima, best, sums = [], [], []
    rows_at_once = max(1, SLICE_ELEMENTS[logits.device.type] // logits.shape[-1])
    buffer = torch.empty_like(logits[:rows_at_once])  # fresh memory costs more than the exponentials
    for part in logits.split(rows_at_once):  # a slice at a time: from memory each logit is read once
        maxima.append(chunk_maxima(part, chunk))
        best.append(maxima[-1].amax(dim=-1))
        powers = torch.sub(part, best[-1].unsqueeze(1), out=buffer[: len(part)]).exp_()
        sums.append(powers.sum(dim=-1))
    return torch.cat(maxima), torch.cat(best), torch.cat(sums).log_()


def _select(values: torch.Tensor, ids: torch.Tensor, k: int, end: int | None = None) -> torch.Tensor:
    """The k first of ``ids`` (int64 < 2^31, [n, m] or [m]) by values (float32 [n, m]) and id, int64 [n, k].

    end: ids from this one on are not tokens, and rank last.
    """
    bits = values.add(0.0).view(torch.int32)  # -0.0 becomes 0.0: what compares equal must tie
    # Floats order like their bits, except that negative ones run backwards.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(torch.int64) << 32) | (0x7FFFFFFF - ids)
    if end is not None:
        keys.masked_fill_(ids >= end, -(2**63))
    best = keys.topk(k, dim=-1, sorted=True).values
    return 0x7FFFFFFF - (best & 0xFFFFFFFF)
