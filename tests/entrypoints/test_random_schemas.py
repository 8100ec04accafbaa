"""Schemas drawn at random, and those of the official test suite: what ends with "stop" is valid, greedy and sampled,
with and without speculation, streamed and whole."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from tests.doubles.random_schemas import Case, drawn, suite
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
TOY, REAL = ROOT / "examples" / "toy_model", ROOT / "build" / "models" / "SmolLM2-135M-Instruct"
SEED = int(os.environ.get("BATON_SCHEMA_SEED", "7"))
NUMBER = int(os.environ.get("BATON_SCHEMAS", "2000"))
FLAGS = ("--max-total-tokens", "32768", "--dtype", "float32", "--device", "cpu")
SPECULATES = ("--speculative-algorithm", "NGRAM")
SAMPLED = {"temperature": 1.2, "top_p": 0.95}
GREEDY = {"temperature": 0.0}
MODES = [(GREEDY, False), (GREEDY, True), (SAMPLED, False), (SAMPLED, True)]
"""Sampling, and whether the answer is streamed."""


class Schemas:
    """Asks a server for outputs of many schemas, and counts how they ended."""

    def __init__(self, server: ServerUnderTest, max_new_tokens: int) -> None:
        self._server, self._max_new_tokens = server, max_new_tokens
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self, cases: list[Case], sampling: dict[str, Any], stream: bool) -> None:
        with ThreadPoolExecutor(32) as pool:
            for asked in [pool.submit(self._ask, number, case, sampling, stream) for number, case in enumerate(cases)]:
                asked.result()

    def _ask(self, number: int, case: Case, sampling: dict[str, Any], stream: bool) -> None:
        schema = case.schema if isinstance(case.schema, dict) else json.dumps(case.schema)
        params = {"max_new_tokens": self._max_new_tokens, **sampling, "json_schema": schema, "sampling_seed": number}
        body = {"text": "JSON: ", "sampling_params": params, "stream": stream}
        answer = self._server.client.post("/generate", json=body, timeout=300)
        if answer.status_code != 200:
            message = answer.json()["error"]["message"]
            fits = answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_grammar"
            self._end(case, "refused" if fits and message else f"status {answer.status_code}: {message}", fits)
            return
        events = (
            [line[6:] for line in answer.text.split("\n") if line.startswith("data: {")] if stream else [answer.text]
        )
        found = json.loads(events[-1])
        if "error" in found:
            self._end(case, "refused", found["error"]["code"] == "invalid_grammar", json.dumps(found["error"]))
            return
        end = found["meta_info"]["finish_reason"]
        if end["type"] != "stop":
            message = end.get("message", "")
            self._end(case, end["type"], end["type"] == "length" or "json_schema" in message or "limit" in message)
            return
        try:
            value = json.loads(found["text"])
        except ValueError:
            self._end(case, "no JSON", False, found["text"])
            return
        fits = validator_for(case.schema, default=Draft202012Validator)(case.schema).is_valid(value)
        self._end(case, "valid" if fits else "not valid", fits, found["text"])

    def _end(self, case: Case, end: str, fits: bool, text: str = "") -> None:
        self.ends[end] += 1
        if not fits:
            self.wrong.append(f"{case.origin}: {end}: {json.dumps(case.schema)[:600]} {text[:300]}")


def check(
    server: ServerUnderTest, cases: list[Case], modes: list[tuple[dict[str, Any], bool]], tokens: int = 160
) -> None:
    for sampling, stream in modes:
        schemas = Schemas(server, tokens)
        schemas.run(cases, sampling, stream)
        print(f"{len(cases)} schemas, {sampling}, stream {stream}: {dict(schemas.ends)}", file=sys.stderr)
        assert not schemas.wrong, "\n".join(schemas.wrong[:20])
        assert schemas.ends["valid"] > 0.2 * len(cases) and schemas.ends["refused"] < 0.4 * len(cases)


PLAIN = pytest.param(FLAGS, id="plain", marks=pytest.mark.slow)
SPECULATING = pytest.param(FLAGS + SPECULATES, id="speculating")


@pytest.fixture(scope="module", params=[PLAIN, SPECULATING])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    with ServerUnderTest(TOY, tmp_path_factory.mktemp("server"), *request.param, behaviour=None) as running:
        yield running.wait_ready()


def test_outputs_of_random_schemas_are_valid(server: ServerUnderTest) -> None:
    check(server, drawn(60, SEED), [MODES[0], MODES[3]])


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_outputs_of_thousands_of_random_schemas_are_valid(server: ServerUnderTest) -> None:
    check(server, drawn(NUMBER, SEED), MODES)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_outputs_of_the_official_test_suite_are_valid(server: ServerUnderTest) -> None:
    check(server, suite(ROOT / "build" / "schema_suite"), MODES)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("flags", "modes"),
    [(FLAGS + SPECULATES, [MODES[1], MODES[2]]), (FLAGS, [MODES[0], MODES[3]])],
    ids=["speculating", "plain"],
)
def test_outputs_of_a_real_model_are_valid(
    tmp_path: Path, flags: tuple[str, ...], modes: list[tuple[dict[str, Any], bool]]
) -> None:
    cases = drawn(NUMBER, SEED) + suite(ROOT / "build" / "schema_suite")
    with ServerUnderTest(REAL, tmp_path, *flags, behaviour=None) as running:
        check(running.wait_ready(), cases, modes, tokens=100)
