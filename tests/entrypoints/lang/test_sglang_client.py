"""The requests of SGLang's own client, field for field, and what it reads in the answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.entrypoints.engine import Engine
from baton.entrypoints.lang import ProgramState, function, gen, select
from tests.doubles.server_under_test import ServerUnderTest

TOY_MODEL = Path(__file__).parents[3] / "examples" / "toy_model"
PROMPT = "<|im_start|>user\nHow many lines are in poem.txt?<|im_end|>\n<|im_start|>assistant\n"

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """With its headers. It sends the key with every request, also with those that have no body."""
    flags = ["--max-total-tokens", "8192", "--dtype", "float32", "--device", "cpu", "--api-key", "secret"]
    with ServerUnderTest(TOY_MODEL, tmp_path_factory.mktemp("server"), *flags, behaviour=None) as server:
        server.client.headers["Authorization"] = "Bearer secret"
        server.wait_ready()
        yield server.client


def post(client: httpx.Client, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    response = client.post(
        path,
        content=None if body is None else json.dumps(body),
        headers={"Content-Type": "application/json; charset=utf-8"},
    )
    assert response.status_code == 200, response.text
    return response


def sampling(**given: Any) -> dict[str, Any]:
    """Its request for a gen: all settings, the defaults too."""
    return {
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "max_new_tokens": 128,
        "min_new_tokens": 0,
        "n": 1,
        "stop": [],
        "stop_token_ids": [],
        "stop_regex": [],
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "ignore_eos": False,
        "regex": None,
        "json_schema": None,
        **given,
    }


def test_sglang_client_reads_server_information(client: httpx.Client) -> None:
    assert client.get("/get_model_info").json()["model_path"] == str(TOY_MODEL)
    assert "max_total_tokens" in client.get("/server_info").json()


def test_flush_cache_needs_no_body(client: httpx.Client) -> None:
    text = {"text": PROMPT, "sampling_params": {"max_new_tokens": 1}}
    post(client, "/generate", text)
    assert post(client, "/generate", text).json()["meta_info"]["cached_tokens"] > 0
    post(client, "/flush_cache")
    assert post(client, "/generate", text).json()["meta_info"]["cached_tokens"] == 0


def test_sglang_client_gen_requests_are_served(client: httpx.Client, toy_engine: Engine) -> None:
    answer = post(
        client, "/generate", {"text": PROMPT, "sampling_params": sampling(temperature=0, stop=["\n```"])}
    ).json()
    plain = toy_engine.generate(PROMPT, {"temperature": 0, "stop": "\n```"})
    assert answer["text"] == plain["text"] == "```bash\nwc -l poem.txt"
    assert answer["meta_info"]["completion_tokens"] == plain["meta_info"]["completion_tokens"]
    logprobs = {"return_logprob": True, "logprob_start_len": 3, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    meta = post(client, "/generate", {"text": PROMPT, "sampling_params": sampling(), **logprobs}).json()["meta_info"]
    assert "".join(row[2] for row in meta["input_token_logprobs"]).startswith("How many lines")
    assert all(len(row) == 2 for row in meta["output_top_logprobs"])


def test_sglang_client_stream_is_cumulative(client: httpx.Client) -> None:
    """It cuts off what it has of the text so far, and stops at [DONE]."""
    body = {"text": PROMPT, "sampling_params": sampling(temperature=0), "stream": True}
    lines = [line for line in post(client, "/generate", body).text.splitlines() if line]
    assert lines.pop() == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    text = ""
    for event in (json.loads(line[5:]) for line in lines):
        assert event["text"].startswith(text) and "meta_info" in event
        text = event["text"]
    assert text == "```bash\nwc -l poem.txt\n```"


def test_errors(client: httpx.Client) -> None:
    """It shows the JSON of any answer but 200."""
    response = client.post("/generate", json={"text": "a", "sampling_params": sampling(structural_tag="{}")})
    assert response.status_code == 400 and "structural_tag is {}" in response.json()["error"]["message"]


def test_regex_of_sglang_client(client: httpx.Client) -> None:
    answer = post(client, "/generate", {"text": "a", "sampling_params": sampling(regex="[0-9]{3}x")}).json()
    assert re.fullmatch("[0-9]{3}x", answer["text"])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "grammar"}


def test_prefix_is_cached_with_zero_new_tokens(client: httpx.Client) -> None:
    """For the programs of a batch, for a fork, and before a select."""
    post(client, "/flush_cache")
    meta = post(client, "/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 0}}).json()["meta_info"]
    again = {"text": PROMPT + "There", "sampling_params": {"max_new_tokens": 1}}
    assert post(client, "/generate", again).json()["meta_info"]["cached_tokens"] == meta["prompt_tokens"]


def test_sglang_client_select_scores_are_consistent(client: httpx.Client, toy_engine: Engine) -> None:
    """It asks for the logprobs from the last but one token of the prompt on, because a choice may change how the end of
    the prompt is tokenised, and takes the mean."""
    choices = ["```bash\n", "There is", "I"]
    start = len(toy_engine.encode(PROMPT)) - 2
    body = {
        "text": [PROMPT + choice for choice in choices],
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "return_text_in_logprobs": True,
        "logprob_start_len": start,
    }
    scores = []
    for answer, choice in zip(post(client, "/generate", body).json(), choices, strict=True):
        rows = answer["meta_info"]["input_token_logprobs"]
        assert "".join(row[2] for row in rows) == "assistant\n" + choice
        assert rows[0][0] is not None and not PROMPT.endswith(rows[0][2])
        assert answer["meta_info"]["output_token_logprobs"] == []
        values = [row[0] for row in rows if row[0]]
        scores.append(sum(values) / len(values))

    @function
    def choose(s: ProgramState) -> None:
        s += PROMPT + select("way", choices) + gen("rest", max_tokens=1)

    state = choose.run(backend=toy_engine)
    assert choices[scores.index(max(scores))] == state["way"]
    meta = state.meta("way")
    # Its sums are those of the choices' own tokens and of the prompt's last two, which are the same for each.
    lengths = [len(rows) for rows in meta["input_token_logprobs"]]
    own = [length * score for length, score in zip(lengths, meta["normalized_prompt_logprobs"], strict=True)]
    rest = [score * (length + 2) - mine for score, length, mine in zip(scores, lengths, own, strict=True)]
    assert max(rest) - min(rest) < 1e-3
