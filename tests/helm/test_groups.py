"""A pool over two nodes: a LeaderWorkerSet's pods meet, are one engine, and answer."""

from __future__ import annotations

import httpx
import pytest

from .running import NEEDS_ROOT, running

VALUES = """
networkPolicies: {enabled: true}
gateway: {replicas: 1, deregisterSeconds: 1, drainSeconds: 5}
dashboard: {enabled: false}
traces: {enabled: false}
engines: [{name: demo, nodes: 2, drainSeconds: 5, options: {tp: 2, dtype: float32, threads: 1}}]
declared:
  tenants: [{name: acme, projects: [{name: web, keys: [{name: ci, keySecret: acme-ci}]}]}]
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420), NEEDS_ROOT]


@pytest.mark.thorough
def test_two_pods_are_one_engine_that_answers(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running(tmp_path_factory.mktemp("group"), VALUES) as release:
        ranks = [one for one in release.pods() if one["part"] == "engine-demo"]
        assert [one["pod"] for one in ranks] == ["rel-moiety-engine-demo-0", "rel-moiety-engine-demo-0-1"]
        assert len({one["address"] for one in ranks}) == len(ranks)
        as_tenant = {"Authorization": f"Bearer {release.secret('acme-ci', 'key')}"}
        with httpx.Client(base_url=release.url, headers=as_tenant, timeout=120, trust_env=False) as client:
            (model,) = client.get("/v1/models").json()["data"]
            body = {"model": model["id"], "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
            answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == httpx.codes.OK, answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0
