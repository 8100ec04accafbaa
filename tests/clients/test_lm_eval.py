"""lm-evaluation-harness finds the same in a server, through local-completions, as in transformers, through hf."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.foreign_envs import env_python
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = [pytest.mark.clients, pytest.mark.slow]

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
TASKS = Path(__file__).parent / "lm_eval_tasks"
NAMES = ("baton_choices", "baton_commands", "baton_texts")

Found = tuple[dict[str, Any], dict[str, list[Any]]]
"""The results of each task, and what the model answered to each of its items."""


def evaluated(folder: Path, model: str, *options: str) -> Found:
    arguments = ["--model", model, "--model_args", ",".join(options), "--tasks", ",".join(NAMES)]
    arguments += ["--include_path", str(TASKS), "--output_path", str(folder), "--log_samples", "--batch_size", "8"]
    arguments += ["--device", "cpu"]
    env = os.environ | {
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "OPENAI_API_KEY": "none",
        "PYTHONPATH": "",
    }
    command = [env_python("lm-eval"), "-m", "lm_eval", *arguments]
    ran = subprocess.run(command, cwd=TASKS, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    [results] = folder.rglob("results_*.json")
    samples = dict[str, list[Any]]()
    for name in NAMES:
        [path] = folder.rglob(f"samples_{name}_*.jsonl")
        items = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda item: item["doc_id"])
        samples[name] = [item["filtered_resps"] for item in items]
    return json.loads(results.read_text())["results"], samples


@pytest.fixture(scope="module")
def by_transformers(tmp_path_factory: pytest.TempPathFactory) -> Found:
    options = (f"pretrained={TOY_MODEL}", "dtype=float32")
    return evaluated(tmp_path_factory.mktemp("hf"), "hf", *options)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ["--served-model-name", "toy", "--device", "cpu", "--dtype", "float32"]
    with ServerUnderTest(TOY_MODEL, tmp_path_factory.mktemp("server"), *flags, behaviour=None) as running:
        yield running.wait_ready()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tokenized", [True, False])
def test_lm_eval_scores_match_transformers(
    server: ServerUnderTest, by_transformers: Found, tokenized: bool, tmp_path: Path
) -> None:
    """tokenized: prompts are sent as token ids, or as text."""
    options = ("model=toy", f"base_url={server.url}/v1/completions", f"tokenizer={TOY_MODEL}", "max_length=2048")
    options = (*options, "num_concurrent=2", "max_retries=1", f"tokenized_requests={tokenized}")
    results, samples = evaluated(tmp_path, "local-completions", *options)
    expected, expected_samples = by_transformers
    assert results["baton_choices"]["acc,none"] == expected["baton_choices"]["acc,none"]
    assert results["baton_commands"]["exact_match,none"] == expected["baton_commands"]["exact_match,none"]
    assert samples["baton_commands"] == expected_samples["baton_commands"]
    assert len(samples["baton_choices"]) == len(samples["baton_texts"]) == 30
    differences = list[float]()
    for found, wanted in zip(samples["baton_choices"], expected_samples["baton_choices"], strict=True):
        assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in wanted]
        differences += [abs(float(one) - float(other)) for (one, _), (other, _) in zip(found, wanted, strict=True)]
    texts = zip(samples["baton_texts"], expected_samples["baton_texts"], strict=True)
    differences += [abs(float(found[0]) - float(wanted[0])) for found, wanted in texts]
    assert len(differences) == 150 and max(differences) < 1e-3, max(differences)
    print(f"largest difference of {len(differences)} log-likelihoods: {max(differences):.1e}; {results}")
