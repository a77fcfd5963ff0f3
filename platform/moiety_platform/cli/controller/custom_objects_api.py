"""Access to the custom resources of the pod's own namespace, by lightkube. Knows no gateway."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any, Self

import httpx2
import structlog
from lightkube import ApiError
from lightkube.generic_resource import GenericNamespacedResource, create_namespaced_resource
from lightkube.types import PatchType

from moiety_platform.cli.controller.custom_objects import EPOCH, CustomKind, CustomObject
from moiety_platform.cluster.errors import ApiRefused
from moiety_platform.cluster.kubernetes_client import kubernetes_client
from moiety_platform.cluster.pod_identity import PodIdentity

GROUP, VERSION = "moiety.dev", "v1alpha1"
TIMEOUT_S = 10.0
WATCH_S = 240  # after which the API ends a watch, and the next one begins
RETRY_S = 2.0  # after a watch; doubled after each that fails
LONGEST_RETRY_S = 60.0

RESOURCES = {
    kind: create_namespaced_resource(GROUP, VERSION, kind.value, f"{kind.value.lower()}s") for kind in CustomKind
}

log = structlog.get_logger(__name__)


class CustomObjectsApi:
    """Owner of the connection, and of the threads that watch. Methods raise ApiRefused."""

    def __init__(self, identity: PodIdentity, retry_s: float = RETRY_S) -> None:
        """Connect at first use. Raises NotInACluster where the certificate cannot be read."""
        self._identity, self._retry_s = identity, retry_s
        self._client = kubernetes_client(identity, TIMEOUT_S)
        self._is_closed = threading.Event()
        self._watching: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        self._client.close()

    def read_all(self) -> list[CustomObject]:
        """Return all custom resources of the namespace."""
        found = []
        for kind, resource in RESOURCES.items():
            try:
                found += [_read(kind, one) for one in self._client.list(resource)]
            except ApiError as exc:
                raise ApiRefused(
                    f"Kubernetes does not allow this pod to list {kind}s: {exc.status.code} {exc.status.message}. "
                    "Install the CustomResourceDefinitions and the role of the chart (controller.enabled)"
                ) from exc
            except httpx2.HTTPError as exc:
                raise ApiRefused(f"Kubernetes' API at {self._identity.url} cannot be reached: {exc}") from exc
        return found

    def set_condition(self, one: CustomObject, condition: Mapping[str, Any]) -> None:
        """Replace the condition of this type; an object that was deleted meanwhile is skipped."""
        kept = [dict(other) for other in one.conditions if other.get("type") != condition["type"]]
        status = {"status": {"conditions": [*kept, dict(condition)]}}
        try:
            self._client.patch(RESOURCES[one.kind].Status, one.name, status, patch_type=PatchType.MERGE)
        except ApiError as exc:
            if exc.status.code != httpx2.codes.NOT_FOUND:
                raise ApiRefused(
                    f"the status of {one.kind} {one.name} cannot be written: {exc.status.message}"
                ) from exc
        except httpx2.HTTPError as exc:
            raise ApiRefused(f"Kubernetes' API at {self._identity.url} cannot be reached: {exc}") from exc

    def watch(self, changed: threading.Event) -> None:
        """Set `changed` after each change of a custom resource, until this object is closed. Returns at once."""
        for kind in RESOURCES:
            thread = threading.Thread(target=self._watch, args=(kind, changed), name=f"watch-{kind}", daemon=True)
            thread.start()
            self._watching.append(thread)

    def _watch(self, kind: CustomKind, changed: threading.Event) -> None:
        pause_s = self._retry_s
        while not self._is_closed.is_set():
            try:
                for _ in self._changes(kind):
                    changed.set()
                    pause_s = self._retry_s
            except Exception as exc:  # of any kind: without its thread, changes would be missed until the next resync
                log.warning(
                    "watch_failed",
                    kind=kind,
                    reason=str(exc) or type(exc).__name__,
                    advice=f"none needed: it is tried again after {pause_s:g} s",
                )
                failed = True
            else:
                failed = False
            changed.set()  # something may have been missed
            self._is_closed.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_RETRY_S) if failed else self._retry_s

    def _changes(self, kind: CustomKind) -> Iterator[None]:
        """Yield after each change, until the API ends the watch or this object is closed."""
        client = kubernetes_client(self._identity, WATCH_S + TIMEOUT_S)
        try:
            for _ in client.watch(RESOURCES[kind], server_timeout=WATCH_S):
                yield
                if self._is_closed.is_set():
                    return
        finally:
            client.close()


def _read(kind: CustomKind, document: GenericNamespacedResource) -> CustomObject:
    metadata = document.metadata
    assert metadata is not None and metadata.name is not None, "every stored object has a name"
    conditions = (document.get("status") or {}).get("conditions") or ()
    return CustomObject(
        kind,
        metadata.name,
        metadata.generation or 0,
        document.get("spec") or {},
        tuple(conditions),
        metadata.creationTimestamp or EPOCH,
    )
