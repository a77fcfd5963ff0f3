"""Authentication of gateways by their CURVE public keys, through ZeroMQ's authentication protocol.

ZAP is specified at https://rfc.zeromq.org/spec/27.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import structlog
import zmq
from zmq.utils import z85

from moiety_engine.errors import InvalidConfig
from moiety_engine.loopback import is_loopback
from moiety_wire.permissions import GATEWAY_ROLES, SenderRole

log = structlog.get_logger()

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = "gateways"
_NUM_CURVE_FRAMES = 7  # frames of a ZAP request with CURVE; the last is the client's public key
_KEY_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class AllowedGateway:
    """One line of the file of gateway keys."""

    public_key: str  # Z85
    roles: frozenset[SenderRole]


def read_gateway_keys(path: Path) -> dict[bytes, AllowedGateway]:
    """Return the allowed gateways by their binary public keys.

    The file holds one Z85 key a line, and after it the roles of that gateway, "inference" or "administration"; a key
    alone has both. Empty lines and lines that start with "# " are skipped. Raises InvalidConfig if the file cannot be
    read, holds no key, or a line is not of this form.
    """
    try:
        lines = path.read_text("ascii").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidConfig(f"--gateway-keys-file {path} cannot be read: {exc}") from exc
    keys = {}
    for number, line in enumerate((line.strip() for line in lines), start=1):
        if not line or line.startswith("# "):
            continue
        text, *roles = line.split()
        try:
            key = z85.decode(text.encode()) if len(text) == _KEY_CHARACTERS else b""
        except (KeyError, ValueError):
            key = b""
        if not key:
            raise InvalidConfig(
                f"--gateway-keys-file {path}, line {number}: expected a public key, 40 characters of Z85"
            )
        unknown = set(roles) - GATEWAY_ROLES
        if unknown:
            raise InvalidConfig(
                f"--gateway-keys-file {path}, line {number}: unknown role {min(unknown)!r}; write inference, "
                "administration, both, or none for both"
            )
        keys[key] = AllowedGateway(text, frozenset(map(SenderRole, roles)) or GATEWAY_ROLES)
    if not keys:
        raise InvalidConfig(f"--gateway-keys-file {path} has no key; write each gateway's public key on its own line")
    return keys


def require_known_gateways(option: str, address: str, **key_files: Path | None) -> None:
    """Raise InvalidConfig for a TCP address beyond loopback if a key file is not set."""
    missing = [f"--{name.replace('_', '-')}" for name, path in key_files.items() if path is None]
    host = address.removeprefix("tcp://").rpartition(":")[0]
    if not address.startswith("tcp://") or not missing or is_loopback(host):
        return
    raise InvalidConfig(
        f"{option} {address} is reachable from other machines, and without {' and '.join(missing)} a "
        "machine that reaches it controls the engine: set both key files (see docs/install.md), listen "
        "on 127.0.0.1, or set --allow-unauthenticated-tcp on a private network"
    )


class GatewayAuthenticator:
    """Answers ZAP requests of one context in its own thread, until the context ends.

    Messages of an admitted connection carry its public key as their user id. The file is read at each handshake, so a
    change applies to the next connection. An unusable file admits no gateway; without a file any key is admitted.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys_file: Path | None) -> None:
        self._keys_file = keys_file
        # A shadow context: `destroy` of the original would close the thread's socket. Both contexts end together.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context)
        self._socket = self._context.socket(zmq.REP)
        self._socket.bind(ZAP_ADDRESS)
        threading.Thread(target=self._answer, name="gateway-authenticator", daemon=True).start()

    def _answer(self) -> None:
        try:
            while True:
                frames = self._socket.recv_multipart()
                user = self._user(frames)
                status = (b"200", b"OK") if user else (b"400", b"not an allowed gateway key")
                self._socket.send_multipart((frames[0], frames[1], *status, user, b""))
        except zmq.ContextTerminated:
            self._socket.close(linger=0)

    def _user(self, frames: list[bytes]) -> bytes:
        if len(frames) != _NUM_CURVE_FRAMES or frames[5] != b"CURVE":
            return b""
        if self._keys_file is None:
            return z85.encode(frames[6])
        try:
            gateway = read_gateway_keys(self._keys_file).get(frames[6])
        except InvalidConfig as exc:
            log.error(
                "gateway_keys_unusable",
                error=str(exc),
                advice="correct --gateway-keys-file; no gateway can connect until then",
            )
            return b""
        if gateway is None:
            log.warning(
                "gateway_refused",
                public_key=z85.encode(frames[6]).decode(),
                address=frames[3].decode(),
                advice="add the public key to --gateway-keys-file if this gateway may connect",
            )
            return b""
        return gateway.public_key.encode()
