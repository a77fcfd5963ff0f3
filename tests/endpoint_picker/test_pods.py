"""Members of the pool are the running Pods with its labels, read from a fake of the Kubernetes API."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import grpc
import pytest
from tests.conftest import free_port, wait_for

from moiety_platform.cluster.pod_identity import PodIdentity
from moiety_platform.endpoint_picker.pods import PodWatch
from moiety_podrun.fake_secrets_api import FakeSecretsApi

from .envoy_proxy import DESTINATION
from .picker_process import FakeGateway, exchange, request_headers, response_headers, running_picker

LABELS = {"app": "moiety"}
WATCH_S = 2.0


@dataclass
class FakePodsApi(FakeSecretsApi):
    """Server on loopback with Pods by name."""

    pods_by_name: dict[str, dict[str, Any]] = field(default_factory=dict)
    queries: list[dict[str, list[str]]] = field(default_factory=list)
    watches_hang: bool = False

    def __post_init__(self) -> None:
        self._version = 1
        self._changed = threading.Condition()

    def put(self, name: str, ip: str, phase: str = "Running", **metadata: Any) -> None:
        with self._changed:
            self._version += 1
            metadata |= {"name": name, "resourceVersion": str(self._version), "labels": LABELS}
            status = {"phase": phase, **({"podIP": ip} if ip else {})}
            self.pods_by_name[name] = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status}
            self._changed.notify_all()

    def remove(self, name: str) -> None:
        with self._changed:
            self._version += 1
            del self.pods_by_name[name]
            self._changed.notify_all()

    def answer(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        place, _, query = path.partition("?")
        if (method, place) != ("GET", f"/api/v1/namespaces/{self.namespace}/pods"):
            return super().answer(method, path, body)
        terms = parse_qs(query)
        with self._changed:
            self.queries.append(terms)
            if terms.get("watch") == ["true"]:
                since = self._version
                self._changed.wait_for(lambda: self._version > since and not self.watches_hang, WATCH_S)
                metadata = {"name": "any", "resourceVersion": str(self._version)}
                return 200, {"type": "MODIFIED", "object": {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}}
            metadata, items = {"resourceVersion": str(self._version)}, list(self.pods_by_name.values())
            return 200, {"apiVersion": "v1", "kind": "PodList", "metadata": metadata, "items": items}


@pytest.fixture
def api(tmp_path: Path) -> Iterator[FakePodsApi]:
    with FakePodsApi(tmp_path / "account") as running:
        yield running


def test_only_running_pods_that_are_not_deleted_are_members(api: FakePodsApi) -> None:
    told: list[frozenset[str]] = []
    api.put("a", "10.0.0.1")
    api.put("b", "10.0.0.2", phase="Pending")
    api.put("c", "10.0.0.3", deletionTimestamp="2026-01-01T00:00:00Z")
    api.put("d", "")
    watch = PodWatch(PodIdentity.of(api.environment, api.folder), LABELS, told.append)
    watch.start()
    try:
        wait_for(lambda: told[-1:] == [{"10.0.0.1"}], "the first list")
        api.put("b", "10.0.0.2")
        wait_for(lambda: told[-1] == {"10.0.0.1", "10.0.0.2"}, "the started pod")
        api.put("a", "10.0.0.1", deletionTimestamp="2026-01-01T00:00:00Z")
        wait_for(lambda: told[-1] == {"10.0.0.2"}, "the pod that drains to leave")
        api.remove("b")
        wait_for(lambda: told[-1] == frozenset(), "the deleted pod to leave")
    finally:
        watch.close()
    assert all(one["labelSelector"] == ["app=moiety"] for one in api.queries)


def test_members_are_read_again_although_the_watch_says_nothing(api: FakePodsApi) -> None:
    told: list[frozenset[str]] = []
    api.watches_hang = True
    watch = PodWatch(PodIdentity.of(api.environment, api.folder), LABELS, told.append, resync_s=0.05)
    watch.start()
    try:
        wait_for(lambda: told, "the first list")
        api.put("a", "10.0.0.1")
        assert wait_for(lambda: told[-1] == {"10.0.0.1"}, "the new pod")
    finally:
        watch.close()


def test_requests_follow_the_pods(api: FakePodsApi, tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    hosts = ("127.0.0.1", "127.0.0.2")
    options = ["--selector=app=moiety", f"--target-port={port}", f"--account={api.folder}"]
    with (
        FakeGateway(host=hosts[0], port=port) as first,
        FakeGateway(host=hosts[1], port=port) as second,
        running_picker(tmp_path, *options, environment=api.environment) as picker,
    ):
        picker.wait_until_ready()
        with grpc.insecure_channel(f"127.0.0.1:{picker.port}") as channel:

            def chosen() -> set[str]:
                """Return the destinations of requests with many keys, and the statuses of refusals."""
                answers = [exchange(channel, [request_headers(f"key-{one}"), response_headers()]) for one in range(16)]
                return {
                    one.dynamic_metadata["envoy.lb"][DESTINATION]
                    if one.HasField("dynamic_metadata")
                    else json.loads(one.immediate_response.body)["error"]["code"]
                    for one, *_ in answers
                }

            assert chosen() == {"unavailable"}
            api.put("a", hosts[0])
            wait_for(lambda: chosen() == {first.address}, "the first pod")
            api.put("b", hosts[1])
            wait_for(lambda: chosen() == {first.address, second.address}, "both pods")
            api.put("a", hosts[0], deletionTimestamp="2026-01-01T00:00:00Z")
            wait_for(lambda: chosen() == {second.address}, "the pod that drains to get no more requests")
