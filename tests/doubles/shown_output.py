"""Compares what a snippet of the documentation prints with the `json` or `text` block below it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from .doc_pages import Fence

TIMES = {"created", "e2e_latency", "ttl"}
"""Fields of answers that no two runs share."""


def compare_output(shown: Fence, printed: str, where: str) -> None:
    if shown.language == "json":
        answer = json.loads(printed.strip().rpartition("\n")[2])
        found = differences(json.loads(shown.text), answer, "answer")
        assert not found, f"{where} answers something else:\n" + "\n".join(found)
    else:
        assert matches(shown.text.strip(), printed.strip()), f"{where} prints something else:\n{printed}"


def matches(shown: str, real: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, shown.split("…"))), real, re.DOTALL) is not None


def differences(shown: Any, real: Any, path: str) -> list[str]:
    """Where an answer is not what the page shows."""
    if isinstance(shown, str) and isinstance(real, str) and matches(shown, real):
        return []
    if shown == "…":
        return []
    if isinstance(shown, dict) and isinstance(real, dict):
        if "…" not in shown and shown.keys() != real.keys():
            return [f"{path}: the page shows {sorted(shown)}, the answer has {sorted(real)}"]
        shown = {key: value for key, value in shown.items() if key != "…"}
        lost = [f"{path}.{key}: not in the answer" for key in shown.keys() - real.keys()]
        kept = sorted(shown.keys() & real.keys() - TIMES)
        return lost + [line for key in kept for line in differences(shown[key], real[key], f"{path}.{key}")]
    if isinstance(shown, list) and isinstance(real, list) and len(shown) == len(real):
        pairs = zip(shown, real, strict=True)
        return [line for i, (one, two) in enumerate(pairs) for line in differences(one, two, f"{path}[{i}]")]
    if isinstance(shown, float) and isinstance(real, float) and real == pytest.approx(shown, abs=5e-3):
        return []
    return [] if shown == real else [f"{path}: the page shows {shown!r}, the answer is {real!r}"]
