"""``/openapi.json`` says what the endpoints do: schemathesis sends what it allows, and what it does not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from baton.entrypoints.http.unserved_routes import UNSERVED
from tests.doubles.byte_tokenizer import CHAT_TEMPLATE
from tests.doubles.http_calls import error_of
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TOY = Path(__file__).parents[3] / "examples" / "toy_model"

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "negative_data_rejection",
)  # fmt: skip


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    """It takes any name of a model, and its template takes tools and thoughts."""
    folder = tmp_path_factory.mktemp("server")
    template = folder / "template.jinja"
    template.write_text(CHAT_TEMPLATE)
    flags = ["--max-total-tokens", "16384", "--linear-backend", "torch", "--chat-template", str(template)]
    flags += ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--context-length", "256"]
    with ServerUnderTest(TOY, folder, *flags, behaviour=None) as running:
        yield running.wait_ready()


def attack(server: ServerUnderTest, document: dict[str, Any], *, phases: str, examples: int, seed: int) -> str:
    """What schemathesis printed, which found nothing. A pause is left out: whatever is sent after it would wait."""
    file = server.tmp / "openapi.json"
    file.write_text(json.dumps(document))
    ran = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")), "--no-color", "run", str(file), "--url", server.url,
            "--phases", phases, "--max-examples", str(examples), "--seed", str(seed),
            "--exclude-path", "/pause_generation", "--checks", ",".join(CHECKS), "--request-timeout", "30",
            "--suppress-health-check", "all", "--generation-database", "none",
        ],
        capture_output=True, text=True, cwd=server.tmp,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    return ran.stdout


@pytest.mark.parametrize(("examples", "least"), [(8, 200), pytest.param(60, 1500, marks=pytest.mark.slow)])
def test_fuzzed_answers_match_openapi(open_server: ServerUnderTest, examples: int, least: int) -> None:
    """Without the examples: with them most of the time would go by in answering."""
    document = open_server.client.get("/openapi.json").json()
    for at in document["paths"].values():
        at.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {}).pop("examples", None)
    found = attack(open_server, document, phases="fuzzing", examples=examples, seed=1)
    cases = re.search(r"(\d+) generated", found)
    assert cases is not None and int(cases[1]) > least, found
    assert open_server.client.get("/health").status_code == 200


def test_openapi_examples_are_answered_as_described(open_server: ServerUnderTest) -> None:
    """Events of streams too, which schemathesis does not read."""
    document = open_server.client.get("/openapi.json").json()
    num_events = 0
    for path, at in document["paths"].items():
        body = at.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        for about, example in body.get("examples", {}).items():
            answer = open_server.client.post(path, json=example["value"])
            assert answer.status_code == 200, (path, about, answer.text)
            kind = answer.headers["content-type"].split(";")[0]
            schema = at["post"]["responses"]["200"]["content"][kind]["schema"]
            if kind == "text/event-stream":
                schema = schema["properties"]["data"]["anyOf"][1]["contentSchema"]
            validator = jsonschema_rs.validator_for({**schema, "components": document["components"]})
            if kind == "application/json":
                validator.validate(answer.json())
                continue
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            num_events += len(events)
            for event in events:
                validator.validate(event)
    assert num_events > 20


REFUSED = (
    ("post", "/generate", {"continuation_of": "nobody"}, 404),
    ("post", "/v1/completions", {"continuation_of": "nobody"}, 404),
    ("post", "/generate", {"text": "x", "sampling_params": {"item_trie": "none"}}, 404),
    ("post", "/v1/responses", {"input": "x", "previous_response_id": "resp_x"}, 404),
    ("post", "/v1/messages", {"model": "m"}, 400),
    ("get", "/v1/responses/{response_id}", None, 404),
    ("delete", "/item_tries/{name}", None, 404),
    ("post", "/stop_profile", {}, 409),
    ("get", "/flush_cache", None, 405),
)


@pytest.mark.parametrize(("method", "path", "body", "status"), REFUSED)
def test_refusals_match_openapi(
    open_server: ServerUnderTest, method: str, path: str, body: dict[str, Any] | None, status: int
) -> None:
    document = open_server.client.get("/openapi.json").json()
    answer = open_server.client.request(method, re.sub("{.*}", "nobody", path), json=body)
    assert answer.status_code == status
    schema = document["paths"][path][method]["responses"][str(status)]["content"]["application/json"]["schema"]
    validator = jsonschema_rs.validator_for({**schema, "components": document["components"]})
    validator.validate(answer.json())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_more_fuzzed_answers_match_openapi(open_server: ServerUnderTest, seed: int) -> None:
    document = open_server.client.get("/openapi.json").json()
    attack(open_server, document, phases="examples,coverage,fuzzing", examples=60, seed=seed)


def test_every_endpoint_is_in_openapi(open_server: ServerUnderTest) -> None:
    document = open_server.client.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    paths = document["paths"]
    for path in ("/generate", "/v1/chat/completions", "/v1/models/{model}", "/docs", "/ping"):
        assert path in paths
    unserved = {path for listed in UNSERVED.values() for path in listed}
    assert unserved.isdisjoint(paths) and all(path in document["info"]["description"] for path in unserved)
    names = [operation["operationId"] for at in paths.values() for operation in at.values()]
    assert len(set(names)) == len(names)
    for at in paths.values():
        for method, operation in at.items():
            assert operation["summary"]
            assert (method == "head") == ("content" not in operation["responses"]["200"])


def test_generation_endpoints_document_job_headers_and_extra_body(open_server: ServerUnderTest) -> None:
    document = open_server.client.get("/openapi.json").json()
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        described = document["paths"][path]["post"]
        assert {"X-Job-Id", "X-Parent-Job-Id", "X-Job-Last-Step", "X-Claude-Code-Session-Id"} <= {
            one["name"] for one in described["parameters"] if one["in"] == "header"
        }
        body = described["requestBody"]["content"]["application/json"]["schema"]
        properties = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"]
        jobs = {"job_id", "parent_job_id", "is_last_step"}
        assert properties["extra_body"]["properties"].keys() == jobs < properties.keys()


def test_docs_page_loads_no_external_resources(open_server: ServerUnderTest) -> None:
    page = open_server.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    linked = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert "http" not in page.text and linked
    for link in linked:
        if not link.startswith("data:"):
            assert open_server.client.get(f"/{link}").status_code == 200
    assert error_of(open_server.client.get("/docs/..%2F__init__.py"), 404)["code"] == "not_found"


def test_docs_page_renders_in_a_browser(open_server: ServerUnderTest, tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed")
    shown = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
            "--virtual-time-budget=20000", "--dump-dom", f"{open_server.url}/docs",
        ],
        capture_output=True, text=True, timeout=120,
    ).stdout  # fmt: skip
    for words in ("/v1/chat/completions", "Answer a chat", "/generate", "Item tries"):
        assert words in shown


def test_docs_page_needs_no_key(model: Path, tmp_path: Path) -> None:
    with ServerUnderTest(model, tmp_path, "--api-key", "secret", behaviour={}) as server:
        server.wait_ready()
        for path in ("/openapi.json", "/docs", "/docs/start.js"):
            assert server.client.get(path).status_code == 200
        described = server.client.get("/openapi.json")
        assert "secret" not in described.text
        assert server.client.get("/server_info").status_code == 401
