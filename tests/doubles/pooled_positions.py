"""Gathers the positions that steps pool, as the step runner gathers their hidden states."""

from __future__ import annotations

from baton.scheduler.batch import ScheduleBatch
from baton.scheduler.request import Request
from baton.scheduler.request_spec import PoolingSpec

LAST, MEAN, CLS = (PoolingSpec(kind=kind) for kind in ("last", "mean", "cls"))
LABELS = PoolingSpec(kind="mean", output="labels")
POOLINGS = (LAST, MEAN, CLS, LABELS)


class PooledPositions:
    """Call `note_step` with every batch that is launched."""

    def __init__(self) -> None:
        self._gathered: dict[int, list[int]] = {}
        self._complete: dict[int, list[int]] = {}
        """By serial, those of each prompt whose vector was asked for."""

    def note_step(self, batch: ScheduleBatch) -> None:
        for span in batch.pooled:
            serial = int(batch.serials[span.row])
            assert span.position == batch.prefix_lens[span.row] and 0 <= span.start <= span.stop
            assert span.stop <= batch.extend_lens[span.row]
            if span.position == 0:
                self._gathered[serial] = []
            own = self._gathered.setdefault(serial, [])
            own += range(span.position + span.start, span.position + span.stop)
            if span.is_last:
                self._complete[serial] = own

    def check(self, request: Request) -> None:
        """A prompt that has ended well: each token that its pooling needs was pooled once, in order."""
        pooling, length = request.spec.pooling, request.prompt_len
        assert pooling is not None
        expected = [length - 1]
        if pooling.output == "hidden" and pooling.kind != "last":
            expected = list(range(length)) if pooling.kind == "mean" else [0]
        assert self._complete[request.serial] == expected, request
