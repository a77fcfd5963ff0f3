"""The number of metric series does not grow with tenants; a receiver of metrics that is silent or away affects no
request."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import insert

from moiety_platform.auth.keys import generate_key, hash_key
from moiety_platform.bench.closed_loop import run_closed_loop
from moiety_platform.db.session import Database
from moiety_platform.metric_scrape import render_metrics
from moiety_platform.metrics import OTHER, RANKED_EVERY_S, Metrics, TenantCollector
from moiety_platform.otlp_metrics import EXPORT_TIMEOUT_S, NOT_TAKEN, TAKEN, MetricSender, otlp_metric_exporter
from moiety_platform.tenants.models import ApiKey, Project, Tenant
from moiety_platform.usage.row import UsageRow

from .conftest import RunningGateway, Until, unanswering_port

PEPPER = b"a pepper that is long enough for tests"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}


async def make_tenants(database: Database, count: int) -> Any:
    """Create tenants with a project and a key each, in one statement a table; return the keys."""
    now, texts = datetime.now(UTC), [generate_key() for _ in range(count)]
    same = {"created_at": now}
    async with database.write() as session:
        for table, rows in (
            (Tenant, [same | {"id": f"ten_{n}", "name": f"tenant {n}", "service_class": "standard", "weight": 1.0,
                              "status": "active"} for n in range(count)]),
            (Project, [same | {"id": f"prj_{n}", "tenant_id": f"ten_{n}", "name": "one"} for n in range(count)]),
            (ApiKey, [same | {"id": text.key_id, "project_id": f"prj_{n}", "name": "one", "scopes": ["inference"],
                              "secret_hash": hash_key(text, PEPPER), "hint": "abcd"} for n, text in enumerate(texts)]),
        ):  # fmt: skip
            await session.execute(insert(table), rows)
    return [text.text for text in texts]


def asking(key: str) -> Any:
    """Return the bytes of a chat completion request."""
    body = json.dumps(CHAT).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: moiety\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nAuthorization: Bearer {key}\r\n\r\n"
    )
    return head.encode() + body


async def test_a_thousand_tenants_have_no_more_series_than_thirty(gateway: RunningGateway) -> None:
    keys, sizes = await make_tenants(gateway.database, 30), []
    await run_closed_loop(*gateway.address, map(asking, keys), connections=4)
    for later in (range(30, 31), range(31, 1000)):
        for number in later:
            gateway.metrics.observe(row(f"ten_{number}", 1), "chat", "tiny", 0.01)
        _, _, page = await gateway.request("GET", "/metrics")
        sizes.append(sum(not line.startswith(b"#") for line in page.splitlines()))
    assert sizes[0] == sizes[1] < 360
    families = text_string_to_metric_families(page.decode())
    (family,) = [one for one in families if one.name == "moiety_tenant_requests"]
    counts = {sample.labels["tenant"]: sample.value for sample in family.samples}
    assert (len(counts), sum(counts.values())) == (21, 1000)
    assert counts[OTHER] >= 970


def row(tenant_id: str, output_tokens: int, status: int = 200) -> UsageRow:
    return UsageRow("r", tenant_id, "p", "k", "/v1", "m", "standard", datetime.now(UTC), "stop", status, 1, 0, 0,
                    output_tokens, None, None, 1.0)  # fmt: skip


def told(collector: Any, name: str = "moiety_tenant_tokens") -> Any:
    (family,) = [one for one in collector.collect() if one.name == name]
    return {one.labels["tenant"]: one.value for one in family.samples if one.labels.get("kind", "output") == "output"}


def test_the_busiest_of_late_have_series_of_their_own_and_nothing_is_lost() -> None:
    now_s = [0.0]
    collector = TenantCollector(2, lambda: now_s[0])
    for tenant_id, tokens in (("ten_a", 5), ("ten_b", 10), ("ten_c", 100), ("ten_d", 3)):
        collector.observe(row(tenant_id, tokens))
    assert told(collector) == {"ten_a": 5, "ten_b": 10, OTHER: 103}  # who came first
    now_s[0] += RANKED_EVERY_S
    for tenant_id, tokens in (("ten_c", 100), ("ten_d", 90), ("ten_e", 80), ("ten_b", 70), ("ten_a", 1)):
        collector.observe(row(tenant_id, tokens))
    assert told(collector) == {"ten_b": 80, "ten_c": 0, OTHER: 5 + 1 + 103 + 100 + 90 + 80}
    now_s[0] += RANKED_EVERY_S
    assert set(told(collector)) == {"ten_b", "ten_c", OTHER}  # no other tenant needs their slots


def test_refusals_are_counted_by_tenant_and_none_at_all_has_a_place_if_so_wished() -> None:
    collector = TenantCollector(0)
    collector.observe(row("ten_a", 0, status=429))
    assert told(collector, "moiety_tenant_refused") == {OTHER: 1}


@pytest.mark.parametrize("receiver", ["away", "silent"])
async def test_a_receiver_of_metrics_that_is_away_or_silent_slows_no_request(
    gateway: RunningGateway, receiver: str, until: Until
) -> None:
    with unanswering_port(is_listening=receiver == "silent") as port:
        exporter = otlp_metric_exporter(f"http://127.0.0.1:{port}/v1/metrics")
        sender = MetricSender(gateway.metrics.registry, exporter, "g", interval_s=0.01)
        tally = await run_closed_loop(*gateway.address, itertools.repeat(asking(gateway.key), 40), connections=4)
        assert (len(tally.latencies_s), sender.counts[TAKEN]) == (40, 0)
        assert max(tally.latencies_s) < EXPORT_TIMEOUT_S
        began_s = time.monotonic()
        await asyncio.to_thread(sender.close, 0.1)
        assert time.monotonic() - began_s < EXPORT_TIMEOUT_S
        if receiver == "away":
            await until(lambda: sender.counts[NOT_TAKEN] > 0)
            _, _, page = await gateway.request("GET", "/metrics")
            assert b'moiety_metric_exports_total{outcome="not_taken"}' in page


def types(text: bytes) -> list[str]:
    return [line for line in text.decode().splitlines() if line.startswith("# TYPE")]


async def test_a_scrape_of_many_engines_gives_way_to_requests() -> None:
    """Each family takes 5 ms, so that a scrape of ten would stop requests for 50 ms."""
    source = Metrics()

    def families() -> Iterator[Metric]:
        for number in range(10):
            time.sleep(0.005)
            yield GaugeMetricFamily(f"family_{number}", "One of many.", number)

    source.watch(families)
    rendering = asyncio.create_task(render_metrics(source.registry))
    turns = 0
    while not rendering.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 10
    assert rendering.result().count(b"family_9 9.0\n") == 1
    assert types(rendering.result()) == types(generate_latest(source.registry))
