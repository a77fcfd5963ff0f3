"""Endpoints for orchestrators and Prometheus: `/healthz` (liveness), `/readyz` (readiness), `/metrics`.

Clients of other servers ask `/health` and `/ping` for readiness.

They require no key; confidential details are only on the operations listener.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NotRequired, TypedDict

from litestar import Controller, Response, get, post
from litestar.di import NamedDependency
from litestar.params import SkipValidation

from moiety_platform.db.readiness import ReadinessCheck, StoreReadiness
from moiety_platform.machine_limits import MachineLimits
from moiety_platform.metric_scrape import render_metrics
from moiety_platform.metrics import CONTENT_TYPE, Metrics
from moiety_platform.openapi.described import JSON, Described, describes
from moiety_platform.routing.replicas import Replicas

RETRY_SOON = {"Retry-After": "1"}
TEXT = CONTENT_TYPE.partition(";")[0]


class Health(TypedDict):
    """The process is alive."""

    status: Literal["ok"]


class Readiness(TypedDict):
    """Readiness, with the reasons why not; `reason` is `reasons` in one line.

    `warnings` are faults with which the gateway still serves, such as a full disk. `open_requests` is the number of
    requests that have not ended.
    """

    status: Literal["ready", "not ready"]
    reason: NotRequired[str]
    reasons: NotRequired[list[str]]
    warnings: NotRequired[list[str]]
    open_requests: NotRequired[int]


@dataclass(frozen=True, slots=True)
class Probes:
    """State that the probes report. Without `store` and `objects`, readiness depends on the engines alone.

    Reasons name engines and the stores, and the number of open requests tells the load of all tenants, so that
    `with_reasons` is for listeners of operators.
    """

    replicas: Replicas
    store: StoreReadiness | None
    objects: ReadinessCheck | None
    with_reasons: bool
    is_stopping: Callable[[], bool] = lambda: False
    machine: MachineLimits | None = None
    num_open_requests: Callable[[], int] | None = None

    async def why_not_ready(self) -> list[str]:
        """Return the reasons why the gateway cannot serve requests; empty if it can."""
        reasons = self.replicas.why_not_ready()
        if self.store is not None and (reason := await self.store.why_not_ready()):
            reasons = [f"store: {reason}", *reasons]
        elif self.objects is not None and (reason := await self.objects.why_not_ready()):
            reasons = [f"object store: {reason}", *reasons]
        return ["the gateway is stopping", *reasons] if self.is_stopping() else reasons

    def warnings(self) -> list[str]:
        """Return faults of the machine with which the gateway still serves."""
        return [] if self.machine is None else self.machine.warnings()


_READINESS = describes(Described(answers={200: {JSON: Readiness}, 503: {JSON: Readiness}}))
_BARE_READINESS = describes(Described(answers={200: {}, 503: {}}))


class ProbeController(Controller):
    """Routes of the probes."""

    tags = ("health",)

    @get("/healthz")
    async def healthz(self) -> Health:
        """Report that the process is alive."""
        return {"status": "ok"}

    @get("/readyz", opt=_READINESS)
    async def readyz(self, probes: NamedDependency[SkipValidation[Probes]]) -> Response[Readiness]:
        """Report whether the gateway can serve requests."""
        reasons = await probes.why_not_ready()
        fields = Readiness(status="not ready" if reasons else "ready")
        if probes.with_reasons:
            if reasons:
                fields |= {"reason": "; ".join(reasons), "reasons": reasons}
            if warnings := probes.warnings():
                fields["warnings"] = warnings
            if probes.num_open_requests is not None:
                fields["open_requests"] = probes.num_open_requests()
        if not reasons:
            return Response(fields)
        return Response(fields, status_code=503, headers=RETRY_SOON)

    @get("/health", opt=_BARE_READINESS)
    async def health(self, probes: NamedDependency[SkipValidation[Probes]]) -> Response[bytes]:
        """Report whether the gateway can serve requests, by the status alone, as vLLM does."""
        return _bare(await probes.why_not_ready())

    @get("/ping", opt=_BARE_READINESS)
    async def ping(self, probes: NamedDependency[SkipValidation[Probes]]) -> Response[bytes]:
        """Report whether the gateway can serve requests, by the status alone, as Amazon SageMaker asks."""
        return _bare(await probes.why_not_ready())

    @post("/ping", status_code=200, opt=_BARE_READINESS)
    async def post_ping(self, probes: NamedDependency[SkipValidation[Probes]]) -> Response[bytes]:
        """Report whether the gateway can serve requests, by the status alone."""
        return _bare(await probes.why_not_ready())


def _bare(reasons: list[str]) -> Response[bytes]:
    """Return a response without a body."""
    return Response(b"", status_code=503, headers=RETRY_SOON) if reasons else Response(b"")


class MetricsController(Controller):
    """Route of the metrics, which contain ids of tenants."""

    tags = ("health",)

    @get("/metrics", opt=describes(Described(answers={200: {TEXT: {"type": "string"}}})))
    async def metrics(
        self, source: NamedDependency[Metrics], store: NamedDependency[StoreReadiness | None]
    ) -> Response[bytes]:
        """Return metrics in Prometheus' text format."""
        if store is not None:
            await store.why_not_ready()  # so that the first scrape includes it
        return Response(await render_metrics(source.registry), headers={"content-type": CONTENT_TYPE})
