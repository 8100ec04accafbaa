"""Six kinds of prompts that share different amounts: the kinds of a published table of hit rates, with our own lengths.

Each is a list of conversations; a conversation lists the pieces that its turns add. All except chats have one turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Tokens = list[int]
Draw = Callable[[int], Tokens]
"""So many tokens that nothing else has."""

PUBLISHED = "a blog on vLLM v1's block manager (Llama 70B on H100s); not measured by this run"
PUBLISHED_NOTE = "its hit rate is that of prefix blocks, ours of all prompt tokens"


@dataclass(frozen=True)
class Workload:
    """shared: what its requests share, in words. published: hit rates in percent, lowest and highest. make: talks, from
    random numbers, a source of new tokens and how many requests there are to be. requests: by default. answer: tokens.
    """

    name: str
    shared: str
    published: tuple[int, int]
    make: Callable[[np.random.Generator, Draw, int], list[list[Tokens]]]
    requests: int
    answer: int = 4


def fixed_system_prompt(rng: np.random.Generator, new: Draw, requests: int) -> list[list[Tokens]]:
    system = new(512)
    return [[system + new(int(rng.integers(15, 45)))] for _ in range(requests)]


CHAT_TURNS = 5


def multi_turn_chat(rng: np.random.Generator, new: Draw, requests: int) -> list[list[Tokens]]:
    system = new(256)
    talks = -(-requests // CHAT_TURNS)
    return [[system * (turn == 0) + new(int(rng.integers(30, 90))) for turn in range(CHAT_TURNS)] for _ in range(talks)]


def rag(rng: np.random.Generator, new: Draw, requests: int) -> list[list[Tokens]]:
    instructions, documents = new(96), [new(128) for _ in range(40)]
    popular = 1 / np.arange(1, len(documents) + 1)
    talks = []
    for _ in range(requests):
        found = rng.choice(len(documents), 4, replace=False, p=popular / popular.sum())
        talks.append([instructions + [token for number in found for token in documents[number]] + new(32)])
    return talks


def code_completion(rng: np.random.Generator, new: Draw, requests: int) -> list[list[Tokens]]:
    """The last 512 tokens before a cursor somewhere in one of 12 files of 2,048; at 64 the window moves on."""
    instructions, files = new(48), [new(2048) for _ in range(12)]
    talks = []
    for _ in range(requests):
        file, cursor = files[rng.integers(len(files))], int(rng.integers(64, 2048))
        begin = max(0, -(-(cursor - 512) // 64) * 64)
        talks.append([instructions + file[begin:cursor] + new(8)])
    return talks


def batch_summarisation(rng: np.random.Generator, new: Draw, requests: int) -> list[list[Tokens]]:
    instructions = new(64)
    return [[instructions + new(int(rng.integers(384, 640)))] for _ in range(requests)]


def random_prompts(rng: np.random.Generator, new: Draw, requests: int) -> list[list[Tokens]]:
    return [[new(256)] for _ in range(requests)]


WORKLOADS = (
    Workload("fixed system prompt", "512 tokens, then a question of 15-44", (92, 97), fixed_system_prompt, 60),
    Workload("multi-turn chat", f"256 tokens, and the {CHAT_TURNS} turns of each", (80, 95), multi_turn_chat, 60, 24),
    Workload("RAG", "96 tokens, then 4 of 40 documents of 128 by Zipf", (25, 40), rag, 60),
    Workload("code completion", "48 tokens, then up to 512 before a cursor", (15, 35), code_completion, 60),
    Workload("batch summarisation", "64 tokens, then a document of 384-639", (8, 15), batch_summarisation, 60),
    Workload("random", "nothing: 256 tokens", (0, 2), random_prompts, 200),
)
