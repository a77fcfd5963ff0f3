"""Client of the Kubernetes API for Secrets of the pod's own namespace. Knows no other object."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from moiety_platform.cluster.errors import ApiRefused, NotInACluster

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # mount of a pod's identity
TIMEOUT_S = 10.0
NOT_FOUND, CONFLICT = 404, 409


@dataclass(frozen=True, slots=True)
class Secret:
    """A Secret as stored. `document` is the whole object of the API, whose version reveals a concurrent write."""

    name: str
    entries: Mapping[str, bytes] = field(repr=False)
    document: Mapping[str, Any] = field(repr=False)


class SecretsApi:
    """Owner of the connection. Every method raises ApiRefused; writes fail closed."""

    def __init__(self, url: str, namespace: str, token: str, ca: Path | None) -> None:
        trusted: ssl.SSLContext | bool = True if ca is None else ssl.create_default_context(cafile=str(ca))
        self._path = f"/api/v1/namespaces/{namespace}/secrets"
        self._client = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=TIMEOUT_S,
            verify=trusted,
            trust_env=False,
        )

    @classmethod
    def of_pod(cls, environment: Mapping[str, str], account: Path = ACCOUNT) -> Self:
        """Connect with the environment and identity of a pod. Raises NotInACluster."""
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise NotInACluster(
                "KUBERNETES_SERVICE_HOST is not set: run this in a pod of the cluster, as the chart does"
            )
        try:
            token, namespace = (account / "token").read_text().strip(), (account / "namespace").read_text().strip()
        except OSError as exc:
            raise NotInACluster(
                f"{exc.filename} cannot be read: give the pod a service account whose token is mounted"
            ) from exc
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port}", namespace, token, account / "ca.crt")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._client.close()

    def read(self, name: str) -> Secret | None:
        """Return the Secret, or None if there is none."""
        answer = self._ask("GET", f"{self._path}/{name}")
        if answer.status_code == NOT_FOUND:
            return None
        document = _checked(answer, f"read the Secret {name}")
        entries = {key: base64.b64decode(value) for key, value in (document.get("data") or {}).items()}
        return Secret(name, entries, document)

    def create(self, name: str, entries: Mapping[str, bytes]) -> bool:
        """Create the Secret; return False if another client was first."""
        answer = self._ask("POST", self._path, _document(name, entries))
        if answer.status_code == CONFLICT:
            return False
        _checked(answer, f"make the Secret {name}")
        return True

    def replace(self, secret: Secret, entries: Mapping[str, bytes]) -> bool:
        """Set these entries and leave all other fields; return False if the Secret changed since it was read."""
        document = {**secret.document, "data": _data(entries)}
        answer = self._ask("PUT", f"{self._path}/{secret.name}", document)
        if answer.status_code == CONFLICT:
            return False
        _checked(answer, f"change the Secret {secret.name}")
        return True

    def _ask(self, method: str, path: str, document: Mapping[str, Any] | None = None) -> httpx.Response:
        try:
            return self._client.request(method, path, json=document)
        except httpx.HTTPError as exc:
            raise ApiRefused(
                f"Kubernetes' API at {self._client.base_url} cannot be reached ({exc}): let the pod's network policy "
                "allow it (jobs.apiServerCIDR of the chart)"
            ) from exc


def _document(name: str, entries: Mapping[str, bytes]) -> dict[str, Any]:
    metadata = {"name": name, "labels": {"app.kubernetes.io/part-of": "moiety"}}
    return {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": _data(entries)}


def _data(entries: Mapping[str, bytes]) -> dict[str, str]:
    return {key: base64.b64encode(value).decode() for key, value in entries.items()}


def _checked(answer: httpx.Response, deed: str) -> dict[str, Any]:
    if not answer.is_success:
        raise ApiRefused(
            f"Kubernetes would not let this pod {deed}: {answer.status_code} {_reason(answer)}. Give its service "
            "account the role that the chart makes for it"
        )
    document: dict[str, Any] = answer.json()
    return document


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return answer.reason_phrase
