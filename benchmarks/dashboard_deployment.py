"""Objects that operators set up beside tenants, keys and requests, so that every page of the dashboard has rows."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric import ec

from moiety_platform.db.session import Database
from moiety_platform.spot.models import SpotPriceRecord
from moiety_platform.usage.row import UsageRow

AUDIENCE = "moiety"
MODEL = "moiety-demo"
DEVELOPER = "grace"
TEAMS = ("search", "support", "ads", "internal")
LONG_NAME = "Gesellschaft für angewandte Sprachmodelle und Datenverarbeitung mbH"
CONFIG = """[gateway]
oidc_issuer = "{issuer}"
oidc_audience = "{audience}"
alert_disk_free_percent = 90
simulation_niceness = 0
"""


class TokenIssuer:
    """An OpenID Connect issuer on the loopback, for users who sign in."""

    def __init__(self, url: str, key: ec.EllipticCurvePrivateKey) -> None:
        self.url = url
        self._key = key

    def token_of(self, who: str) -> str:
        """Return a token of this user, valid for a day."""
        claims = {"iss": self.url, "aud": AUDIENCE, "sub": who, "email": f"{who}@example.com"}
        expiry = {"exp": int(time.time()) + 86_400}
        return jwt.encode(claims | expiry, self._key, "ES256", headers={"kid": "one"})


@contextmanager
def issuing() -> Iterator[TokenIssuer]:
    """Publish the key of an issuer meanwhile."""
    key = ec.generate_private_key(ec.SECP256R1())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            listed = {**jwt.algorithms.ECAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": "one", "alg": "ES256"}
            found = {"keys": [listed]} if self.path == "/keys" else {"issuer": url, "jwks_uri": f"{url}/keys"}
            body = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield TokenIssuer(url, key)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def invite(admin: Any, issuer: TokenIssuer, who: str, role: str, tenant_id: str | None) -> None:
    """Invite a user and accept the invitation."""
    user = admin("POST", "/users", {"email": f"{who}@example.com", "role": role, "tenant_id": tenant_id})
    code = admin("POST", f"/users/{user['id']}/invitation")["secret"]
    headers = {"Authorization": f"Bearer {issuer.token_of(who)}"}
    httpx.post(
        f"{admin.url}/admin/v1/invitations/accept", json={"invitation": code}, headers=headers, timeout=60
    ).raise_for_status()


def set_up(admin: Any, issuer: TokenIssuer, tenants: Mapping[str, tuple[str, str]]) -> None:
    """Create the objects of an operator's day. `tenants` has the tenant's and a project's id by the tenant's name."""
    globex, web = tenants["globex"]
    admin("PUT", "/prices", {"model": MODEL, "input": "0.30", "output": "1.20", "cached_input": "0.03"})
    flex = {"model": MODEL, "service_class": "flex", "input": "0.15", "output": "0.60", "cached_input": "0.015"}
    admin("PUT", "/prices", flex)
    admin("PATCH", "/classes/standard", {"credit_percent": 25})
    spot = {"name": "spot", "rank": 9, "completion_s": 86_400.0, "on_overload": "queue", "price_factor": 0.5}
    admin("POST", "/classes", spot | {"spot_floor_percent": 20, "spot_ceiling_percent": 100})
    admin("PUT", "/routes", {"name": "best", "targets": [{"model": MODEL}], "fallbacks": [f"{MODEL}-large"]})
    canary = [{"model": MODEL, "weight": 95}, {"model": f"{MODEL}-next", "weight": 5}]
    sparing = {"downgrade_model": f"{MODEL}-small", "downgrade_percent": 90}
    admin("PUT", "/routes", {"name": "chat", "targets": canary, "sticky": "conversation"} | sparing)
    detected = {"name": "no-secrets", "stage": "input", "detectors": ["secrets", "card_numbers"]}
    admin("PUT", "/guardrails", detected)
    observed = {"action": "observe", "on_failure": "open", "tenant_id": globex}
    moderation = {"name": "moderation", "stage": "output", "url": "https://guard.example.com/check", "timeout_ms": 500}
    admin("PUT", "/guardrails", moderation | observed)
    for name, (tenant_id, _) in tenants.items():
        budget = {"level": "tenant", "scope_id": tenant_id, "kind": "money_per_month"}
        admin("PUT", "/quotas", budget | {"cap": 400 * 10**9 if name != "hooli" else 2 * 10**9})
    admin("PUT", "/quotas", {"level": "project", "scope_id": web, "kind": "tokens_per_day", "cap": 20_000_000})
    for name in ("support", "legal", "sql"):
        admin("POST", "/adapters", {"tenant_id": globex, "model": MODEL, "name": name, "engine_adapter": f"{name}-v2"})
    admin("POST", "/webhooks", {"url": "https://ops.example.invalid/moiety"})
    slack = "https://hooks.slack.invalid/services/T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX"
    admin("POST", "/webhooks", {"url": slack, "format": "slack", "events": ["engine", "slo", "disk"]})
    pager = {"url": "https://events.pagerduty.invalid/v2/enqueue", "format": "pagerduty", "events": ["engine"]}
    admin("POST", "/webhooks", pager | {"routing_key": "0123456789abcdef0123456789abcdef"})
    policy = {"tenant_id": globex, "makes_keys": True, "max_keys": 3, "max_days": 90, "allowed_models": [MODEL]}
    admin("PUT", "/key-policies", policy | {"limits": {"money_per_month": 20 * 10**9, "requests_per_minute": 60}})
    invite(admin, issuer, DEVELOPER, "developer", globex)
    invite(admin, issuer, "ada", "tenant-admin", globex)
    invite(admin, issuer, "finance-and-controlling.of-the-whole-group", "viewer", None)
    admin("POST", "/users", {"email": "linus@example.com", "role": "developer", "tenant_id": tenants["acme"][0]})
    disabled = admin("POST", "/users", {"email": "bob@example.com", "role": "viewer"})
    admin("PATCH", f"/users/{disabled['id']}", {"state": "disabled"})
    admin("POST", "/tenants", {"name": LONG_NAME, "service_class": "flex"})
    own = {"Authorization": f"Bearer {issuer.token_of(DEVELOPER)}"}
    for name in ("laptop", "notebook"):
        body = {"name": name, "project_id": web}
        httpx.post(f"{admin.url}/admin/v1/me/keys", json=body, headers=own, timeout=60).raise_for_status()


def use_all(url: str, key: str) -> None:
    """Send batches, agent runs and requests of a route and of a model that does not exist with a tenant's key."""
    with httpx.Client(base_url=f"{url}/v1", headers={"Authorization": f"Bearer {key}"}, timeout=60) as http:
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "Weigh every share."}], "max_tokens": 24}
        lines = (
            json.dumps({"custom_id": f"line-{n}", "method": "POST", "url": "/v1/chat/completions", "body": asked})
            for n in range(400)
        )
        content = "\n".join(lines).encode()
        for size in (len(content), 4000):
            file = {
                "file": ("questions.jsonl", content[:size].rpartition(b"\n")[0] if size < len(content) else content)
            }
            made = http.post("/files", data={"purpose": "batch"}, files=file).raise_for_status().json()
            batch = {"input_file_id": made["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            http.post("/batches", json=batch).raise_for_status()
        for number, run in enumerate(
            ("task-42; budget-usd=2.50; deadline-s=900", "nightly-report; budget-tokens=9000")
        ):
            for turn in range(5 + 4 * number):
                headers = {"x-moiety-run": run}
                http.post("/chat/completions", json=asked | {"max_tokens": 10 + 8 * turn}, headers=headers)
        http.post("/chat/completions", json=asked | {"model": "best"})
        http.post("/chat/completions", json=asked | {"model": "no-such-model"})


def attributed(rows: list[UsageRow], rng: random.Random) -> list[UsageRow]:
    """Return the rows with end users and tags, and a quote for every fifth."""
    given: list[UsageRow] = []
    for row in rows:
        user = f"user-{min(int(rng.expovariate(0.2)), 40)}@example.com" if rng.random() < 0.8 else None
        tags = json.dumps({"team": rng.choice(TEAMS)}) if rng.random() < 0.9 else None
        named = msgspec.structs.replace(row, end_user=user, tags=tags)
        given.append(quoted(named, rng) if row.ttft_ms is not None and rng.random() < 0.2 else named)
    return given


def quoted(row: UsageRow, rng: random.Random) -> UsageRow:
    """Return the row with the predictions of a quote, and with a credit if it took longer than was guaranteed."""
    assert row.ttft_ms is not None, "only an answered request has a quote"
    predicted_ms = row.ttft_ms * rng.lognormvariate(0.05, 0.3)
    is_met = row.ttft_ms <= 1.5 * predicted_ms + 250
    credit = 0 if is_met else row.cost_nanodollars // 4
    return msgspec.structs.replace(
        row, predicted_ttft_ms=predicted_ms, predicted_duration_ms=predicted_ms + row.duration_ms - row.ttft_ms,
        guarantee_met=is_met, credit_nanodollars=credit, cost_nanodollars=row.cost_nanodollars - credit,
        credit_reason=None if is_met else "ttft",
    )  # fmt: skip


async def store_spot_prices(url: str, rng: random.Random) -> None:
    """Store the prices of the spot class in the last hour."""
    now_ms, percent = int(time.time() * 1000), 60
    database = Database.open(url)
    try:
        async with database.write() as session:
            for minute in range(60, 0, -1):
                percent = max(20, min(100, percent + rng.randint(-12, 12)))
                start_ms = now_ms - 60_000 * minute
                times = {"starts_ms": start_ms, "ends_ms": start_ms + 60_000}
                session.add(
                    SpotPriceRecord(
                        model=MODEL, service_class="spot", percent=percent, idle_percent=100 - percent, **times
                    )
                )
    finally:
        await database.close()


def earlier_days(rows: list[UsageRow], num_days: int, share: float, rng: random.Random) -> list[UsageRow]:
    """Return a share of the rows on each of the days before, at any time of the day."""
    copies: list[UsageRow] = []
    for day in range(1, num_days + 1):
        midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=day)
        for number, row in enumerate(rng.sample(rows, int(share * len(rows) * rng.uniform(0.6, 1.0)))):
            at = midnight + timedelta(seconds=rng.random() * 86_000)
            copies.append(msgspec.structs.replace(row, request_id=f"day-{day}-{number}", started_at=at, charges=()))
    return copies
