"""Moiety's admin API with a real OpenID Connect issuer: which tokens it accepts and which it rejects.

    python benchmarks/oidc_issuer.py [--work FOLDER] [--output benchmarks/results/oidc_issuer.json]

Installs `oidc-provider` from npm into a separate folder (Node.js must be installed), starts it on the loopback and a
`moiety gateway` that trusts it, and gets tokens by client_credentials. The role comes from the token's claim. A token
for another audience, of another issuer, with a changed claim, without a role or expired is rejected; the gateway learns
a key that the issuer begins to sign with; and during an outage of the issuer, known keys stay valid. Exits with 1 if a
check fails.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from external.processes import MOIETY, process, wait
from on_checkpoint import HERE, write_report

from moiety_platform.auth.jwt_verification import LEEWAY_S, REFETCH_S
from moiety_platform.bench.environment import describe_environment
from moiety_platform.supervisor.ports import claim_port

PACKAGE = "oidc-provider@9.13.3"
AUDIENCE, OTHER_AUDIENCE = "urn:moiety", "urn:another"
SECRET = "a secret of a client that is only here"
LASTS_S, SHORT_S = 600, 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "moiety-benchmarks")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "oidc_issuer.json")
    options = parser.parse_args()
    home = _install(options.work / "oidc")
    with tempfile.TemporaryDirectory(prefix="moiety-oidc-") as name:
        issuer, folder = Issuer(home, Path(name)), Path(name)
        with issuer.started(), _gateway(issuer.url, folder) as url:
            checks = _check(issuer, url, json.loads((folder / "keys.json").read_text())["admin_key"])
    report = {
        "date": date.today().isoformat(),
        "command": "python benchmarks/oidc_issuer.py",
        "settings": {"issuer": PACKAGE, "node": _node_version(), "leeway_s": LEEWAY_S, "refetch_s": REFETCH_S},
        "environment": describe_environment(),
        "all_hold": all(check["holds"] for check in checks.values()),
        "checks": checks,
    }
    write_report(report, options.output)
    print(json.dumps({name: check["holds"] for name, check in checks.items()}))
    sys.exit(0 if report["all_hold"] else 1)


def _install(home: Path) -> Path:
    if not (home / "installed").exists():
        home.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--no-fund", "--no-audit", "--prefix", home, PACKAGE], check=True)
        (home / "installed").touch()
    return home


def _node_version() -> str:
    return subprocess.run(["node", "--version"], check=True, capture_output=True, text=True).stdout.strip()


class Issuer:
    """The provider's process, restarted with other keys or claims on the same port."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.home = home
        self._folder = folder
        self._port = claim_port("127.0.0.1", 0, "--port")
        self._running = contextlib.ExitStack()
        self.url = f"http://127.0.0.1:{self._port}"
        self.keys = [_rsa_key("first")]
        self.clients: dict[str, tuple[dict[str, Any], int]] = {  # their tokens' claims, and for how long they last
            "a-viewer": ({"moiety_roles": ["viewer", "something else"]}, LASTS_S),
            "an-owner": ({"moiety_roles": "owner"}, LASTS_S),
            "nobody": ({}, LASTS_S),
            "short": ({"moiety_roles": ["viewer"]}, SHORT_S),
        }

    @contextmanager
    def started(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.stop()

    def start(self) -> None:
        clients = [
            {"id": name, "secret": SECRET, "claims": claims, "lasts_s": lasts_s}
            for name, (claims, lasts_s) in self.clients.items()
        ]
        settings = self._folder / "issuer.json"
        settings.write_text(json.dumps({"keys": self.keys, "clients": clients}))
        script = self.home / "oidc_provider.mjs"  # beside the package, where Node.js looks for it
        script.write_text((HERE / "external" / "oidc_provider.mjs").read_text())
        log = self._folder / "issuer.log"
        running = self._running.enter_context(process(["node", script, self._port, settings], log, {}))
        wait(f"{self.url}/.well-known/openid-configuration", running, log)

    def stop(self) -> None:
        self._running.close()

    def token(self, client: str, audience: str = AUDIENCE) -> str:
        form = {"grant_type": "client_credentials", "resource": audience}
        answer = httpx.post(f"{self.url}/token", data=form, auth=(client, SECRET), trust_env=False)
        return str(answer.raise_for_status().json()["access_token"])


def _rsa_key(key_id: str) -> dict[str, Any]:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return {**jwt.algorithms.RSAAlgorithm.to_jwk(key, as_dict=True), "kid": key_id, "alg": "RS256", "use": "sig"}


def _ec_key(key_id: str) -> dict[str, Any]:
    key = ec.generate_private_key(ec.SECP256R1())
    return {**jwt.algorithms.ECAlgorithm.to_jwk(key, as_dict=True), "kid": key_id, "alg": "ES256", "use": "sig"}


@contextmanager
def _gateway(issuer: str, folder: Path) -> Iterator[str]:
    port = claim_port("127.0.0.1", 0, "--port")
    command = [sys.executable, "-c", MOIETY, "gateway", "--migrate", "--first-keys", folder / "keys.json"]
    command += ["--data-dir", folder / "data", "--port", port, "--engine", f"ipc://{folder}/none", "--drain-s", 1]
    environment = {"MOIETY_OIDC_ISSUER": issuer, "MOIETY_OIDC_AUDIENCE": AUDIENCE}
    with process(command, folder / "gateway.log", environment) as running:
        wait(f"http://127.0.0.1:{port}/healthz", running, folder / "gateway.log")
        yield f"http://127.0.0.1:{port}"


def _check(issuer: Issuer, url: str, admin_key: str) -> dict[str, Any]:
    with httpx.Client(base_url=f"{url}/admin/v1", trust_env=False, timeout=30) as http:
        return {
            "roles": _roles(issuer, http, admin_key),
            "refused": _refused(issuer, http),
            "rotation": _rotation(issuer, http),
        }


def _ask(http: httpx.Client, token: str, method: str = "GET", name: str | None = None) -> str:
    """Return the status, and the error code."""
    body = None if name is None else {"name": name}
    answer = http.request(method, "/tenants", json=body, headers={"Authorization": f"Bearer {token}"})
    code = "" if answer.is_success else f" {answer.json()['error']['code']}"
    return f"{answer.status_code}{code}"


def _roles(issuer: Issuer, http: httpx.Client, admin_key: str) -> dict[str, Any]:
    """Check the roles of viewer, owner and tenant administrator, and the actor in the audit log.

    A viewer can read but not create; an owner can create; a tenant's administrator sees only its tenant.
    """
    viewer, owner = issuer.token("a-viewer"), issuer.token("an-owner")
    found: dict[str, Any] = {
        "viewer_reads": _ask(http, viewer),
        "viewer_makes": _ask(http, viewer, "POST", "by a viewer"),
        "owner_makes": _ask(http, owner, "POST", "by an owner"),
    }
    admin = {"Authorization": f"Bearer {admin_key}"}
    tenants = http.get("/tenants", headers=admin).raise_for_status().json()["data"]
    own = next(tenant["id"] for tenant in tenants if tenant["name"] == "by an owner")
    claims = {"moiety_roles": ["tenant-admin"], "moiety_tenant": own}
    issuer.clients["a-tenant-admin"] = (claims, LASTS_S)
    issuer.stop()
    issuer.start()
    bearer = {"Authorization": f"Bearer {issuer.token('a-tenant-admin')}"}
    seen = [tenant["id"] for tenant in http.get("/tenants", headers=bearer).raise_for_status().json()["data"]]
    entries = http.get("/audit", headers=admin).raise_for_status().json()["data"]
    actors = {entry["actor"] for entry in entries}
    found |= {"tenants": len(tenants), "tenant_admin_sees": len(seen), "in_audit_log": "oidc:an-owner" in actors}
    expected = {"viewer_reads": "200", "viewer_makes": "403 missing_role", "owner_makes": "201"}
    holds = seen == [own] and found["in_audit_log"] and all(found[name] == value for name, value in expected.items())
    return {"holds": holds, **found}


def _refused(issuer: Issuer, http: httpx.Client) -> dict[str, Any]:
    """Return the fault of each token, and the answer to it."""
    short = issuer.token("short")
    until_s = time.monotonic() + SHORT_S + LEEWAY_S + 2
    expected = {
        "another_audience": (issuer.token("a-viewer", OTHER_AUDIENCE), "401 invalid_token"),
        "no_role": (issuer.token("nobody"), "403 missing_role"),
        "a_changed_claim": (_raised(issuer.token("a-viewer")), "401 invalid_token"),
        "another_issuer": (_token_of_another(issuer), "401 invalid_token"),
    }
    found = {name: _ask(http, token) for name, (token, _) in expected.items()}
    found["before_it_expired"] = _ask(http, short)
    time.sleep(max(0.0, until_s - time.monotonic()))
    found["expired"] = _ask(http, short)
    holds = all(found[name] == answer for name, (_, answer) in expected.items())
    return {"holds": holds and found["before_it_expired"] == "200" and found["expired"] == "401 token_expired", **found}


def _raised(token: str) -> str:
    """Return the same token with claims changed to the owner's role."""
    head, body, signature = token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))) | {"moiety_roles": ["owner"]}
    return ".".join((head, base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("="), signature))


