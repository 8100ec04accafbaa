"""A recorded request: plain data, and the line of JSON that it becomes.

A line never holds texts, nor names that clients gave: rids, jobs and namespaces are keyed digests, and so are blocks of
token ids with ``--record-requests-hashed``. Keys are drawn when a log is opened and stored nowhere, so that no reader
can test a guess against a digest.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

HEADER = "baton_request_log"
"""Key of the first line of a log and of each start of a server; its value is the version of the format."""

VERSION = 1
BLOCK_TOKENS = 16
"""Tokens per hashed block."""

HASH_BYTES = 8

_ID_BYTES = 4
_OBJECT_BYTES = 1024
_IDS_AT_ONCE = 8192
_BLOCKS_AT_ONCE = 64
"""Blocks hashed before the other threads, which serve requests, get a turn."""

Breathe = Callable[[], None]


@dataclass(slots=True, frozen=True, kw_only=True)
class RecordedRequest:
    """prompt_ids: packed int32, the whole prompt; a continuation's begins with its parent's tokens. output_ids: packed
    int32 of each output that has begun. time: seconds since 1970 when it arrived; seconds: until it ended. finish: of
    the last output that ended: stop, length or abort. parent_rid: named by the caller."""

    rid: str
    prompt_ids: bytes
    output_ids: tuple[bytes, ...]
    time: float
    seconds: float
    finish: str
    cached_tokens: int
    namespace: str = ""
    job_id: str | None = None
    parent_rid: str | None = None
    no_reuse_from: int | None = None
    missed: Mapping[str, int] = field(default_factory=dict)
    """Reason -> prompt tokens that the cache did not have for it."""
    state_points: tuple[int, ...] = ()
    retain_states: int = 1
    """As in RequestSpec; the log has them where they are not the default."""

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory."""
        return _OBJECT_BYTES + len(self.prompt_ids) + sum(map(len, self.output_ids))


class LineMaker:
    """Turns requests into lines. hashed: with hashes of blocks in place of ids. breathe: called often while a long line
    is made."""

    def __init__(self, *, hashed: bool, breathe: Breathe) -> None:
        self._hashed = hashed
        self._breathe = breathe
        self._key = os.urandom(32)

    def make_header(self, now: float) -> bytes:
        kind = {"block_tokens": BLOCK_TOKENS} if self._hashed else {}
        return _line({HEADER: VERSION, "time": round(now, 3), "holds": "hashes" if self._hashed else "ids", **kind})

    def make_line(self, request: RecordedRequest) -> bytes:
        outputs = request.output_ids
        fields: dict[str, Any] = {
            "time": round(request.time, 3),
            "seconds": round(request.seconds, 3),
            "rid": self._digest("rid", request.rid),
            "input_tokens": len(request.prompt_ids) // _ID_BYTES,
            "output_tokens": sum(map(len, outputs)) // _ID_BYTES,
            "cached_tokens": request.cached_tokens,
            "finish": request.finish,
        }
        if request.missed:
            fields["missed_tokens"] = dict(request.missed)
        if request.namespace:
            fields["namespace"] = self._digest("namespace", request.namespace)
        if request.job_id is not None:
            fields["job"] = self._digest("job", request.job_id)
        if request.parent_rid is not None:
            fields["continuation_of"] = self._digest("rid", request.parent_rid)
        if request.no_reuse_from is not None:
            fields["no_reuse_from"] = request.no_reuse_from
        if request.state_points:
            fields["state_points"] = request.state_points
        if request.retain_states != 1:
            fields["retain_states"] = request.retain_states
        if self._hashed:
            fields |= self._blocks(request)
        else:
            lists = [self._ids(ids) for ids in outputs]
            fields["input_ids"] = self._ids(request.prompt_ids)
            fields["output_ids"] = lists[0] if len(lists) == 1 else lists
        return _line(fields)

    def _ids(self, packed: bytes) -> list[int]:
        ids: list[int] = []
        view = memoryview(packed).cast("i")
        for start in range(0, len(view), _IDS_AT_ONCE):
            if start:
                self._breathe()
            ids += view[start : start + _IDS_AT_ONCE].tolist()
        return ids

    def _blocks(self, request: RecordedRequest) -> dict[str, Any]:
        """A hash for each whole block, which stands for all that comes before it too. An output's blocks follow the
        prompt's whole ones, so the first of them may begin in the prompt. Its last token is left out: its KV is not
        computed."""
        width = BLOCK_TOKENS * _ID_BYTES
        prompt, namespace = request.prompt_ids, request.namespace.encode("utf-8", "surrogatepass")
        first = hashlib.blake2b(namespace, digest_size=HASH_BYTES, key=self._key).digest()
        hashes = list(self._chain(first, prompt))
        last, rest = hashes[-1] if hashes else first, prompt[len(prompt) // width * width :]
        outputs = [b"".join(self._chain(last, rest + ids[:-_ID_BYTES])).hex() for ids in request.output_ids]
        return {"block_tokens": BLOCK_TOKENS, "input_blocks": b"".join(hashes).hex(), "output_blocks": outputs}

    def _chain(self, before: bytes, ids: bytes) -> Iterator[bytes]:
        width = BLOCK_TOKENS * _ID_BYTES
        for number in range(len(ids) // width):
            block = ids[number * width : (number + 1) * width]
            before = hashlib.blake2b(before + block, digest_size=HASH_BYTES, key=self._key).digest()
            yield before
            if number % _BLOCKS_AT_ONCE == _BLOCKS_AT_ONCE - 1:
                self._breathe()

    def _digest(self, kind: str, name: str) -> str:
        data = f"{kind} {name}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, digest_size=HASH_BYTES, key=self._key).hexdigest()


def _line(fields: dict[str, Any]) -> bytes:
    return msgspec.json.encode(fields) + b"\n"
