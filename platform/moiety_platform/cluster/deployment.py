"""The two Secrets of a deployment: the shared secrets of its parts, and the first owner's key. Each is created once."""

from __future__ import annotations

from moiety_platform.cluster.entries import missing_entries
from moiety_platform.cluster.errors import ApiRefused
from moiety_platform.cluster.secrets_api import SecretsApi

KEY_ENTRY = "key"
TRIES = 5  # against concurrent writers


def ensure_secrets(api: SecretsApi, name: str, database_host: str | None) -> list[str]:
    """Add the missing entries to the Secret; return the names of the added ones. Existing entries stay.

    Raises ClusterError.
    """
    for _ in range(TRIES):
        found = api.read(name)
        present = {} if found is None else found.entries
        missing = missing_entries(present, database_host)
        if not missing:
            return []
        if api.create(name, missing) if found is None else api.replace(found, {**present, **missing}):
            return sorted(missing)
    raise ApiRefused(f"the Secret {name} was changed by other clients {TRIES} times during this command: try again")


def put_key(api: SecretsApi, name: str, key: str) -> None:
    """Store a key in the Secret, in place of one that was never valid or no longer is. Raises ClusterError."""
    entries = {KEY_ENTRY: key.encode()}
    for _ in range(TRIES):
        found = api.read(name)
        if api.create(name, entries) if found is None else api.replace(found, {**found.entries, **entries}):
            return
    raise ApiRefused(f"the Secret {name} was changed by other clients {TRIES} times during this command: try again")
