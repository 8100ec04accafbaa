"""What one model must show: the same tokens as transformers, whatever happens to its KV.

    python -m benchmarks.models.checks NAME      one model of tiny.MODELS, in this process; prints JSON

Each check is one column of the table: greedy outputs at pages of 1 and 16 with chunked prompts, a handoff, a fork, a
retraction, a beam search, and KV that left for the host and came back.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from baton.entrypoints.engine import Engine
from baton.runtime.checkpoint.model_files import ModelLoadError
from benchmarks.models.tiny import MODELS, VOCABULARY, TinyModel

PROMPT_LENGTHS = (5, 17, 33, 48, 64)
NEW_TOKENS = 24
GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
BEAMS = 4
TIE = 1e-3
"""Logits closer than this may be ordered either way by rounding."""

COLUMNS = ("page 1", "page 16", "handoff", "fork", "retraction", "beam", "host")

Check = Callable[["Scene"], None]


class Difference(AssertionError):
    """Outputs differ from transformers'."""


class Scene:
    """A model in a folder, its reference, and prompts."""

    def __init__(self, tiny: TinyModel, folder: Path) -> None:
        self.folder = folder
        self.reference = tiny.save(folder)
        rng = random.Random(7)
        self.prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in PROMPT_LENGTHS]
        self.suffix = [rng.randrange(3, VOCABULARY) for _ in range(6)]

    @contextmanager
    def engine(self, **settings: Any) -> Iterator[Engine]:
        given = {"page_size": 1, "max_total_tokens": 2048, "chunked_prefill_size": 33, "schedule_policy": "fcfs"}
        with Engine(model_path=str(self.folder), device="cpu", dtype="float32", **(given | settings)) as engine:
            yield engine

    @torch.no_grad()
    def greedy(self, prompt: list[int], count: int = NEW_TOKENS) -> list[int]:
        """transformers' own greedy output."""
        ids = torch.tensor([prompt])
        found = self.reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        return found[0, len(prompt) :].tolist()

    @torch.no_grad()
    def compare(self, what: str, prompt: list[int], found: list[int], count: int = NEW_TOKENS) -> None:
        """Raises Difference unless ``found`` is the greedy output, or parts from it at a tie."""
        expected = self.greedy(prompt, count)
        if len(found) != len(expected):
            raise Difference(f"{what}: {len(found)} tokens in place of {len(expected)}")
        for position, (mine, theirs) in enumerate(zip(found, expected)):
            if mine != theirs:
                logits = self.reference(torch.tensor([prompt + expected[:position]]), use_cache=False).logits[0, -1]
                if float(logits.max() - logits[mine]) > TIE:
                    raise Difference(f"{what}: token {position} is {mine}, not {theirs}")
                return


def answers(engine: Engine, prompts: list[list[int]], sampling: dict[str, Any] = GREEDY, **fields: Any) -> list[Any]:
    found: Any = engine.generate(input_ids=prompts, sampling_params=sampling, **fields)
    return found


def check_page(scene: Scene, page_size: int) -> None:
    """All prompts at once, then again from the cache."""
    with scene.engine(page_size=page_size) as engine:
        for turn in ("computed", "cached"):
            for prompt, answer in zip(scene.prompts, answers(engine, scene.prompts)):
                scene.compare(f"{turn}, {len(prompt)} prompt tokens", prompt, answer["output_ids"])


def check_handoff(scene: Scene) -> None:
    with scene.engine(page_size=16) as engine:
        short = GREEDY | {"max_new_tokens": 8}
        (parent,) = answers(engine, scene.prompts[2:3], short, rid=["parent"], retain_ttl=60)
        child: Any = engine.generate(None, GREEDY, continuation_of="parent", continuation_ids=scene.suffix)
        if (path := child["meta_info"]["continuation"]["path"]) != "handoff":
            raise Difference(f"the continuation took the path {path}")
        scene.compare("handoff", scene.prompts[2] + parent["output_ids"] + scene.suffix, child["output_ids"])


def check_fork(scene: Scene) -> None:
    """A child begins while its parent runs; both must go on right."""
    with scene.engine(page_size=16) as engine:
        stream: Any = engine.generate(
            input_ids=scene.prompts[3], sampling_params=GREEDY | {"max_new_tokens": 200}, rid="parent", stream=True
        )
        next(stream)
        child: Any = engine.generate(
            None, GREEDY, continuation_of="parent", continuation_ids=scene.suffix, continuation_at="now"
        )
        *_, parent = stream
        facts = child["meta_info"]["continuation"]
        if facts["path"] != "fork":
            raise Difference(f"the continuation took the path {facts['path']}")
        whole = scene.prompts[3] + parent["output_ids"]
        scene.compare("fork", whole[: facts["inherited_tokens"]] + scene.suffix, child["output_ids"])
        scene.compare("parent", scene.prompts[3], parent["output_ids"], 200)


