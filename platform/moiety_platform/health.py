"""What orchestrators and Prometheus ask: `/healthz` (the process), `/readyz` (can it serve), `/metrics`. None needs a
key; what tells more than a stranger may know is on the operations listener."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NotRequired, TypedDict

from litestar import Response, get, head
from litestar.handlers import HTTPRouteHandler

from moiety_platform.db.readiness import StoreReadiness
from moiety_platform.metrics import CONTENT_TYPE, Metrics
from moiety_platform.openapi.described import JSON, Described, describes
from moiety_platform.routing.replicas import Replicas

TAGS = ["health"]
TEXT = CONTENT_TYPE.partition(";")[0]


class Health(TypedDict):
    """The process is there."""

    status: Literal["ok"]


class Readiness(TypedDict):
    """Whether requests can be served, and why not; `reason` is `reasons` in one line."""

    status: Literal["ready", "not ready"]
    reason: NotRequired[str]
    reasons: NotRequired[list[str]]


def probe_routes(
    replicas: Replicas,
    store: StoreReadiness | None,
    *,
    with_reasons: bool,
    is_stopping: Callable[[], bool] = lambda: False,
) -> list[HTTPRouteHandler]:
    """The probes. Without `store`, readiness is that of the engines alone. Reasons name engines and the store."""

    readiness = describes(Described(answers={200: {JSON: Readiness}, 503: {JSON: Readiness}}))

    @get("/healthz", name="healthz", tags=TAGS)
    async def healthz() -> Health:
        """Whether the process is there."""
        return {"status": "ok"}

    @get("/readyz", name="readyz", tags=TAGS, opt=readiness)
    async def readyz() -> Response[Readiness]:
        """Whether the gateway can serve requests."""
        reasons = replicas.why_not_ready()
        if store is not None and (reason := await store.why_not_ready()):
            reasons = [f"store: {reason}", *reasons]
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
        """Whether the process is there."""

    @head("/readyz", name="head_readyz", tags=TAGS, opt=describes(Described(answers={200: {}, 503: {}})))
    async def head_readyz() -> Response[None]:
        """Whether the gateway can serve requests."""
        if is_stopping() or replicas.why_not_ready():
            return Response(None, status_code=503, headers={"Retry-After": "1"})
        return Response(None)

    return [healthz, readyz, head_healthz, head_readyz]


def metrics_route(metrics: Metrics, store: StoreReadiness | None) -> HTTPRouteHandler:
    """The handler of `/metrics`, which tells ids of tenants."""

    @get("/metrics", name="metrics", tags=TAGS, opt=describes(Described(answers={200: {TEXT: {"type": "string"}}})))
    async def scrape() -> Response[bytes]:
        """Metrics in Prometheus' form."""
        if store is not None:
            await store.why_not_ready()  # so that the first scrape tells it
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE})

    return scrape
