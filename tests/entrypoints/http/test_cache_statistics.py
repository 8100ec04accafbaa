"""The statistics of the cache over HTTP, on the real server with the toy model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.doubles.http_calls import error_of
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TOY = Path(__file__).parents[3] / "examples" / "toy_model"
POOL = 1024


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ["--device", "cpu", "--dtype", "float32", "--linear-backend", "torch", "--max-total-tokens", str(POOL)]
    flags += ["--hit-rate-alert", "0.25"]
    with ServerUnderTest(TOY, tmp_path_factory.mktemp("server"), *flags, behaviour=None) as running:
        yield running.wait_ready()


def ask(server: ServerUnderTest, ids: list[int], **fields: Any) -> dict:
    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}, **fields}
    response = server.client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()["meta_info"]


def statistics(server: ServerUnderTest) -> dict:
    response = server.client.get("/cache/statistics")
    assert response.status_code == 200, response.text
    return response.json()


def reset(server: ServerUnderTest) -> None:
    answer = server.client.post("/cache/statistics/reset")
    assert answer.status_code == 200 and answer.json()["success"] is True


def test_cache_hits_are_counted_by_kind(server: ServerUnderTest) -> None:
    reset(server)
    prompt = [10 + i % 7 for i in range(200)]
    ask(server, prompt, rid="parent", retain_ttl=60)
    ask(server, [*prompt[:150], 90, 91])
    child = ask(server, [], continuation_of="parent", continuation_ids=[92, 93], input_ids=None)
    found = statistics(server)
    handoff = child["continuation"]["inherited_tokens"] - child["continuation"]["recomputed_tokens"]
    queries = found["queries"]
    assert queries["hits"] == {"handoff": handoff, "fork": 0, "match": 150, "host": 0, "disk": 0, "remote": 0}
    assert (queries["prompts"], queries["query_tokens"]) == (3, 200 + 152 + 206)
    assert queries["hit_tokens"] == 150 + handoff and queries["hit_rate"] == queries["hit_tokens"] / 558
    assert [(row["from"], row["to"], row["query_tokens"]) for row in found["depth"]] == [
        (0, 128, 3 * 128),
        (128, 256, 72 + 24 + 78),
    ]
    assert sum(row["hit_tokens"] for row in found["depth"]) == queries["hit_tokens"]
    assert [(w["seconds"], w["prompts"], w["hit_tokens"]) for w in found["windows"]] == [
        (seconds, 3, queries["hit_tokens"]) for seconds in (60, 300, 900)
    ]
    assert found["reuse_gap"]["tokens"] == 150 + handoff
    assert found["alert"] == {"threshold": 0.25, "active": False}
    server.client.post("/release", json={"rid": "parent"})


def test_evicted_tokens_are_accounted_for(server: ServerUnderTest) -> None:
    reset(server)
    hot = [5 + i % 3 for i in range(100)]
    for number in range(3 * POOL // 400):
        ask(server, [number + 100, *[11 + (number * i) % 89 for i in range(399)]])
        ask(server, [*hot, number + 100])
    found = statistics(server)
    kept = found["kv"]
    assert kept["stored_tokens"] > 2 * POOL and kept["evicted_tokens"] > POOL and kept["evicted_nodes"] > 2
    assert found["lifetime"]["tokens"] == found["idle_time"]["tokens"] == kept["evicted_tokens"]
    since_start = server.client.get("/server_info").json()["internal_states"][0]["stats"]["cache"]["seconds"]
    assert found["idle_time"]["mean_s"] <= found["lifetime"]["mean_s"] < since_start
    assert sum(bucket["tokens"] for bucket in found["lifetime"]["buckets"]) == found["lifetime"]["tokens"]
    assert kept["retired_tokens"] < 4, "of the requests that warm a server up"
    assert kept["to_host_tokens"] == 0
    early = found["evicted_too_early"]
    assert early["recomputed_tokens"] <= early["recorded_tokens"] <= kept["evicted_tokens"]
    assert found["windows"][0]["evicted_tokens"] == kept["evicted_tokens"]


def test_statistics_reset_leaves_server_info_and_metrics_unchanged(server: ServerUnderTest) -> None:
    def since_start() -> dict:
        return server.client.get("/server_info").json()["internal_states"][0]["stats"]

    ask(server, [3] * 50)
    before = since_start()
    reset(server)
    fresh, after = statistics(server), since_start()
    assert fresh["queries"]["prompts"] == 0 and fresh["queries"]["hit_rate"] is None and fresh["depth"] == []
    assert fresh["kv"]["stored_tokens"] == 0 and fresh["seconds"] < after["cache"]["seconds"]
    for name in ("queries", "kv", "depth"):
        assert after["cache"][name] == before["cache"][name]
    assert after["cache"]["queries"]["query_tokens"] == after["prefix_cache_queries"] > 0
    assert after["cache"]["queries"]["hit_tokens"] == after["prefix_cache_hits"]
    wanted = after["prefix_cache_queries"]
    server.wait_until(lambda: server.metric("prefix_cache_queries_total") == wanted, "metrics go on")


def test_prometheus_metrics_match_cache_statistics(server: ServerUnderTest) -> None:
    ask(server, [4] * 60)
    ask(server, [4] * 60)
    stats = server.client.get("/server_info").json()["internal_states"][0]["stats"]
    cache = stats["cache"]
    wanted = cache["queries"]["query_tokens"]
    server.wait_until(lambda: server.metric("prefix_cache_queries_total") == wanted, "the worker has reported")
    text = server.client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    kinds = {s.labels["kind"]: s.value for s in families["baton:prefix_cache_hits_by_kind"].samples}
    assert kinds == cache["queries"]["hits"]
    depth = {s.labels.get("le"): s.value for s in families["baton:prefix_cache_query_depth_tokens"].samples}
    assert depth["128.0"] == cache["depth"][0]["query_tokens"] and depth["+Inf"] == wanted
    lifetime = {s.name: s.value for s in families["baton:evicted_lifetime_seconds"].samples}
    assert lifetime["baton:evicted_lifetime_seconds_count"] == cache["lifetime"]["tokens"]
    assert families["baton:hit_rate_alert"].samples[0].value == 0
    rates = {s.labels["window"]: s.value for s in families["baton:prefix_cache_hit_rate"].samples}
    assert set(rates) == {"60", "300", "900"} and all(0 < rate < 1 for rate in rates.values())


def test_invalid_requests_are_refused(server: ServerUnderTest) -> None:
    assert error_of(server.client.post("/cache/statistics/reset", json={"all": True}), 400)["code"] == "unknown_field"
    assert error_of(server.client.get("/cache/statistics/reset"), 405)["code"] == "method_not_allowed"
    assert error_of(server.client.post("/cache/statistics"), 405)["code"] == "method_not_allowed"
