"""The volumes of a pod, as folders of this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moiety_podrun.errors import Failed, NotPossible
from moiety_podrun.sources import Sources

Object = Mapping[str, Any]


def make_volumes(
    spec: Object, claims: Object, folder: Path, sources: Sources, assigned_group: int = 0
) -> dict[str, Path]:
    """Return the volumes by name.

    `claims`: those of a StatefulSet's templates, as folders that outlive the pod. `assigned_group`: the group that the
    volumes get if the pod names none.
    """
    group = spec.get("securityContext", {}).get("fsGroup", assigned_group)
    found = {volume["name"]: _volume(volume, folder / volume["name"], sources) for volume in spec.get("volumes", ())}
    found |= claims
    for path in found.values():
        if path.stat().st_gid != group:  # as with fsGroupChangePolicy OnRootMismatch
            for one in (path, *path.rglob("*")):
                os.chown(one, -1, group)
            path.chmod(0o2770)
    return found


def _volume(volume: Object, folder: Path, sources: Sources) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if "emptyDir" in volume:
        return folder
    if "configMap" in volume:
        for name, text in sources.config_map(volume["configMap"]["name"]).items():
            (folder / name).write_text(text, encoding="utf-8")
        return folder
    if "secret" in volume:
        entries = sources.secret(volume["secret"]["secretName"])
        items = volume["secret"].get("items") or [{"key": key, "path": key} for key in entries]
        for item in items:
            if item["key"] not in entries:
                raise Failed(f"the Secret {volume['secret']['secretName']} has no entry {item['key']}")
            path = folder / item["path"]
            path.write_bytes(entries[item["key"]])
            path.chmod(volume["secret"].get("defaultMode", 0o644))
        return folder
    if "persistentVolumeClaim" in volume:
        return sources.claim(volume["persistentVolumeClaim"]["claimName"])
    raise NotPossible(f"the volume {volume['name']} is of a kind that only a cluster has; choose values without it")
