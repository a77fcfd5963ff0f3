"""The endpoint picker's process: gRPC servers, probes and the watch of Pods, until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio
import structlog

from moiety_platform.cluster.pod_identity import PodIdentity
from moiety_platform.endpoint_picker.certificates import ServedCertificate
from moiety_platform.endpoint_picker.members import EndpointAddress, PoolMembers
from moiety_platform.endpoint_picker.messages import (
    HEALTH_METHOD,
    NOT_SERVING,
    PROCESS_METHOD,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from moiety_platform.endpoint_picker.metrics import PickerMetrics, serving_metrics
from moiety_platform.endpoint_picker.pods import PodWatch
from moiety_platform.endpoint_picker.probes import MemberProber
from moiety_platform.endpoint_picker.processing import process_stream
from moiety_platform.listening import AddressUnavailable

LIVENESS = "liveness"
SERVICES = ("", "readiness", PROCESS_METHOD[0])  # names of health checks that report readiness
GRACE_S = 5.0  # for open streams after a signal; a stream is as long as its request if the proxy sends bodies
OPTIONS = (("grpc.so_reuseport", 0),)  # a second process on the port is an error

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PodPool:
    """Members that are Pods with these labels, in the namespace of this identity."""

    identity: PodIdentity
    labels: Mapping[str, str]
    port: int
    operations_port: int


@dataclass(frozen=True, slots=True)
class PickerTerms:
    """Parameters of a picker. `members` are fixed endpoints, or Pods."""

    members: Sequence[EndpointAddress] | PodPool
    host: str
    port: int
    health_port: int
    metrics_port: int
    certificate: ServedCertificate | None  # None: without TLS
    probe_interval_s: float
    num_endpoints: int
    load_factor: float


def run_endpoint_picker(terms: PickerTerms) -> None:
    """Serve until SIGINT or SIGTERM. Raises AddressUnavailable or NotInACluster."""
    asyncio.run(_serve(terms))


async def _serve(terms: PickerTerms) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    endpoints = PoolMembers(terms.num_endpoints, terms.load_factor)
    metrics = PickerMetrics(endpoints)
    prober = MemberProber(endpoints, metrics, terms.probe_interval_s)

    def is_serving() -> bool:
        return endpoints.is_settled() and not stopping.is_set()

    async with contextlib.AsyncExitStack() as stack:
        metrics_port = stack.enter_context(serving_metrics(metrics.registry, terms.host, terms.metrics_port))
        await stack.enter_async_context(prober.running())
        await stack.enter_async_context(_following_members(terms.members, endpoints, prober))
        servers = [_server(endpoints, metrics, is_serving), grpc.aio.server(options=OPTIONS)]
        servers[1].add_generic_rpc_handlers((_health_handler(is_serving),))
        port = _listen(servers[0], terms.host, terms.port, "--port", terms.certificate)
        health_port = _listen(servers[1], terms.host, terms.health_port, "--health-port", None)
        for server in servers:
            await server.start()
        log.info(
            "endpoint_picker_listening",
            host=terms.host,
            port=port,
            health_port=health_port,
            metrics_port=metrics_port,
            tls=terms.certificate is not None,
        )
        await stopping.wait()
        await asyncio.gather(*(server.stop(GRACE_S) for server in servers))
    log.info("endpoint_picker_stopped")


@contextlib.asynccontextmanager
async def _following_members(
    members: Sequence[EndpointAddress] | PodPool, endpoints: PoolMembers, prober: MemberProber
) -> AsyncIterator[None]:
    """Give the endpoints their members, and follow the changes until the block ends."""
    if not isinstance(members, PodPool):
        endpoints.replace_members(members)
        prober.follow_members()
        yield
        return
    pool, loop = members, asyncio.get_running_loop()

    def replace(ips: frozenset[str]) -> None:
        endpoints.replace_members(EndpointAddress.of_ip(ip, pool.port, pool.operations_port) for ip in sorted(ips))
        prober.follow_members()

    def on_change(ips: frozenset[str]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(replace, ips)

    watch = PodWatch(pool.identity, pool.labels, on_change)
    watch.start()
    try:
        yield
    finally:
        watch.close()


def _server(endpoints: PoolMembers, metrics: PickerMetrics, is_serving: Any) -> grpc.aio.Server:
    async def process(requests: AsyncIterator[Any], _context: Any) -> AsyncIterator[Any]:
        stream = process_stream(endpoints, requests, metrics)
        async with contextlib.aclosing(stream) as answers:  # type: ignore[type-var]
            async for answer in answers:
                yield answer

    service, method = PROCESS_METHOD
    handler = grpc.stream_stream_rpc_method_handler(
        process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
    )
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}), _health_handler(is_serving))
    )
    return server


def _health_handler(is_serving: Any) -> Any:
    service, method = HEALTH_METHOD
    check = partial(_check_health, is_serving)
    handler = grpc.unary_unary_rpc_method_handler(
        check, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler(service, {method: handler})


async def _check_health(is_serving: Any, request: Any, context: Any) -> Any:
    if request.service == LIVENESS:
        return HealthCheckResponse(status=SERVING)
    if request.service not in SERVICES:
        await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service; known are {', '.join((LIVENESS, *SERVICES))}")
    return HealthCheckResponse(status=SERVING if is_serving() else NOT_SERVING)


def _listen(server: grpc.aio.Server, host: str, port: int, option: str, certificate: ServedCertificate | None) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if certificate is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, _credentials(certificate)))
    except RuntimeError as exc:
        raise AddressUnavailable(f"cannot listen on {address}; choose another {option}") from exc


def _credentials(certificate: ServedCertificate) -> grpc.ServerCredentials:
    """Return credentials that use a renewed certificate from the next handshake on."""

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        pair = certificate.renewed()
        return None if pair is None else grpc.ssl_server_certificate_configuration([pair])

    return grpc.dynamic_ssl_server_credentials(
        grpc.ssl_server_certificate_configuration([certificate.pair]), renewed, require_client_authentication=False
    )
