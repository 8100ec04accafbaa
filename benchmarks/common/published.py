"""Figures for comparison with a GPU run: our goals, and published figures of SGLang.

SGLang's are constants here, NOT measured by these benchmarks. All are of one H200 and the shape llama-3.1-8b, bfloat16.
"""

from __future__ import annotations

PUBLISHED = "SGLang 0.5.15 on one H200, as published; not measured by this run"
SHAPE = "llama-3.1-8b"

PREFILL_LEN, NEW_TOKENS = 1024, 64
"""Lengths in plain serving."""

PREFILL_GOAL = 43_000
"""tokens/s, at any batch size that fills the card."""

DECODE_GOAL_MS = {1: 4.4, 16: 5.2, 64: 7.5}
"""Per decode step in the server loop, by batch size; likewise below."""
SGLANG_DECODE_MS = {1: 5.0, 16: 6.4}
SGLANG_STATIC_MS = {1: 6.00, 16: 6.68, 64: 8.68}
"""One static batch, synchronous."""
SGLANG_PREFILL_MS = {1: 24.7, 16: 373.0, 64: 1515.0}

PROMPT, STAGE1, SUFFIX, BEAMS, BEAM_STEPS = 500, 200, 4, 32, 3
"""Lengths and beams of two-stage requests."""

TTFT_GOAL_MS = {1: 6.0, 16: 9.0, 64: 20.0}
"""Goal of stage 2's time to the first token after a handoff, by concurrency; likewise below."""
SGLANG_TTFT_MS = {1: 16.4, 16: 19.2, 64: 42.9}
"""A radix hit of 700 tokens."""
SGLANG_STAGE1_S = {1: 0.999, 16: 1.284, 64: 2.136}
BEAM_GOAL_MS = {1: 16.0, 16: 40.0}
SGLANG_BEAM_MS = {1: 97.8, 16: 905.0}
"""Driven from outside, one request per beam and step."""
