"""Permissions of connected gateways: the roles of their keys, and the usage that they may acknowledge.

With CURVE a gateway is identified by the public key that authenticated its connection; a message is never attributed to
the gateway of another key. Roles come from the file of gateway keys, which is read again when it changes, so a removed
key loses its sessions without a restart.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import structlog

from moiety_engine.errors import InvalidConfig
from moiety_engine.server.gateway_keys import read_gateway_keys
from moiety_engine.server.sessions import GatewaySession
from moiety_wire.permissions import GATEWAY_ROLES, SenderRole

LOGGED_PER_INTERVAL = 5  # refusals in the log between two heartbeats; all are counted
_NO_ROLES: frozenset[SenderRole] = frozenset()

log = structlog.get_logger()


class GatewayPermissions:
    """Roles of each public key, and the gateway processes that each key speaks for. Used by one thread."""

    def __init__(self, keys_file: Path | None) -> None:
        """Read the file. Without a file every gateway has all roles. Raises InvalidConfig if the file is unusable."""
        self._keys_file = keys_file
        self._roles: dict[str, frozenset[SenderRole]] = {}
        self._version: tuple[int, ...] = ()
        self._key_of: dict[str, str] = {}  # gateway process → public key
        self._num_logged = 0
        self.num_refused = 0
        if keys_file is not None:
            self._version = _version_of(keys_file)
            self._roles = _read_roles(keys_file)

    def roles_of(self, public_key: str) -> frozenset[SenderRole]:
        return GATEWAY_ROLES if self._keys_file is None else self._roles.get(public_key, _NO_ROLES)

    def may_submit(self, public_key: str) -> bool:
        """Return whether gateways with this key submit requests."""
        return SenderRole.INFERENCE in self.roles_of(public_key)

    def reload(self) -> bool:
        """Read the file if it has changed; return whether it was read. An unusable file changes nothing."""
        if self._keys_file is None:
            return False
        version = _version_of(self._keys_file)
        if version == self._version:
            return False
        self._version = version
        try:
            self._roles = _read_roles(self._keys_file)
        except InvalidConfig as exc:
            log.error(
                "gateway_keys_unusable",
                error=str(exc),
                num_keys_kept=len(self._roles),
                advice="correct the file; the keys that were read last stay in effect",
            )
            return False
        log.info("gateway_keys_read", num_keys=len(self._roles))
        return True

    def claim_replica(self, replica_id: str, public_key: str) -> bool:
        """Return whether this key speaks for the gateway process; the first key that claims a process does."""
        return not replica_id or self._key_of.setdefault(replica_id, public_key) == public_key

    def release_replicas(self, needed: Collection[str]) -> None:
        """Forget the processes that are not connected and have no unacknowledged usage."""
        self._key_of = {one: key for one, key in self._key_of.items() if one in needed}

    def begin_interval(self) -> None:
        """Reset the limit of logged refusals."""
        self._num_logged = 0

    def note_refusal(self, session: GatewaySession, message: object, why: str) -> None:
        """Count a refused message, and log it within the bound."""
        self.num_refused += 1
        self._num_logged += 1
        if self._num_logged > LOGGED_PER_INTERVAL:
            return
        log.warning(
            "gateway_message_refused",
            message=type(message).__name__,
            reason=why,
            gateway_id=session.gateway_id,
            public_key=session.public_key,
            num_refused=self.num_refused,
            advice="give the gateway's key the role that this message needs in --gateway-keys-file",
        )


def _read_roles(path: Path) -> dict[str, frozenset[SenderRole]]:
    return {gateway.public_key: gateway.roles for gateway in read_gateway_keys(path).values()}


def _version_of(path: Path) -> tuple[int, ...]:
    """Return a value that changes when the file is replaced or written."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size
