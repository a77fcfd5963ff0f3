"""The two Secrets of a deployment: what its parts share, and the first owner's key. Neither is ever made twice."""

from __future__ import annotations

from moiety_platform.cluster.entries import missing_entries
from moiety_platform.cluster.errors import ApiRefused
from moiety_platform.cluster.secrets_api import SecretsApi

KEY_ENTRY = "key"
TRIES = 5  # against others that write at the same time


def ensure_secrets(api: SecretsApi, name: str, database_host: str | None) -> list[str]:
    """See that the Secret has all entries; returns the names of those that were added. What is there stays as it is.
    Raises ClusterError."""
    for _ in range(TRIES):
        found = api.read(name)
        present = {} if found is None else found.entries
        missing = missing_entries(present, database_host)
        if not missing:
            return []
        if api.create(name, missing) if found is None else api.replace(found, {**present, **missing}):
            return sorted(missing)
    raise ApiRefused(f"the Secret {name} was changed by others {TRIES} times while this looked: try again")


def put_key(api: SecretsApi, name: str, key: str) -> None:
    """Keep a key in the Secret, in place of one that never counted or counts no more. Raises ClusterError."""
    entries = {KEY_ENTRY: key.encode()}
    for _ in range(TRIES):
        found = api.read(name)
        if api.create(name, entries) if found is None else api.replace(found, {**found.entries, **entries}):
            return
    raise ApiRefused(f"the Secret {name} was changed by others {TRIES} times while this looked: try again")
