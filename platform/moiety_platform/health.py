"""What orchestrators and Prometheus ask: `/healthz` (the process), `/readyz` (can it serve), `/metrics`."""

from __future__ import annotations

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler

from moiety_platform.metrics import CONTENT_TYPE, Metrics
from moiety_platform.routing.replicas import Replicas


def health_routes(replicas: Replicas, metrics: Metrics) -> list[HTTPRouteHandler]:
    """The handlers; none of them needs a key."""

    @get("/healthz", name="healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @get("/readyz", name="readyz")
    async def readyz() -> Response[dict[str, object]]:
        reasons = replicas.why_not_ready()
        if not reasons:
            return Response({"status": "ready"})
        fields: dict[str, object] = {"status": "not ready", "reason": "; ".join(reasons), "reasons": reasons}
        return Response(fields, status_code=503, headers={"Retry-After": "1"})

    @get("/metrics", name="metrics")
    async def scrape() -> Response[bytes]:
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE})

    return [healthz, readyz, scrape]
