"""Numbers at the edges of float16, float32, float64, int32 and int64 in every field of every API: no answer is a 5xx,
no token leaves what is allowed, and the server answers afterwards as before."""

from __future__ import annotations

import asyncio
import io
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from baton.entrypoints.engine import Engine
from baton.entrypoints.fields.sampling import SAMPLING
from baton.entrypoints.http_statuses import status_of
from baton.entrypoints.lang import BackendError, EngineBackend, ProgramError, function, gen
from baton.entrypoints.lang.options import SAMPLING_OPTIONS
from baton.scheduler.outcome import RequestRefused
from tests.doubles.number_edges import (
    ALLOWED,
    ALLOWED_TEXT,
    APIS,
    ITEMS,
    Api,
    draw_body,
    draw_odd,
    draw_sampling,
    encode_body,
    find_outputs,
)
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

SEED = int(os.environ.get("BATON_NUMBERS_SEED", "31"))
TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
PROMPT = {"text": "abc", "sampling_params": {"temperature": 0, "max_new_tokens": 12}}
AT_ONCE = 12


@pytest.fixture(scope="module", params=[pytest.param("off", marks=pytest.mark.slow), "on"], ids=["plain", "overlapped"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ("--max-total-tokens", "16384", "--dtype", "float32", "--device", "cpu", "--context-length", "256")
    flags += (
        "--linear-backend",
        "torch",
        "--overlap-schedule",
        request.param,
        "--max-beam-width",
        "16",
        "--served-model-name",
        "toy",
    )
    with ServerUnderTest(TOY_MODEL, tmp_path_factory.mktemp("server"), *flags, behaviour=None) as running:
        running.wait_ready()
        file = io.BytesIO()
        np.save(file, np.array(ITEMS, dtype=np.int32))
        headers = {"Content-Type": "application/octet-stream"}
        answer = running.client.post("/item_tries", params={"name": "t"}, content=file.getvalue(), headers=headers)
        assert answer.status_code == 200, answer.text
        yield running


def check_tokens(sampling: dict[str, Any], answer: Any) -> None:
    """No output has a token that the request does not allow."""
    for ids, text in find_outputs(answer):
        if sampling.get("item_trie") == "t" and ids is not None:
            begins = {item[:length] for item in ITEMS for length in (1, 2, 3)}  # a stop id may end it early
            assert tuple(ids) in begins, (sampling, answer)
        elif sampling.get("allowed_token_ids") == ALLOWED:
            assert set(ids) <= set(ALLOWED) if ids is not None else set(text) <= ALLOWED_TEXT, (sampling, answer)


async def send_all(server: ServerUnderTest, seed: int, values: int) -> Counter[tuple[str, int]]:
    """Send bodies with so many values, some at a time. Returns how many answers had which status, by path."""
    rng, seen, left = random.Random(seed), Counter[tuple[str, int]](), [values]

    async def client(http: httpx.AsyncClient, api: Api, own: random.Random) -> None:
        while left[0] > 0:
            body, count = draw_body(own, api)
            left[0] -= count
            content = encode_body(body)
            answer = await http.post(api.path, content=content, headers={"Content-Type": "application/json"})
            seen[api.path, answer.status_code] += 1
            assert answer.status_code in (200, 400, 404, 409, 410, 413, 422), (api.path, content, answer.text)
            if answer.status_code == 200 and not answer.headers["Content-Type"].startswith("text/event-stream"):
                check_tokens(body.get("sampling_params", body), answer.json())

    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http, asyncio.TaskGroup() as group:
        for number in range(AT_ONCE):
            # /generate has as many clients as the others together: it has tries, beams and most fields.
            api = APIS[0] if number % 2 else APIS[1 + number // 2 % (len(APIS) - 1)]
            group.create_task(client(http, api, random.Random(rng.randrange(2**32))))
    return seen


def fuzz(server: ServerUnderTest, seed: int, values: int) -> Counter[tuple[str, int]]:
    print(f"BATON_NUMBERS_SEED={seed}")
    before = server.generate(**PROMPT).json()["output_ids"]
    for api in APIS:
        answer = server.client.post(api.path, json=api.base)
        assert answer.status_code == 200, (api.path, answer.text)
    seen = asyncio.run(send_all(server, seed, values))
    print(sorted(seen.items()))
    assert server.process.poll() is None, server.log[-2000:]
    assert server.generate(**PROMPT).json()["output_ids"] == before
    server.wait_until(lambda: server.running() == 0, "nothing runs")
    for name in ("num_failed_total", "num_nonfinite_total", "leaked_tokens_total"):
        assert server.metric(name) == 0, name
    assert "Traceback" not in server.log
    assert all(seen[api.path, 400] for api in APIS) and sum(seen.values()) > values / 4
    assert sum(count for (_, status), count in seen.items() if status == 200) > 0.1 * sum(seen.values())
    return seen


def test_edge_numbers_over_http_cause_no_server_error(server: ServerUnderTest) -> None:
    fuzz(server, SEED, 600)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_thousand_edge_numbers_over_http(server: ServerUnderTest) -> None:
    fuzz(server, SEED + 1, 20_000)


# -- in process --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    options: dict[str, Any] = {"max_total_tokens": 16384, "context_length": 256, "max_beam_width": 16}
    with Engine(model_path=str(TOY_MODEL), device="cpu", dtype="float32", linear_backend="torch", **options) as engine:
        engine.load_item_trie("t", np.array(ITEMS, dtype=np.int32))
        yield engine


def fuzz_engine(engine: Engine, seed: int, values: int) -> Counter[str]:
    """Values that JSON has no form for come this way as well."""
    print(f"BATON_NUMBERS_SEED={seed}")
    rng, seen, names = random.Random(seed), Counter[str](), tuple(SAMPLING)
    before = engine.generate("abc", PROMPT["sampling_params"])["output_ids"]
    while values > 0:
        sampling, count = draw_sampling(rng, names, raw=False)
        values -= count
        if rng.random() < 0.1:
            sampling["temperature"] = rng.choice([float("nan"), float("inf"), np.float32(1e30), np.int64(1)])
        try:
            check_tokens(sampling, engine.generate("abc", sampling))
            seen["served"] += 1
        except RequestRefused as refusal:
            assert status_of(refusal) in (400, 404, 409), (sampling, refusal)
            seen["refused"] += 1
    assert engine.generate("abc", PROMPT["sampling_params"])["output_ids"] == before
    assert seen["served"] and seen["refused"]
    assert engine.get_server_info()["stats"]["failed_requests"] == 0
    return seen


def test_edge_numbers_through_the_engine_cause_no_failure(engine: Engine) -> None:
    fuzz_engine(engine, SEED + 2, 300)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_five_thousand_edge_numbers_through_the_engine(engine: Engine) -> None:
    print(fuzz_engine(engine, SEED + 3, 5_000))


@function
def say(s: Any, options: dict[str, Any]) -> None:
    s += "abc"
    s += gen("said", max_tokens=3, **options)


@pytest.mark.parametrize(
    "values", [100, pytest.param(2_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])], ids=["some", "many"]
)
def test_edge_numbers_in_programs_cause_no_failure(engine: Engine, values: int) -> None:
    print(f"BATON_NUMBERS_SEED={SEED}")
    rng, seen, backend = random.Random(SEED + 4), Counter[str](), EngineBackend(engine)
    with pytest.raises(ProgramError, match=r"sampling_params\.n: expected int"):
        say.run({"n": [[1]]}, backend=backend)["said"]
    names = [name for name in SAMPLING_OPTIONS if name not in ("max_new_tokens", "min_new_tokens")]
    for _ in range(values):
        options = {name: draw_odd(rng, name, SAMPLING[name], raw=False) for name in rng.sample(names, 1)}
        try:
            state = say.run(options, backend=backend)
            assert state["said"] is not None
            seen["served"] += 1
        except (BackendError, ProgramError, RequestRefused, ValueError, TypeError) as error:
            assert getattr(error, "status", 400) in (400, 404, None), (options, error)
            seen["refused"] += 1
    assert seen["served"] and seen["refused"]
    assert engine.get_server_info()["stats"]["failed_requests"] == 0
