"""Replicas of StatefulSets in the pod's own namespace, through the `scale` subresource of the Kubernetes API."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx2
from lightkube import ApiError, Client, KubeConfig
from lightkube.config.models import Cluster, User
from lightkube.core.exceptions import ConfigError
from lightkube.resources.apps_v1 import StatefulSet

from moiety_platform.cluster.secrets_api import NOT_FOUND, TIMEOUT_S
from moiety_platform.errors import Unavailable

T = TypeVar("T")

RETRY_S = 5


class StatefulSetScaler:
    """Scaler of StatefulSets. Implements PoolScaler. Each request runs in a thread, one at a time."""

    def __init__(self, url: str, namespace: str, token_file: Path, ca: Path) -> None:
        """Connect at first use. Raises OSError where the certificate cannot be read."""
        config = KubeConfig.from_one(
            cluster=Cluster(server=url, certificate_auth=str(ca)),
            user=User(token_file=str(token_file)),
            namespace=namespace,
        )
        self._client = Client(config, timeout=httpx2.Timeout(TIMEOUT_S), trust_env=False)
        self._namespace, self._token_file = namespace, token_file
        self._lock = threading.Lock()

    async def close(self) -> None:
        """Close the connection, after a running request. Idempotent."""

        def locked() -> None:
            with self._lock:
                self._client.close()

        await asyncio.to_thread(locked)

    async def replicas(self, name: str) -> int:
        """Return the wanted number of replicas. Raises Unavailable."""
        found = await self._ask(lambda: self._client.get(StatefulSet.Scale, name), name, f"read the scale of {name}")
        return 0 if found.spec is None or found.spec.replicas is None else found.spec.replicas

    async def scale(self, name: str, replicas: int) -> None:
        """Set the wanted number of replicas. Raises Unavailable."""
        change = {"spec": {"replicas": replicas}}
        await self._ask(lambda: self._client.patch(StatefulSet.Scale, name, change), name, f"scale {name}")

    async def _ask(self, request: Callable[[], T], name: str, operation: str) -> T:
        def locked() -> T:
            with self._lock:
                return request()

        try:
            return await asyncio.to_thread(locked)
        except ApiError as exc:
            if exc.status.code == NOT_FOUND:
                raise Unavailable(
                    f"the namespace {self._namespace} has no StatefulSet {name} (404): correct its name in the setting "
                    "scaled_models, or create it",
                    retry_after_s=RETRY_S,
                ) from exc
            raise Unavailable(
                f"Kubernetes does not allow this gateway to {operation}: {exc.status.code} {exc.status.message}. Give "
                "its service account the role that the chart creates for it",
                retry_after_s=RETRY_S,
            ) from exc
        except httpx2.HTTPError as exc:
            raise Unavailable(
                f"Kubernetes' API cannot be reached to {operation}: {exc}", retry_after_s=RETRY_S
            ) from exc
        except (OSError, ConfigError) as exc:
            raise Unavailable(
                f"the token of the service account cannot be read to {operation}: {exc}. Check the pod's volume "
                f"{self._token_file.parent} and its permissions",
                retry_after_s=RETRY_S,
            ) from exc
