"""Access to the Secrets of the pod's own namespace, by lightkube. Knows no other object of Kubernetes."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx2
from lightkube import ApiError, Client, KubeConfig
from lightkube.config.models import Cluster, User
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Secret

from moiety_platform.cluster.errors import ApiRefused, NotInACluster
from moiety_platform.cluster.pod_identity import ACCOUNT, PodIdentity

TIMEOUT_S = 10.0
NOT_FOUND, CONFLICT = 404, 409

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredSecret:
    """A Secret as stored. `document` is the whole object of the API, whose version reveals a concurrent write."""

    name: str
    entries: Mapping[str, bytes] = field(repr=False)
    document: Secret = field(repr=False)


class SecretsApi:
    """Owner of the connection. Every method raises ApiRefused; writes fail closed."""

    def __init__(self, url: str, namespace: str, token_file: Path, ca: Path) -> None:
        """Connect at first use. Raises NotInACluster where the certificate cannot be read."""
        self._url = url
        config = KubeConfig.from_one(
            cluster=Cluster(server=url, certificate_auth=str(ca)),
            user=User(token_file=str(token_file)),
            namespace=namespace,
        )
        try:
            self._client = Client(config, timeout=httpx2.Timeout(TIMEOUT_S), trust_env=False)
        except (OSError, ssl.SSLError) as exc:
            raise NotInACluster(f"{ca} cannot be read ({exc}): give the pod a service account") from exc

    @classmethod
    def of_pod(cls, environment: Mapping[str, str], account: Path = ACCOUNT) -> Self:
        """Connect with the environment and identity of a pod. Raises NotInACluster."""
        identity = PodIdentity.of(environment, account)
        return cls(identity.url, identity.namespace, identity.token_file, identity.ca)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._client.close()

    def read(self, name: str) -> StoredSecret | None:
        """Return the Secret, or None if there is none."""
        document = self._ask(lambda: self._client.get(Secret, name), f"read the Secret {name}", NOT_FOUND)
        if document is None:
            return None
        entries = {key: base64.b64decode(value) for key, value in (document.data or {}).items()}
        return StoredSecret(name, entries, document)

    def create(self, name: str, entries: Mapping[str, bytes]) -> bool:
        """Create the Secret; return False if another client was first."""
        metadata = ObjectMeta(name=name, labels={"app.kubernetes.io/part-of": "moiety"})
        document = Secret(type="Opaque", metadata=metadata, data=_data(entries))
        return self._ask(lambda: self._client.create(document), f"make the Secret {name}", CONFLICT) is not None

    def replace(self, secret: StoredSecret, entries: Mapping[str, bytes]) -> bool:
        """Set these entries and leave all other fields; return False if the Secret changed since it was read."""
        document = secret.document
        document.data = _data(entries)
        done = self._ask(lambda: self._client.replace(document), f"change the Secret {secret.name}", CONFLICT)
        return done is not None

    def _ask(self, request: Callable[[], T], operation: str, expected: int) -> T | None:
        """Return the answer, None for an error of the expected status."""
        try:
            return request()
        except ApiError as exc:
            if exc.status.code == expected:
                return None
            raise ApiRefused(
                f"Kubernetes does not allow this pod to {operation}: {exc.status.code} {exc.status.message}. Give its "
                "service "
                "account the role that the chart creates for it"
            ) from exc
        except httpx2.HTTPError as exc:
            raise ApiRefused(
                f"Kubernetes' API at {self._url} cannot be reached ({exc}): let the pod's network policy allow it "
                "(jobs.apiServerCIDR of the chart)"
            ) from exc


def _data(entries: Mapping[str, bytes]) -> dict[str, str]:
    return {key: base64.b64encode(value).decode() for key, value in entries.items()}
