"""Address of the Kubernetes API, and the identity with which a pod uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from moiety_platform.cluster.errors import NotInACluster

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # mount of a pod's identity


@dataclass(frozen=True, slots=True)
class PodIdentity:
    """The API's address, the pod's namespace, and the files of its service account."""

    url: str
    namespace: str
    token_file: Path
    ca: Path

    @classmethod
    def of(cls, environment: Mapping[str, str], account: Path = ACCOUNT) -> Self:
        """Return the identity of the pod with that environment. Raises NotInACluster."""
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise NotInACluster(
                "KUBERNETES_SERVICE_HOST is not set: run this in a pod of the cluster, as the chart does"
            )
        token = account / "token"
        try:
            token.read_text()
            namespace = (account / "namespace").read_text().strip()
        except OSError as exc:
            raise NotInACluster(
                f"{exc.filename} cannot be read: give the pod a service account whose token is mounted"
            ) from exc
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port}", namespace, token, account / "ca.crt")
