"""Endpoints for orchestrators and Prometheus: `/healthz` (liveness), `/readyz` (readiness), `/metrics`.

They require no key; confidential details are only on the operations listener.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NotRequired, TypedDict

from litestar import Response, get, head
from litestar.handlers import HTTPRouteHandler

from moiety_platform.db.readiness import ReadinessCheck, StoreReadiness
from moiety_platform.metrics import CONTENT_TYPE, Metrics
from moiety_platform.openapi.described import JSON, Described, describes
from moiety_platform.routing.replicas import Replicas

TAGS = ["health"]
TEXT = CONTENT_TYPE.partition(";")[0]


class Health(TypedDict):
    """The process is alive."""

    status: Literal["ok"]


class Readiness(TypedDict):
    """Readiness, with the reasons why not; `reason` is `reasons` in one line."""

    status: Literal["ready", "not ready"]
    reason: NotRequired[str]
    reasons: NotRequired[list[str]]


def probe_routes(
    replicas: Replicas,
    store: StoreReadiness | None,
    objects: ReadinessCheck | None,
    *,
    with_reasons: bool,
    is_stopping: Callable[[], bool] = lambda: False,
) -> list[HTTPRouteHandler]:
    """Return the probes. Without `store` and `objects`, readiness depends on the engines alone.

    Reasons name engines and the stores.
    """

    readiness = describes(Described(answers={200: {JSON: Readiness}, 503: {JSON: Readiness}}))

    @get("/healthz", name="healthz", tags=TAGS)
    async def healthz() -> Health:
        """Report that the process is alive."""
        return {"status": "ok"}

    @get("/readyz", name="readyz", tags=TAGS, opt=readiness)
    async def readyz() -> Response[Readiness]:
        """Report whether the gateway can serve requests."""
        reasons = replicas.why_not_ready()
        if store is not None and (reason := await store.why_not_ready()):
            reasons = [f"store: {reason}", *reasons]
        elif objects is not None and (reason := await objects.why_not_ready()):
            reasons = [f"object store: {reason}", *reasons]
        if is_stopping():
            reasons = ["the gateway is stopping", *reasons]
        if not reasons:
            return Response(Readiness(status="ready"))
        if not with_reasons:
            return Response(Readiness(status="not ready"), status_code=503, headers={"Retry-After": "1"})
        fields: Readiness = {"status": "not ready", "reason": "; ".join(reasons), "reasons": reasons}
        return Response(fields, status_code=503, headers={"Retry-After": "1"})

    @head("/healthz", name="head_healthz", tags=TAGS)
    async def head_healthz() -> None:
        """Report that the process is alive."""

    @head("/readyz", name="head_readyz", tags=TAGS, opt=describes(Described(answers={200: {}, 503: {}})))
    async def head_readyz() -> Response[None]:
        """Report whether the gateway can serve requests."""
        if is_stopping() or replicas.why_not_ready():
            return Response(None, status_code=503, headers={"Retry-After": "1"})
        return Response(None)

    return [healthz, readyz, head_healthz, head_readyz]


def metrics_route(metrics: Metrics, store: StoreReadiness | None) -> HTTPRouteHandler:
    """Return the handler of `/metrics`, whose response contains ids of tenants."""

    @get("/metrics", name="metrics", tags=TAGS, opt=describes(Described(answers={200: {TEXT: {"type": "string"}}})))
    async def scrape() -> Response[bytes]:
        """Return metrics in Prometheus' text format."""
        if store is not None:
            await store.why_not_ready()  # so that the first scrape includes it
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE})

    return scrape
