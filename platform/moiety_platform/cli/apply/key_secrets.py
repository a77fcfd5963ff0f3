"""Stores of the texts of declared keys and webhooks: Secrets of the cluster, or one file outside a cluster."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from moiety_platform.auth.keys import parse_key
from moiety_platform.cli.apply.current import Current
from moiety_platform.cli.errors import CommandError
from moiety_platform.cluster.deployment import KEY_ENTRY, put_key
from moiety_platform.cluster.errors import ClusterError
from moiety_platform.cluster.secrets_api import SecretsApi
from moiety_platform.private_files import write_private
from moiety_platform.resources.apply_kind import DeclaredObject, ObjectPlace


class SecretFileError(CommandError):
    """The file of secrets cannot be used."""


class SecretTexts(Protocol):
    """Store of texts by name. Its methods raise ClusterError or SecretFileError."""

    def read_text(self, name: str) -> str:
        """Return the text, empty where there is none."""

    def put_text(self, name: str, text: str) -> None:
        """Store a text in place of the one with this name."""

    def describe_entry(self, name: str) -> str:
        """Return a description of the place of a text, for messages."""


@dataclass
class ClusterTexts:
    """Entries `key` of Secrets of the pod's namespace. The connection is made at first use."""

    environment: Mapping[str, str]
    account: Path
    stack: ExitStack
    connected: SecretsApi | None = None

    def read_text(self, name: str) -> str:
        secret = self._api().read(name)
        return "" if secret is None else secret.entries.get(KEY_ENTRY, b"").decode(errors="replace")

    def put_text(self, name: str, text: str) -> None:
        put_key(self._api(), name, text)

    def describe_entry(self, name: str) -> str:
        return f"the Secret {name} has an entry {KEY_ENTRY!r}"

    def _api(self) -> SecretsApi:
        if self.connected is None:
            self.connected = self.stack.enter_context(SecretsApi.of_pod(self.environment, self.account))
        return self.connected


@dataclass(frozen=True)
class FileTexts:
    """Entries of a JSON object in a file of the mode 0600, which is made at the first write."""

    path: Path

    def read_text(self, name: str) -> str:
        return self._entries().get(name, "")

    def put_text(self, name: str, text: str) -> None:
        try:
            text_of_all = json.dumps(self._entries() | {name: text}, indent=2, ensure_ascii=False)
            write_private(self.path, text_of_all.encode() + b"\n")
        except OSError as exc:
            raise SecretFileError(
                f"{self.path} cannot be written: {exc.strerror}; give another --secrets-file"
            ) from exc

    def describe_entry(self, name: str) -> str:
        return f"{self.path} has an entry {name!r}"

    def _entries(self) -> dict[str, str]:
        """Return all entries, after a check that the file can be written."""
        if not os.access(self.path.parent, os.W_OK | os.X_OK):
            raise SecretFileError(f"the folder of {self.path} cannot be written; give another --secrets-file")
        try:
            entries = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as exc:
            raise SecretFileError(f"{self.path} cannot be read: {exc}; repair it, or give another file") from exc
        if not isinstance(entries, dict) or not all(isinstance(text, str) for text in entries.values()):
            raise SecretFileError(f"{self.path} is no JSON object of texts; repair it, or give another file")
        return entries


class KeySecrets:
    """Texts of declared objects, in Secrets of the cluster or in `file`. Owns the connection to the cluster."""

    def __init__(
        self,
        environment: Mapping[str, str],
        account: Path,
        is_revoked: Callable[[str], bool],
        file: Path | None = None,
    ) -> None:
        """Create it unconnected; `is_revoked` returns whether an id is that of a revoked key of the gateway."""
        self._is_revoked = is_revoked
        self._stack = ExitStack()
        self._texts: SecretTexts = (
            ClusterTexts(environment, account, self._stack) if file is None else FileTexts(file.absolute())
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stack.close()

    def put(self, name: str, text: str) -> None:
        """Store a text. Raises ClusterError or SecretFileError."""
        self._texts.put_text(name, text)

    def check_secrets(self, declared: Sequence[DeclaredObject], current: Current) -> dict[ObjectPlace, bool | str]:
        """Return for each object with a Secret whether that has its text, or why this is unknown."""
        found: dict[ObjectPlace, bool | str] = {}
        users = Counter(one.key_secret for one in declared)
        for one in declared:
            if one.key_secret is not None and users[one.key_secret] > 1:
                found[one.place] = f"its keySecret {one.key_secret!r} is also that of another object; give each its own"
            elif one.key_secret is not None:
                try:
                    found[one.place] = self._has(one.key_secret, one, current)
                except (ClusterError, SecretFileError) as exc:
                    found[one.place] = str(exc)
        return found

    def _has(self, name: str, one: DeclaredObject, current: Current) -> bool | str:
        row = current.rows.get(one.place)
        text = self._texts.read_text(name)
        key = parse_key(text)
        is_ours = row is not None and (one.kind != "key" or (key is not None and key.key_id == row["id"]))
        # the process may have been killed before the id was recorded
        begun = row is None and one.place in current.claims
        is_stale = key is not None and self._is_revoked(key.key_id)  # the text of a key that was declared earlier
        if text and not is_ours and not begun and not is_stale:
            return (
                f"{self._texts.describe_entry(name)} that is not this {one.kind}'s, and was not changed: "
                "name another Secret as keySecret, or delete that entry so that it is created again"
            )
        return bool(text) and is_ours
