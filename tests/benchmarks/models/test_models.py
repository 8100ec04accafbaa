"""The table of supported models: two of its rows, made here, and the page that it fills."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.models.__main__ import PAGE, is_served, line_of, page_of
from benchmarks.models.checks import COLUMNS, Difference, Scene, run_checks
from benchmarks.models.tiny import MODELS

BY_NAME = {tiny.name: tiny for tiny in MODELS}


@pytest.mark.equality
@pytest.mark.parametrize(
    ("name", "code", "more"),
    [
        ("Qwen 3", "baton", ()),
        ("DiffLlama", "transformers", ()),
        ("DeepSeek V3, Kimi K2", "baton", ("retraction", "host")),
    ],
)
def test_rows_of_served_models(name: str, code: str, more: tuple[str, ...], tmp_path: Path) -> None:
    result = run_checks(BY_NAME[name], tmp_path, ("page 16", "handoff", "fork", "beam", *more))
    assert result["code"] == code and is_served(result), result


@pytest.mark.equality
def test_other_tokens_are_a_difference(tmp_path: Path) -> None:
    scene = Scene(BY_NAME["Qwen 3"], tmp_path)
    right = scene.greedy(scene.prompts[0])
    scene.compare("same", scene.prompts[0], right)
    with pytest.raises(Difference, match="token 3 is"):
        scene.compare("other", scene.prompts[0], [*right[:3], (right[3] + 1) % 200, *right[4:]])
    with pytest.raises(Difference, match="23 tokens in place of 24"):
        scene.compare("shorter", scene.prompts[0], right[:-1])


def test_page_has_a_row_for_every_model() -> None:
    equal = {"code": "baton", "reason": ""} | dict.fromkeys(COLUMNS, "equal")
    results = {tiny.name: equal for tiny in MODELS} | {MODELS[0].name: {"code": "refused", "reason": "a | b"}}
    results[MODELS[1].name] = equal | {"beam": "Difference: x"}
    page = page_of(results)
    assert page.endswith(f"{len(MODELS) - 2} of {len(MODELS)} are served.\n") and "a &#124; b" in page
    assert page.count("**no**") == 1 and line_of(MODELS[1], results[MODELS[1].name]).endswith("beam: Difference: x")
    rows = {line.split(" | ")[0].removeprefix("| ") for line in PAGE.read_text().splitlines() if line.startswith("| ")}
    assert rows == {"model", *BY_NAME}, "run: python -m benchmarks.models --doc"
