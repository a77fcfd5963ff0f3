"""What orchestrators and Prometheus ask: `/healthz` (the process), `/readyz` (can it serve), `/metrics`."""

from __future__ import annotations

from litestar import Response, get, head
from litestar.handlers import HTTPRouteHandler

from moiety_platform.db.readiness import StoreReadiness
from moiety_platform.metrics import CONTENT_TYPE, Metrics
from moiety_platform.routing.replicas import Replicas


def health_routes(replicas: Replicas, metrics: Metrics, store: StoreReadiness | None) -> list[HTTPRouteHandler]:
    """The handlers; none of them needs a key. Without `store`, readiness is that of the engines alone."""

    @get("/healthz", name="healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @get("/readyz", name="readyz")
    async def readyz() -> Response[dict[str, object]]:
        reasons = replicas.why_not_ready()
        if store is not None and (reason := await store.why_not_ready()):
            reasons = [f"store: {reason}", *reasons]
        if not reasons:
            return Response({"status": "ready"})
        fields: dict[str, object] = {"status": "not ready", "reason": "; ".join(reasons), "reasons": reasons}
        return Response(fields, status_code=503, headers={"Retry-After": "1"})

    @head("/healthz", name="head_healthz")
    async def head_healthz() -> None:
        return None

    @head("/readyz", name="head_readyz")
    async def head_readyz() -> Response[None]:
        if replicas.why_not_ready():
            return Response(None, status_code=503, headers={"Retry-After": "1"})
        return Response(None)

    @get("/metrics", name="metrics")
    async def scrape() -> Response[bytes]:
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE})

    return [healthz, readyz, head_healthz, head_readyz, scrape]
