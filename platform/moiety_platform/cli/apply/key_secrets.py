"""Secrets of the cluster that declared keys are put into; a file without keys needs no cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from moiety_platform.auth.keys import parse_key
from moiety_platform.cli.apply.current import Current
from moiety_platform.cluster.deployment import KEY_ENTRY, put_key
from moiety_platform.cluster.errors import ClusterError
from moiety_platform.cluster.secrets_api import SecretsApi
from moiety_platform.resources.apply_kind import DeclaredObject, ObjectPlace


class KeySecrets:
    """Owner of the connection to the cluster, which is made at first use."""

    def __init__(self, environment: Mapping[str, str], account: Path, is_revoked: Callable[[str], bool]) -> None:
        """Create it unconnected; `is_revoked` returns whether an id is that of a revoked key of the gateway."""
        self._environment, self._account, self._is_revoked = environment, account, is_revoked
        self._stack = ExitStack()
        self._connected: SecretsApi | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stack.close()

    def put(self, name: str, text: str) -> None:
        """Put a text into a Secret. Raises ClusterError."""
        put_key(self._api(), name, text)

    def check_secrets(self, declared: Sequence[DeclaredObject], current: Current) -> dict[ObjectPlace, bool | str]:
        """Return for each object with a Secret whether that has its text, or why this is unknown."""
        found: dict[ObjectPlace, bool | str] = {}
        for one in declared:
            if one.key_secret is not None:
                try:
                    found[one.place] = self._has(one.key_secret, one, current)
                except ClusterError as exc:
                    found[one.place] = str(exc)
        return found

    def _has(self, name: str, one: DeclaredObject, current: Current) -> bool | str:
        row = current.rows.get(one.place)
        secret = self._api().read(name)
        text = "" if secret is None else secret.entries.get(KEY_ENTRY, b"").decode(errors="replace")
        key = parse_key(text)
        is_ours = row is not None and (one.kind != "key" or (key is not None and key.key_id == row["id"]))
        # the process may have been killed before the id was recorded
        begun = row is None and one.place in current.claims
        is_stale = key is not None and self._is_revoked(key.key_id)  # the text of a key that was declared earlier
        if text and not is_ours and not begun and not is_stale:
            return (
                f"the Secret {name} has an entry {KEY_ENTRY!r} that is not this {one.kind}'s, and was not changed: "
                "name another Secret as keySecret, or delete that entry so that it is created again"
            )
        return bool(text) and is_ours

    def _api(self) -> SecretsApi:
        if self._connected is None:
            self._connected = self._stack.enter_context(SecretsApi.of_pod(self._environment, self._account))
        return self._connected
