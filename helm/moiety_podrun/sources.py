"""Inputs that pods refer to by name: ConfigMaps of the release, Secrets of the API, and claims as folders."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moiety_podrun.errors import Failed
from moiety_podrun.fake_secrets_api import FakeSecretsApi


@dataclass(frozen=True, slots=True)
class Sources:
    """Named inputs. `config_maps` are those of the release that is being installed."""

    api: FakeSecretsApi
    folder: Path
    config_maps: Mapping[str, Mapping[str, Any]]

    def config_map(self, name: str) -> Mapping[str, str]:
        """Return its entries. Raises Failed."""
        if name not in self.config_maps:
            raise Failed(f"a pod wants the ConfigMap {name}, which the release does not have")
        found: Mapping[str, str] = self.config_maps[name]["data"]
        return found

    def secret(self, name: str) -> Mapping[str, bytes]:
        """Return its entries. Raises Failed."""
        if name not in self.api.secrets:
            raise Failed(f"a pod wants the Secret {name}, which is not there: give it as --secret {name}.ENTRY=VALUE")
        return {key: base64.b64decode(value) for key, value in self.api.secrets[name]["data"].items()}

    def claim(self, name: str) -> Path:
        """Return the folder of a PersistentVolumeClaim; make it if it does not exist."""
        path = self.folder / "claims" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def variables(self, container: Mapping[str, Any]) -> dict[str, str]:
        """Return a container's environment. Raises Failed."""
        found = dict(pair for one in container.get("envFrom", ()) for pair in self._variables_from(one))
        for one in container.get("env", ()):
            if "valueFrom" in one:
                wanted = one["valueFrom"]["secretKeyRef"]
                entries = self.secret(wanted["name"])
                if wanted["key"] not in entries:
                    if wanted.get("optional"):
                        continue
                    raise Failed(f"the Secret {wanted['name']} has no entry {wanted['key']}, which a pod wants")
                found[one["name"]] = entries[wanted["key"]].decode()
            else:
                found[one["name"]] = str(one["value"])
        return found

    def _variables_from(self, source: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the variables of one entry of `envFrom`: all entries of a ConfigMap or a Secret. Raises Failed."""
        prefix, is_secret = source.get("prefix", ""), "secretRef" in source
        wanted = source["secretRef" if is_secret else "configMapRef"]
        if wanted.get("optional") and wanted["name"] not in (self.api.secrets if is_secret else self.config_maps):
            return
        if is_secret:
            entries = {key: value.decode() for key, value in self.secret(wanted["name"]).items()}
        else:
            entries = dict(self.config_map(wanted["name"]))
        for key, value in entries.items():
            yield f"{prefix}{key}", value
