"""Checks of HTTP services: the gateway, its admin API, the OIDC issuer, the trace store, the dashboard."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from moiety_platform.auth.issuer_documents import OtherIssuer
from moiety_platform.auth.jwt_verification import FETCH_ERRORS
from moiety_platform.auth.oidc import read_keys
from moiety_platform.cli.doctor.finding import Finding, fail, ok
from moiety_platform.settings import GatewaySettings

GATEWAY, LOGIN, TRACES, DASHBOARD = "gateway", "login", "traces", "dashboard"
TIMEOUT_S = 5.0
MAX_SKEW_S = 5.0  # a Date header has whole seconds


def check_gateway(url: str, admin_key: str | None, now: datetime) -> Iterator[Finding]:
    """Check that the gateway is alive and ready, and accepts the admin key."""
    try:
        health = httpx.get(f"{url}/healthz", timeout=TIMEOUT_S)
        ready = httpx.get(f"{url}/readyz", timeout=TIMEOUT_S)
        is_ours = health.status_code == httpx.codes.OK and health.json() == {"status": "ok"}
    except (ValueError, httpx.RemoteProtocolError, httpx.ReadError):
        is_ours = False
    except httpx.HTTPError as exc:
        advice = "start `moiety gateway` or `moiety serve`, or give its address as --url"
        yield fail(GATEWAY, "gateway_away", f"{url} does not answer ({type(exc).__name__})", advice)
        return
    if not is_ours:
        advice = (
            "give the gateway's address as --url; if it should be there, stop what has its port (ss -ltnp names it)"
        )
        yield fail(GATEWAY, "not_a_gateway", f"another server, not a gateway, listens at {url}", advice)
        return
    yield from _check_clock(health, now)
    if ready.status_code == httpx.codes.OK:
        yield ok(GATEWAY, "gateway", f"{url} is ready")
    else:
        advice = (
            "see the checks of the database and of the engines; a gateway is ready when the database and an "
            "engine are ready"
        )
        reason = ready.json().get("reason", ready.text)
        yield fail(GATEWAY, "not_ready", f"{url} is not ready: {reason}", advice)
    if admin_key is not None:
        yield _check_key(url, admin_key)


def _check_clock(answer: httpx.Response, now: datetime) -> Iterator[Finding]:
    if (told := answer.headers.get("date")) is not None:
        skew_s = (now - parsedate_to_datetime(told).astimezone(UTC)).total_seconds()
        if abs(skew_s) > MAX_SKEW_S:
            advice = "configure the same time servers on both machines (chrony or systemd-timesyncd)"
            yield fail(GATEWAY, "clock_skew", f"the gateway's clock differs by {skew_s:.0f} s", advice)


def _check_key(url: str, admin_key: str) -> Finding:
    headers = {"Authorization": f"Bearer {admin_key}"}
    answer = httpx.get(f"{url}/admin/v1/caller", headers=headers, timeout=TIMEOUT_S)
    if answer.status_code == httpx.codes.OK:
        return ok(GATEWAY, "admin_key", f"the administrator's key is of a role {answer.json().get('role')}")
    advice = "set a valid key with --admin-key or MOIETY_ADMIN_KEY, or ask an owner to create one: moiety key create"
    try:
        reason = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        reason = str(answer.status_code)
    return fail(GATEWAY, "admin_key_refused", f"the gateway refuses the administrator's key: {reason}", advice)


async def check_issuer(settings: GatewaySettings) -> AsyncIterator[Finding]:
    """Check that the OIDC issuer's keys can be read, as a gateway reads them."""
    issuer = settings.oidc_issuer
    if issuer is None:
        yield ok(
            LOGIN,
            "issuer",
            "no token issuer is configured here or at the running gateway; administrators sign in with keys",
        )
        return
    try:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as http:
            keys = await read_keys(http, issuer)
    except OtherIssuer as exc:
        advice = "set oidc_issuer to exactly that, with or without its last slash"
        yield fail(LOGIN, "issuer_other", f"{issuer}: {exc}", advice)
    except FETCH_ERRORS as exc:
        yield _unreadable(issuer, exc)
    else:
        if keys:
            yield ok(LOGIN, "issuer", f"{issuer} publishes {len(keys)} keys")
        else:
            advice = "configure it to sign with RS256, PS256, ES256 or EdDSA, and to publish those keys"
            yield fail(LOGIN, "issuer_keys", f"{issuer} publishes no key that can verify tokens", advice)


