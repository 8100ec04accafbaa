"""Figures of a format: how well it predicts a text, and how far its distributions are from those of float32."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch


class Reference:
    """The logprobs of float32, float32 [windows, length - 1, vocab_size] in a file, gigabytes of them."""

    def __init__(self, file: Path, windows: int, length: int, vocab_size: int) -> None:
        self._kept = np.memmap(file, np.float32, "w+", shape=(windows, length - 1, vocab_size))

    def keep(self, window: int, logprobs: torch.Tensor) -> None:
        self._kept[window] = logprobs.numpy()

    def read(self, window: int) -> torch.Tensor:
        return torch.from_numpy(self._kept[window])


@dataclass
class Scores:
    """Sums over tokens."""

    tokens: int = 0
    loss: float = 0.0
    divergence: float = 0.0
    same: int = 0
    of_windows: list[float] = field(default_factory=list)
    """Loss of each window."""

    def add(self, ids: torch.Tensor, logprobs: torch.Tensor, reference: torch.Tensor) -> None:
        """ids: int64 [length]; logprobs, reference: float32 [length - 1, vocab_size], of what follows each token."""
        losses = -logprobs.gather(1, ids[1:, None])
        self.tokens += len(losses)
        self.of_windows.append(float(losses.sum(dtype=torch.float64)))
        self.loss += self.of_windows[-1]
        differences = (reference - logprobs).double() * reference.exp()
        self.divergence += float(differences.sum())
        self.same += int((reference.argmax(1) == logprobs.argmax(1)).sum())

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / self.tokens)

    def figures(self, reference: Scores) -> dict[str, float]:
        """above: of the perplexity over the reference's, in percent; its error is the standard error of windows."""
        gaps = (np.array(self.of_windows) - np.array(reference.of_windows)) * len(self.of_windows) / self.tokens
        spread = float(gaps.std(ddof=1) / math.sqrt(len(gaps))) if len(gaps) > 1 else 0.0
        return {
            "perplexity": self.perplexity,
            "above_percent": 100 * (self.perplexity / reference.perplexity - 1),
            "error_percent": 100 * spread,
            "divergence": self.divergence / self.tokens,
            "same": self.same / self.tokens,
        }
