"""A real worker whose model says what a script has, so that only the choice of words is played: prompts are rendered,
tokenised, looked up, computed and cached as always, and every token is sampled, out of one that is allowed.

BATON_SCRIPT: JSON, [[needle, answer], ...]. The prompt is answered with what belongs to the needle that stands last in
it, of several at one place the longest. With [needle, answer, pattern], FOUND in the answer is the last match of that
pattern's group in the prompt: an id that only the client knew.

BATON_DEVICE: JSON, {"step_s": …, "prompt_token_s": …}, the speed of a slower device: each step takes so many seconds
longer, and so many for each prompt token that it computes. It sleeps for that time, so a busy machine changes little.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.runtime import worker
from baton.runtime.launcher.child_process import WorkerProcess, run_child
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.batch import ScheduleBatch
from baton.scheduler.constraints.constraint import AllowedTokens, Constraint, join_allowed, walk_draft
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.request import Request
from baton.scheduler.request_spec import RequestSpec
from baton.scheduler.scheduler import Scheduler


@dataclass
class Script:
    """A constraint that allows one output. tokens: int32 [n], with an eos token at the end."""

    tokens: np.ndarray
    name: str = "the script"
    output_name: str = "script"
    matched: str = "script"
    eos_ends: bool = True
    must_complete: bool = False
    is_uniform: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    is_ready: bool = True

    def failure(self) -> None:
        return None

    def start(self) -> ScriptState:
        return ScriptState(self, 1, 0)


@dataclass(frozen=True)
class ScriptState:
    script: Script
    num_sequences: int
    position: int

    def __len__(self) -> int:
        return self.num_sequences

    def allowed(self) -> AllowedTokens:
        rows = np.arange(self.num_sequences, dtype=np.int32)
        return AllowedTokens.pack(rows, np.full(len(rows), self._next, dtype=np.int32))

    def num_allowed(self) -> np.ndarray:
        return np.ones(self.num_sequences, dtype=np.int64)

    def select(self, sequences: np.ndarray) -> ScriptState:
        return ScriptState(self.script, len(sequences), self.position)

    def advance(self, tokens: np.ndarray) -> ScriptState:
        assert (tokens == self._next).all()
        return ScriptState(self.script, self.num_sequences, self.position + 1)

    def at_end(self) -> np.ndarray:
        return np.zeros(self.num_sequences, dtype=bool)  # its eos token ends it

    def forced(self) -> np.ndarray:
        return np.empty(0, dtype=np.int32)  # a token a step, as of a model

    def count_allowed(self, draft: np.ndarray) -> int:
        return 0

    @classmethod
    def allowed_next(cls, states: Sequence[Any]) -> AllowedTokens:
        return join_allowed(states)

    @classmethod
    def allowed_along(cls, states: Sequence[Any], drafts: Sequence[np.ndarray]) -> list[AllowedTokens | RequestRefused]:
        return [walk_draft(state, draft) for state, draft in zip(states, drafts, strict=True)]

    @property
    def _next(self) -> int:
        tokens = self.script.tokens
        return int(tokens[min(self.position, len(tokens) - 1)])


def filled_in(prompt: str, answer: str, pattern: str = "") -> str:
    return answer.replace("FOUND", re.findall(pattern, prompt)[-1]) if pattern else answer


def scripted_scheduler(
    tokenizer: Tokenizer, script: list[list[str]], step_s: float = 0.0, prompt_token_s: float = 0.0
) -> type[Scheduler]:
    class ScriptedScheduler(Scheduler):
        def next_batch(self, now: float) -> ScheduleBatch | None:
            batch = super().next_batch(now)
            if batch is not None:
                time.sleep(step_s + prompt_token_s * self._in_flight[-1].num_prompt_tokens)
            return batch

        def add_request(
            self,
            spec: RequestSpec,
            now: float,
            *,
            own_ids: np.ndarray | None = None,
            constraint: Constraint | None = None,
            adapter: str = "",
        ) -> list[Request]:
            ids = spec.token_ids if own_ids is None else own_ids
            text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            found = [(text.rfind(needle), len(needle), rest) for needle, *rest in script if needle in text]
            if found:
                answer = tokenizer.encode(filled_in(text, *max(found)[2]), False)
                constraint = Script(np.array([*answer, tokenizer.token_to_id("<|im_end|>")], dtype=np.int32))
            return super().add_request(spec, now, own_ids=own_ids, constraint=constraint, adapter=adapter)

    return ScriptedScheduler


def run(child: WorkerProcess, stop: Any) -> None:
    tokenizer = worker.load_tokenizer(child.config)()
    worker.Scheduler = scripted_scheduler(
        tokenizer, json.loads(os.environ["BATON_SCRIPT"]), **json.loads(os.environ.get("BATON_DEVICE", "{}"))
    )
    worker.run_worker(child.config, child.endpoints, stop)


if __name__ == "__main__":
    sys.exit(run_child("worker", WorkerProcess, run))