def _unreadable(issuer: str, failure: Exception) -> Finding:
    text = str(failure) or type(failure).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text:
        advice = (
            "renew the certificate; if a private certificate authority issued it, set SSL_CERT_FILE of the "
            "gateways to the authority's file"
        )
        return fail(LOGIN, "issuer_certificate", f"{issuer}: {text}", advice)
    advice = (
        "start the issuer, correct oidc_issuer, or allow gateways to connect to it: known keys remain valid for "
        "a while, new keys are not accepted"
    )
    return fail(LOGIN, "issuer_away", f"{issuer} does not return its keys: {text}", advice)


def check_traces(settings: GatewaySettings, running: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that the trace store accepts an empty request with the gateways' token.

    `running` are settings of the running gateway. Its trace store is asked for its readiness, since its token is
    unknown here.
    """
    if settings.traces_endpoint is None or settings.traces_token is None:
        if "traces_endpoint" in running:
            yield _check_running_traces(str(running["traces_endpoint"]))
        else:
            yield ok(TRACES, "traces", "no trace store is configured here, and no running gateway names one")
        return
    headers = {
        "Authorization": f"Bearer {settings.traces_token.get_secret_value()}",
        "Content-Type": "application/x-protobuf",
    }
    url = f"{settings.traces_endpoint.rstrip('/')}/v1/traces"
    try:
        answer = httpx.post(url, headers=headers, content=b"", timeout=TIMEOUT_S)
    except httpx.HTTPError as exc:
        advice = "start `moiety traces`, or correct traces_endpoint; requests are served without it, but not traced"
        yield fail(TRACES, "traces_away", f"{url} does not answer ({type(exc).__name__})", advice)
        return
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        advice = "set MOIETY_TRACES_TOKEN to the same value for gateways and trace store"
        yield fail(TRACES, "traces_token", "the trace store refuses the gateways' token", advice)
    elif answer.is_error:
        advice = "correct traces_endpoint: it ends in /otlp at a `moiety traces`, whose /readyz says what it lacks"
        yield fail(TRACES, "traces_refuse", f"{url} answers {answer.status_code}", advice)
    else:
        yield ok(TRACES, "traces", f"{settings.traces_endpoint} takes spans")


def _check_running_traces(endpoint: str) -> Finding:
    url = f"{endpoint.rstrip('/').removesuffix('/otlp')}/readyz"
    told = f"the running gateway sends traces to {endpoint}"
    advice = "see the log of the trace store (`moiety serve`: logs/traces.log in the data directory)"
    try:
        answer = httpx.get(url, timeout=TIMEOUT_S)
    except httpx.HTTPError as exc:
        return fail(TRACES, "traces_away", f"{told}, which does not answer ({type(exc).__name__})", advice)
    if answer.is_error:
        return fail(TRACES, "traces_refuse", f"{told}, which is not ready ({answer.status_code})", advice)
    return ok(TRACES, "traces", f"{told}, which is ready")


def check_dashboard(url: str | None) -> Iterator[Finding]:
    if url is None:
        return
    try:
        healthy = httpx.get(f"{url}/_stcore/health", timeout=TIMEOUT_S).is_success
    except httpx.HTTPError:
        healthy = False
    if healthy:
        yield ok(DASHBOARD, "dashboard", f"{url} is there")
    else:
        advice = "start `moiety dashboard --gateway …`, or correct --dashboard"
        yield fail(DASHBOARD, "dashboard_away", f"{url} does not answer as a dashboard", advice)
