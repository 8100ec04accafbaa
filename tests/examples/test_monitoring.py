"""The Grafana dashboard and the Prometheus file ask for what /metrics has, with the labels that it has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.entrypoints.http.route import Route
from baton.entrypoints.server_config import ServerConfig
from docs.operations_tables import PAGE, between

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
VARIABLES: dict[str, dict[str, Any]] = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
OF_PROMETHEUS = {"instance", "job", "model_name"}
EXPRESSIONS = [
    pytest.param(target["expr"], target["legendFormat"], id=f"{panel['title']}-{target['refId']}")
    for panel in PANELS
    for target in panel.get("targets", ())
]


def metrics() -> dict[str, tuple[str, set[str]]]:
    """Name -> its type, its labels; of the table that tests/docs/test_operations.py compares with the code."""
    found = {}
    for line in between(PAGE.read_text(), "metrics").splitlines():
        name, kind, labels = (cell.strip() for cell in line.strip("|").split("|")[:3])
        if name.startswith("`baton:"):
            found[name.strip("`")] = (kind, set(re.findall(r"`(\w+)`", labels)) | OF_PROMETHEUS)
    return found


METRICS = metrics()


def metric_of(series: str) -> str:
    """The metric of a series that a query names."""
    return next(
        (
            base
            for end in ("_bucket", "_sum", "_count")
            if METRICS.get(base := series.removesuffix(end), "")[0] == "histogram"
        ),
        series,
    )


@pytest.mark.parametrize(("expression", "legend"), EXPRESSIONS)
def test_every_query_names_metrics_and_labels_of_the_server(expression: str, legend: str) -> None:
    series = re.findall(r"baton:\w+", expression)
    assert series
    known = set.intersection(*(METRICS[metric_of(name)][1] for name in series))
    grouped = {label for group in re.findall(r"\bby \(([^)]*)\)", expression) for label in group.split(", ")}
    selected = set(re.findall(r"(\w+)=~", expression))
    assert selected == {"model_name", "instance"}, "the dashboard's variables select the servers"
    assert grouped | selected <= known | {"le"}
    for name in series:
        kind = METRICS[metric_of(name)][0]
        assert ("_bucket" in name) == (kind == "histogram") == ("histogram_quantile" in expression)
        assert f"(rate({name}" not in expression or kind != "gauge", "a gauge has no rate"
    shown = set(re.findall(r"{{(\w+)}}", legend))
    assert shown <= (grouped if "sum" in expression else known), "the legend shows labels that the query keeps"
    assert (legend and shown == grouped - {"le"}) or "sum" not in expression
    assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")


def test_every_counter_is_shown_by_its_rate() -> None:
    totals = {"num_failed_total", "num_nonfinite_total", "leaked_tokens_total", "tier_failed_tokens_total"}
    for expression, _ in (parameter.values for parameter in EXPRESSIONS):
        assert isinstance(expression, str)
        for name in re.findall(r"(?<!rate\()baton:(\w+_total)\b", expression):
            assert name in totals or METRICS[f"baton:{name}"][0] == "gauge", f"{name} only grows"


def test_questions_of_the_documentation_have_a_panel() -> None:
    shown = " ".join(str(parameter.values[0]) for parameter in EXPRESSIONS)
    for name in (
        "num_running_reqs",
        "num_queue_reqs",
        "kv_cache_usage_perc",
        "prefix_cache_hits_total",
        "leases_handed_off_total",
        "time_to_first_token_seconds_bucket",
        "tier_hits_total",
        "num_errors_total",
        "num_retractions_total",
        "leaked_tokens_total",
        "evicted_too_early_tokens_total",
    ):
        assert f"baton:{name}" in shown


def test_dashboard_has_what_grafana_needs() -> None:
    assert DASHBOARD["schemaVersion"] >= 36 and DASHBOARD["title"] == "Baton" and DASHBOARD["uid"]
    assert "id" not in DASHBOARD and "__inputs" not in DASHBOARD, "those belong to one installation"
    assert VARIABLES["datasource"]["type"] == "datasource" and VARIABLES["datasource"]["query"] == "prometheus"
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in PANELS:
        if panel["type"] != "row":
            assert panel["datasource"] == source and panel["targets"] and panel["fieldConfig"]["defaults"]["unit"]
            assert all(target["datasource"] == source for target in panel["targets"])
            references = [target["refId"] for target in panel["targets"]]
            assert len(set(references)) == len(references)
    for name in ("model", "instance"):
        asked = VARIABLES[name]["query"]["query"]
        (metric, label) = re.findall(r"label_values\((baton:\w+).*, (\w+)\)", asked)[0]
        assert label in METRICS[metric][1] and VARIABLES[name]["datasource"] == source
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used - {"__rate_interval", "__all"} == set(VARIABLES)


def test_panels_have_ids_and_places_of_their_own() -> None:
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids) > 20 and all(type(number) is int and number > 0 for number in ids)
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    taken: dict[tuple[int, int], str] = {}
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24 and place["w"] > 0 and place["h"] > 0
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]


def test_prometheus_scrapes_the_path_and_port_of_a_server() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"localhost:{ServerConfig().port}"]}]
    sources = Path(__file__).parents[2] / "entrypoints" / "http" / "information_routes.py"
    access = re.findall(rf'{Route.__name__}\("{job["metrics_path"]}", self.metrics, GET, "(\w+)"', sources.read_text())
    assert access == ["open"], "it needs no key"
