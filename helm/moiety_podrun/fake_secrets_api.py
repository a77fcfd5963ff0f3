"""Local fake of the Kubernetes API for Secrets, the scale of StatefulSets and Pods: for tests and the chart's runner.

Like the real one it requires a token, speaks TLS with its own certificate, and refuses a write to an object that
changed since it was read.
"""

from __future__ import annotations

import base64
import json
import secrets
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LOOPBACK = "127.0.0.1"
WATCH_S, WATCH_POLL_S = 2.0, 0.05
VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch"}


@dataclass
class FakeSecretsApi:
    """Server on loopback with Secrets and the wanted replicas of StatefulSets, by name, and the running Pods.

    `folder` receives the files that Kubernetes mounts into a pod. `refuses` are verbs that the account may not use.
    """

    folder: Path
    namespace: str = "prod"
    host: str = LOOPBACK
    port: int = 0  # 0: any free port
    refuses: set[str] = field(default_factory=set)
    secrets: dict[str, dict[str, Any]] = field(default_factory=dict)
    scales: dict[str, int] = field(default_factory=dict)
    pods: Sequence[Mapping[str, Any]] = ()  # documents of Pods; replaced as a whole after each change
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        certificate, key = self.folder / "ca.crt", self.folder / "server.key"
        _write_certificate(self.host, certificate, key)
        (self.folder / "token").write_text(self.token)
        (self.folder / "namespace").write_text(self.namespace)
        self._server = ThreadingHTTPServer((self.host, self.port), type("Handler", (_Handler,), {"api": self}))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        key.unlink()
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, name="secrets-api", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that Kubernetes sets in each pod."""
        return {"KUBERNETES_SERVICE_HOST": self.host, "KUBERNETES_SERVICE_PORT": str(self._server.server_port)}

    def store(self, name: str, entry: str, value: bytes) -> None:
        """Put an entry into a Secret by hand, like `kubectl`."""
        found = self.secrets.setdefault(name, {"metadata": {"name": name, "resourceVersion": "1"}, "data": {}})
        found["data"][entry] = base64.b64encode(value).decode()

    def answer(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        """Return status and document like the real API."""
        sets = f"/apis/apps/v1/namespaces/{self.namespace}/statefulsets/"
        if path.startswith(sets) and path.endswith("/scale"):
            return self._answer_scale(method, path.removeprefix(sets).removesuffix("/scale"), body)
        if method == "GET" and path.partition("?")[0] == f"/api/v1/namespaces/{self.namespace}/pods":
            return self._answer_pods(parse_qs(path.partition("?")[2]))
        base = f"/api/v1/namespaces/{self.namespace}/secrets"
        name = body["metadata"]["name"] if method == "POST" and body else path.removeprefix(f"{base}/")
        verb = VERBS[method]
        if not path.startswith(base) or verb in self.refuses:
            return _failure(HTTPStatus.FORBIDDEN, f'secrets "{name}" is forbidden: the account cannot {verb} it')
        stored = self.secrets.get(name)
        if method == "GET":
            return (200, stored) if stored else _failure(HTTPStatus.NOT_FOUND, f'secrets "{name}" not found')
        if (
            body is None
            or (method == "POST") == (stored is not None)
            or (stored and _version(stored) != _version(body))
        ):
            return _failure(HTTPStatus.CONFLICT, f'secrets "{name}" is not as it was')
        metadata = {**body["metadata"], "resourceVersion": str(int(_version(stored or {}) or 0) + 1)}
        self.secrets[name] = {**body, "metadata": metadata}
        return (200 if stored else 201), self.secrets[name]

    def _answer_pods(self, query: Mapping[str, list[str]]) -> tuple[int, dict[str, Any]]:
        """List the Pods with the labels of the selector, or answer a watch with one event after any change."""
        before, version = self.pods, {"resourceVersion": "1"}
        if query.get("watch") == ["true"]:
            until = time.monotonic() + WATCH_S
            while self.pods is before and time.monotonic() < until:
                time.sleep(WATCH_POLL_S)
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any", **version}}
            return 200, {"type": "MODIFIED", "object": pod}
        wanted = dict(one.split("=") for one in query.get("labelSelector", [""])[0].split(",") if one)
        items = [one for one in before if wanted.items() <= one["metadata"]["labels"].items()]
        return 200, {"apiVersion": "v1", "kind": "PodList", "metadata": version, "items": items}

    def _answer_scale(self, method: str, name: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        """Read or patch the scale of a StatefulSet."""
        verb = VERBS[method]
        if verb not in ("get", "patch") or f"{verb} scale" in self.refuses:
            return _failure(
                HTTPStatus.FORBIDDEN, f'statefulsets/scale "{name}" is forbidden: the account cannot {verb}'
            )
        if name not in self.scales:
            return _failure(HTTPStatus.NOT_FOUND, f'statefulsets "{name}" not found')
        if method == "PATCH" and body is not None:
            self.scales[name] = int(body["spec"]["replicas"])
        metadata = {"name": name, "namespace": self.namespace}
        document = {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": metadata}
        return 200, {**document, "spec": {"replicas": self.scales[name]}, "status": {"replicas": self.scales[name]}}


class _Handler(BaseHTTPRequestHandler):
    api: FakeSecretsApi
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _handle(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        if self.headers.get("authorization") != f"Bearer {self.api.token}":
            status, document = _failure(HTTPStatus.UNAUTHORIZED, "Unauthorized")
        else:
            status, document = self.api.answer(self.command, self.path, body)
        text = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = do_PATCH = _handle


def _version(document: dict[str, Any]) -> str:
    return str(document.get("metadata", {}).get("resourceVersion", ""))


def _failure(status: HTTPStatus, message: str) -> tuple[int, dict[str, Any]]:
    return status, {"apiVersion": "v1", "kind": "Status", "status": "Failure", "message": message, "code": status}


def _write_certificate(host: str, certificate: Path, key: Path) -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(host))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(private, hashes.SHA256())
    )
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
