"""What docs/metrics.md, the boards and the alert rules say of metrics, against the real `/metrics` of all processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "moiety"
ROW = re.compile(r"\| `(\w+)` \| (\w+) \| ([^|]+) \| ([^|]+) \| (.+) \|")
PROCESSES = {"gateway": "## The gateway", "engine": "## The engine", "trace store": "## The trace store"}
SECTIONS = PROCESSES | {"endpoint picker": "## The endpoint picker"}  # tests/endpoint_picker runs the last one
# what no request of a well-behaved test brings about, nor an engine without a model: the list alone knows their labels
RARE = {
    "moiety_failovers_total", "moiety_route_requests_total", "moiety_route_fallbacks_total",
    "moiety_shadow_requests_total", "moiety_guardrail_checks_total", "moiety_quote_ttft_ratio",
    "moiety_quote_duration_ratio", "moiety_quote_guarantees_total", "moiety_credit_nanodollars_total",
    "moiety_wake_ready", "moiety_wake_waiting_requests", "moiety_wake_demands", "moiety_wakes_total",
    "moiety_wake_rejected_requests_total", "moiety_wake_seconds",
    "moiety_serve_restarts_total", "moiety_serve_lost_output_bytes_total",
    "moiety_speculative_prefill_total", "moiety_spans_dropped_total",
    "moiety_retention_rows_total", "moiety_retention_failures_total",
    "moiety_engine_class_rejected_total", "moiety_engine_class_preempted_total",
    "moiety_core_class_rejected_total", "moiety_core_class_preempted_total",
    "moiety_expert_picks_total", "moiety_expert_balancedness", "moiety_expert_layer_balancedness",
    "moiety_expert_active", "moiety_expert_load_ratio", "moiety_spot_price_percent", "moiety_spot_idle_percent",
}  # fmt: skip
OF_TARGETS = {"instance"}  # the label that Prometheus itself gives to what it reads
GRAFANA = {"$__rate_interval": "5m", "$model": ".*", "$service_class": ".*", "$engine": ".*"}


def listed(process: str) -> dict[str, tuple[str, set[str], str]]:
    """The rows of docs/metrics.md for a process: name → (type, labels, meaning)."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = text.split(SECTIONS[process])[1].split("\n## ")[0]
    found = {}
    for name, kind, unit, labels, meaning in ROW.findall(section):
        assert unit, f"{name} has no unit"
        found[name] = (kind, set(re.findall(r"`(\w+)`", labels)), meaning)
    if process in ("engine", "endpoint picker"):  # what is the same of all processes is described once
        whole = listed("gateway")
        found |= {name: whole[name] for name in whole if name.startswith(("process_", "moiety_build"))}
    return found


@pytest.fixture(scope="module")
def used(running: Any) -> Any:
    """The serve after requests of several kinds."""
    assert running.chat(**{"Idempotency-Key": "one"}).status_code == 200
    assert running.chat(**{"Idempotency-Key": "one"}).status_code == 200  # replayed
    assert running.send_document().status_code == 200
    assert running.chat(key="mty_nobody.nothing").status_code == 401
    (tenant,) = running.admin("GET", "/tenants")["data"]
    limit = {"level": "tenant", "scope_id": tenant["id"], "kind": "requests_per_minute", "cap": 2}
    running.admin("PUT", "/quotas", limit)
    statuses = {running.chat().status_code for _ in range(8)}
    assert statuses >= {200, 429}
    return running


@pytest.mark.parametrize("process", list(PROCESSES))
def test_the_documented_metrics_are_those_exported(used: Any, process: str, until_told: Callable[..., Any]) -> None:
    wanted = listed(process)

    def lacking(found: dict[str, Any]) -> list[str]:
        return [
            name
            for name in wanted
            if name not in RARE and (name not in found or not wanted[name][1] <= found[name].labels)
        ]

    real = until_told(lambda: used.families(process), lacking)
    assert set(real) == set(wanted)
    for name, family in real.items():
        kind, labels, meaning = wanted[name]
        assert (family.type, family.meaning) == (kind, meaning), name
        if name not in RARE:
            assert family.labels == labels, name


@pytest.fixture
def until_told() -> Callable[..., Any]:
    """`until_told(read, lacking)`: what is read, once nothing is lacking in it, or after a minute."""

    def wait(read: Callable[[], Any], lacking: Callable[[Any], Any]) -> Any:
        end = time.monotonic() + 60
        while lacking(found := read()) and time.monotonic() < end:
            time.sleep(0.1)
        return found

    return wait


