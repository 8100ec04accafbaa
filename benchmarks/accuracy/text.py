"""The text: Python's own documentation of its language, which `help()` shows and every Python contains."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from baton.runtime.text.tokenizer import Tokenizer


def python_topics() -> str:
    """Prose and some code, 465,000 characters in Python 3.11. Versions differ, so compare figures of one Python."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def windows(text: str, tokenizer: Tokenizer, number: int, length: int) -> np.ndarray:
    """int32 [number, length]: parts of the text, evenly spread over it. Raises ValueError if it is too short."""
    ids = np.array(tokenizer.encode(text), dtype=np.int32)
    whole = len(ids) // length
    if whole < number:
        raise ValueError(f"the text has {len(ids)} tokens: enough for {whole} windows of {length}, not for {number}")
    starts = np.arange(number) * whole // number * length
    return np.stack([ids[start : start + length] for start in starts])


def about_text(text: str, name: str) -> dict[str, Any]:
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {"name": name, "characters": len(text), "sha256": digest}


def read_text(file: Path | None) -> tuple[str, dict[str, Any]]:
    """The text of a file, or Python's; and where it is from."""
    if file is None:
        text = python_topics()
        return text, about_text(text, "pydoc_data.topics")
    text = file.read_text()
    return text, about_text(text, file.name)