def check_retraction(scene: Scene) -> None:
    with scene.engine(max_total_tokens=200, disable_radix_cache=True) as engine:
        sampling = GREEDY | {"max_new_tokens": 60}
        for prompt, answer in zip(scene.prompts, answers(engine, scene.prompts, sampling)):
            scene.compare(f"retraction, {len(prompt)} prompt tokens", prompt, answer["output_ids"], 60)
        if not engine.get_server_info()["stats"]["retractions"]:
            raise Difference("no request was retracted")


@torch.no_grad()
def check_beam(scene: Scene) -> None:
    prompt = scene.prompts[1]
    ids = torch.tensor([prompt])
    found = scene.reference.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=BEAMS, num_return_sequences=BEAMS, max_new_tokens=12,
        min_new_tokens=12, do_sample=False, pad_token_id=0, output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    with scene.engine() as engine:
        sampling = {"beam_width": BEAMS, "n": BEAMS, "max_new_tokens": 12, "ignore_eos": True}
        beams: Any = engine.generate(input_ids=prompt, sampling_params=sampling)
    for rank, (ours, theirs, score) in enumerate(zip(beams, found.sequences, found.sequences_scores)):
        same = ours["output_ids"] == theirs[len(prompt) :].tolist()
        if abs(ours["meta_info"]["sequence_score"] - float(score)) > TIE or (rank == 0 and not same):
            raise Difference(f"beam {rank} is {ours['output_ids']}, not {theirs[len(prompt) :].tolist()}")


def check_host(scene: Scene, *, continued: bool = True) -> None:
    """KV goes to the host, other prompts take the device's memory, and what continues the first ones brings it back.

    Recurrent states need ``continued``: the state behind a turn is of no use to the turn's own prompt. Sparse decodes
    need the prompts themselves: an output's KV is not what computing it as a prompt gives.
    """
    rng, loaded = random.Random(1), 0
    prompts = scene.prompts[3:]
    with scene.engine(page_size=16, max_total_tokens=512, host_cache_ratio=8.0) as engine:
        for _ in range(2):
            asked, prompts = prompts, []
            for prompt in asked:
                (answer,) = answers(engine, [prompt])
                scene.compare("host", prompt, answer["output_ids"])
                loaded += answer["meta_info"]["cached_tokens_details"]["host"]
                prompts.append(prompt + answer["output_ids"] + scene.suffix if continued else prompt)
            for _ in range(5):
                answers(engine, [[rng.randrange(3, VOCABULARY) for _ in range(120)]], GREEDY | {"max_new_tokens": 1})
        if not loaded:
            raise Difference("nothing came back from the host")


CHECKS: dict[str, Check] = {
    "page 1": lambda scene: check_page(scene, 1),
    "page 16": lambda scene: check_page(scene, 16),
    "handoff": check_handoff,
    "fork": check_fork,
    "retraction": check_retraction,
    "beam": check_beam,
    "host": check_host,
}


def run_checks(tiny: TinyModel, folder: Path, columns: tuple[str, ...] = COLUMNS) -> dict[str, Any]:
    """{"code": baton, transformers or refused, "reason": of a refusal, and for each column: equal, or what differs}."""
    scene = Scene(tiny, folder)
    try:
        with scene.engine() as engine:
            result: dict[str, Any] = {"code": engine.get_server_info()["model_impl"], "reason": ""}
    except ModelLoadError as error:
        return {"code": "refused", "reason": str(error).replace(str(folder), "…")}
    for column in columns:
        try:
            CHECKS[column](scene)
            result[column] = "equal"
        except Exception as error:
            result[column] = f"{type(error).__name__}: {error}"[:300]
    return result


def main() -> None:
    logging.disable(logging.WARNING)
    (tiny,) = [model for model in MODELS if model.name == sys.argv[1]]
    columns = tuple(sys.argv[2].split(",")) if len(sys.argv) > 2 else COLUMNS
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run_checks(tiny, Path(folder), columns)))


if __name__ == "__main__":
    main()