def test_otlp_metrics_equal_the_prometheus_page(used: Any, receiver: Any, until_told: Callable[..., Any]) -> None:
    wanted = set(listed("gateway"))
    wanted -= RARE  # without a sample there is nothing to send
    found = until_told(lambda: dict(receiver.metrics), lambda found: wanted - {told_name(name) for name in found})
    assert {told_name(name) for name in found} == wanted
    assert receiver.services == {"moiety-gateway"}
    ttft = found["gen_ai.server.time_to_first_token"]
    (point,) = ttft.histogram.data_points
    attributes = {one.key: one.value.string_value for one in point.attributes}
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "moiety",
        "gen_ai.request.model": "moiety-demo",
        "moiety.service_class": "standard",
    }
    assert (ttft.unit, point.count, sum(point.bucket_counts)) == ("s", *[point.count] * 2)
    assert point.count >= 3
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
    assert (point.explicit_bounds[0], point.explicit_bounds[-1]) == (0.001, 160)
    assert found["moiety_requests"].sum.is_monotonic


def told_name(name: str) -> str:
    """Return the name at /metrics of a metric that OTLP sends."""
    if name.startswith("gen_ai."):
        return name.replace(".", "_") + "_seconds"
    totals = {re.sub("_(total|info)$", "", one): one for one in listed("gateway")}
    return totals[name]


# ── boards and alerts ──


def known() -> dict[str, set[str]]:
    """Every metric of the gateway as a query may name it, with its labels."""
    names: dict[str, set[str]] = {}
    for name, (kind, labels, _) in listed("gateway").items():
        parts = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names |= {name + part: labels | OF_TARGETS | ({"le"} if part == "_bucket" else set()) for part in parts}
    return names


def nodes(expression: Any) -> Iterator[Any]:
    """An expression and all in it."""
    yield expression
    inner = [getattr(expression, name, None) for name in ("lhs", "rhs", "expr", "param", "vector_selector")]
    for one in [*inner, *(getattr(expression, "args", None) or ())]:
        if one is not None:
            yield from nodes(one)


def check(query: str, names: dict[str, set[str]]) -> int:
    """Check that every metric and label of a query exists; return the number of its metrics."""
    for variable, value in GRAFANA.items():
        query = query.replace(variable, value)
    num_metrics, labels, grouped = 0, set(), set()
    for node in nodes(promql.parse(query)):
        if isinstance(node, promql.VectorSelector):
            num_metrics += 1
            assert node.name in names, f"{node.name} of {query}"
            matched = {matcher.name for matcher in node.matchers.matchers}
            assert matched <= names[node.name], f"{node.name} has no {matched - names[node.name]}"
            labels |= names[node.name]
        modifier = getattr(node, "modifier", None)
        if isinstance(node, promql.AggregateExpr) and modifier is not None:
            grouped |= set(modifier.labels)
    assert grouped <= labels, f"{grouped - labels} are no labels of what is in {query}"
    return num_metrics


def boards() -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (CHART / "boards").glob("*.json")}


def rules() -> list[dict[str, Any]]:
    document = yaml.load((CHART / "alerts" / "alert_rules.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
    return [rule for group in document["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("script", ["boards", "alerts"])
def test_boards_and_alerts_are_what_their_scripts_write(script: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "helm" / f"write_{script}.py"), str(tmp_path)], check=True)
    written = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text(encoding="utf-8") for path in (CHART / script).iterdir()}
    assert written == kept, f"run: python helm/write_{script}.py"


def test_every_query_of_every_board_names_metrics_and_labels_that_there_are() -> None:
    names, found = known(), boards()
    assert set(found) == {"overview", "engines", "tenants"}
    for board in found.values():
        queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
        assert all(check(query, names) for query in queries)
        for variable in board["templating"]["list"][1:]:
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()
            assert label in names[metric]
        titles = [panel["title"] for panel in board["panels"]]
        assert len(titles) == len(set(titles)) >= 9
    quotes = [one for one in found["overview"]["panels"] if one["title"].startswith("Quotes")]
    assert {re.findall(r"moiety_quote_\w+", one["targets"][0]["expr"])[0] for one in quotes} == {
        "moiety_quote_ttft_ratio_bucket",
        "moiety_quote_duration_ratio_bucket",
        "moiety_quote_guarantees_total",
    }


def test_every_alert_names_metrics_and_labels_that_there_are_and_a_runbook() -> None:
    names = known() | {rule["record"]: {"service_class"} for rule in rules() if "record" in rule}
    runbooks = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8"), re.MULTILINE)
    alerts = [rule for rule in rules() if "alert" in rule]
    assert sorted(alert["alert"] for alert in alerts) == sorted(runbooks)
    for rule in rules():
        assert check(rule["expr"], names)
    for alert in alerts:
        file, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert (ROOT / file).is_file()
        assert anchor == alert["alert"].lower()
        assert alert["labels"]["severity"] in ("page", "ticket")


def test_a_query_of_something_that_is_not_there_is_found() -> None:
    names = known()
    for query in ("sum(moiety_nothing)", 'moiety_engine_up{model="x"}', "sum by (tenant) (moiety_engine_up)"):
        with pytest.raises(AssertionError):
            check(query, names)
    with pytest.raises(ValueError, match="parenthesis"):
        check("sum by (", names)
