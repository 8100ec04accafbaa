"""SGLang's own HTTP tests, unpatched, its benchmark and its frontend language, with model "default", on a server."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tests.doubles.foreign_envs import env_python
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = [pytest.mark.clients, pytest.mark.slow]

HERE = Path(__file__).parent
TOY_MODEL = HERE.parents[1] / "examples" / "toy_model"
REAL_MODEL = Path(os.environ.get("BATON_REAL_MODEL", "build/models/SmolLM2-135M-Instruct"))
FLAGS = ("--device", "cpu", "--dtype", "float32")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    with ServerUnderTest(TOY_MODEL, tmp_path_factory.mktemp("server"), *FLAGS, behaviour=None) as running:
        yield running.wait_ready()


def sglang_run(*arguments: str) -> str:
    """The output of a program in SGLang's environment, which sees the scripts of this folder."""
    env = os.environ | {"PYTHONPATH": str(HERE), "HF_HUB_OFFLINE": "1"}
    command = [env_python("sglang"), "-W", "ignore", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-8000:]
    return ran.stdout


@pytest.mark.timeout(600)
def test_sglang_kits_pass_on_the_toy_model(server: ServerUnderTest) -> None:
    assert "Ran 52 tests" in sglang_run(str(HERE / "sglang_kits.py"), server.url, "toy")


@pytest.mark.timeout(600)
@pytest.mark.skipif(not REAL_MODEL.is_dir(), reason=f"{REAL_MODEL} is missing; make real-model makes it")
def test_sglang_kits_pass_on_a_real_model(tmp_path: Path) -> None:
    with ServerUnderTest(REAL_MODEL, tmp_path, *FLAGS, behaviour=None) as running:
        running.wait_ready()
        assert "Ran 10 tests" in sglang_run(str(HERE / "sglang_kits.py"), running.url, "real")


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm"])
def test_sglang_bench_serving_completes_all_requests(server: ServerUnderTest, backend: str, tmp_path: Path) -> None:
    start = "import sglang_stand_ins; sglang_stand_ins.install(); import sglang.benchmark.serving as it; it.cli_main()"
    options = ["--backend", backend, "--base-url", server.url, "--model", "default", "--tokenizer", str(TOY_MODEL)]
    options += ["--dataset-name", "random-ids", "--num-prompts", "8", "--random-input-len", "100"]
    options += ["--random-output-len", "16", "--seed", "1", "--output-file", str(tmp_path / "results.jsonl")]
    sglang_run("-c", start, *options)
    results = json.loads((tmp_path / "results.jsonl").read_text())
    assert results["completed"] == 8 and results["total_output_tokens"] == 68  # as asked for; drawn with the seed


@pytest.fixture(scope="module")
def frontend(server: ServerUnderTest) -> dict[str, Any]:
    """What came of SGLang's programs."""
    return json.loads(sglang_run(str(HERE / "sglang_frontend.py"), server.url).splitlines()[-1])


def test_sglang_frontend_language_matches_generate(server: ServerUnderTest, frontend: dict[str, Any]) -> None:
    found = frontend
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    prompts = [f"How many lines are in {name}?\n" for name in ("manual.md", "notes.txt")]
    answered = server.client.post("/generate", json={"text": prompts, "sampling_params": sampling}).json()
    answers = [answer["text"] for answer in answered]
    assert found["batch"] == answers and found["answer"] == found["streamed"] == answers[0]
    assert found["num_pieces"] > 1 and found["served"] == str(TOY_MODEL)
    texts = [f"{prompts[0]}{answers[0]} {number}" for number in range(2)]
    sampling["max_new_tokens"] = 4
    forked = server.client.post("/generate", json={"text": texts, "sampling_params": sampling}).json()
    assert found["branches"] == [answer["text"] for answer in forked]
    assert found["choice"] in ("manual.md", "notes.txt")


def test_sglang_frontend_language_holds_texts_to_their_forms(frontend: dict[str, Any]) -> None:
    patterns = {
        "regex": "(wc|ls) -[a-z]{1,3}",
        "choices": r"manual\.md|notes\.txt",
        "int": r"[-+]?[0-9]+",
        "bool": "True|False",
    }
    texts = frontend["texts"]
    assert set(frontend["ended"]) == {"stop"}, frontend
    assert all(re.fullmatch(pattern, texts[name]) for name, pattern in patterns.items()), texts
    jsonschema_rs.validate(frontend["schema"], json.loads(texts["json_schema"]))
    assert frontend["streamed_json"] == texts["json_schema"]
