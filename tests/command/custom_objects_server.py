"""Fake of the Kubernetes API with custom resources of moiety.dev, their status and watches, beside Secrets."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

from moiety_podrun.fake_secrets_api import FakeSecretsApi

WATCH_S = 2.0  # after which a watch without a change ends
NOT_FOUND = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "message": "not found", "code": 404}


@dataclass
class FakeCustomObjectsApi(FakeSecretsApi):
    """Server on loopback with custom resources by (plural, name)."""

    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    num_watches: int = 0
    num_broken_watches: int = 0  # watches still to be answered with an event that is none

    def __post_init__(self) -> None:
        self._version = 1
        self._changed = threading.Condition()

    def put(self, kind: str, name: str, spec: dict[str, Any]) -> None:
        """Create or replace an object, like `kubectl apply`."""
        with self._changed:
            before = self.objects.get((plural_of(kind), name), {})
            self._version += 1
            generation = before.get("metadata", {}).get("generation", 0) + 1
            metadata = {"name": name, "namespace": self.namespace, "generation": generation}
            metadata["resourceVersion"] = str(self._version)
            metadata["creationTimestamp"] = before.get("metadata", {}).get("creationTimestamp") or _now()
            document = {"apiVersion": "moiety.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}
            self.objects[plural_of(kind), name] = {**before, **document}
            self._changed.notify_all()

    def remove(self, kind: str, name: str) -> None:
        with self._changed:
            self._version += 1
            del self.objects[plural_of(kind), name]
            self._changed.notify_all()

    def condition(self, kind: str, name: str) -> dict[str, Any]:
        """Return the condition Ready, empty before there is one."""
        with self._changed:
            conditions = self.objects[plural_of(kind), name].get("status", {}).get("conditions", [])
        return next((one for one in conditions if one["type"] == "Ready"), {})

    def answer(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        base = f"/apis/moiety.dev/v1alpha1/namespaces/{self.namespace}/"
        if not path.startswith(base):
            return super().answer(method, path, body)
        place, _, query = path.removeprefix(base).partition("?")
        plural, _, name = place.partition("/")
        if method == "PATCH" and body is not None:
            return self._patch_status(plural, name.removesuffix("/status"), body)
        if parse_qs(query).get("watch") == ["true"]:
            return self._watch(plural, int(parse_qs(query).get("resourceVersion", ["0"])[0]))
        with self._changed:
            items = [one for (kind, _), one in self.objects.items() if kind == plural]
            metadata = {"resourceVersion": str(self._version)}
        return 200, {"apiVersion": "moiety.dev/v1alpha1", "kind": "List", "metadata": metadata, "items": items}

    def _watch(self, plural: str, since: int) -> tuple[int, dict[str, Any]]:
        """Wait for a change, and answer with one event: the API's stream, of one line."""
        with self._changed:
            self.num_watches += 1
            if self.num_broken_watches:
                self.num_broken_watches -= 1
                return 200, {"type": "BROKEN"}
            self._changed.wait_for(lambda: self._version > since, WATCH_S)
            metadata = {"name": "any", "resourceVersion": str(self._version)}
        document = {"apiVersion": "moiety.dev/v1alpha1", "kind": plural, "metadata": metadata, "spec": {}}
        return 200, {"type": "MODIFIED", "object": document}

    def _patch_status(self, plural: str, name: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._changed:
            found = self.objects.get((plural, name))
            if found is None:
                return 404, NOT_FOUND
            self._version += 1
            found["status"] = body["status"]
            self._changed.notify_all()
            return 200, found


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def plural_of(kind: str) -> str:
    return f"{kind.lower()}s"