def _token_of_another(issuer: Issuer) -> str:
    """Return a token of an issuer at another address that signs with the same keys."""
    with tempfile.TemporaryDirectory(prefix="moiety-oidc-") as name:
        other = Issuer(issuer.home, Path(name))
        other.keys = issuer.keys
        with other.started():
            return other.token("a-viewer")


def _rotation(issuer: Issuer, http: httpx.Client) -> dict[str, Any]:
    """Check key rotation.

    A new key of another kind is put before the old one: its tokens are accepted once the keys may be read again, the
    old one's as well, also while the issuer is not reachable.
    """
    old = issuer.token("a-viewer")
    issuer.keys = [_ec_key("second"), *issuer.keys]
    issuer.stop()
    issuer.start()
    new = issuer.token("a-viewer")
    started_s = time.monotonic()
    while (answer := _ask(http, new)) != "200" and time.monotonic() - started_s < REFETCH_S + 5:
        time.sleep(0.5)
    learnt_s = time.monotonic() - started_s
    found = {"new_key": answer, "old_key": _ask(http, old), "algorithm": jwt.get_unverified_header(new)["alg"]}
    issuer.stop()
    found |= {"new_key_while_away": _ask(http, new), "old_key_while_away": _ask(http, old)}
    answers = [value for name, value in found.items() if name != "algorithm"]
    holds = answers == ["200"] * len(answers) and found["algorithm"] == "ES256"
    return {"holds": holds, **found, "learnt_after_s": round(learnt_s, 1)}


if __name__ == "__main__":
    main()
