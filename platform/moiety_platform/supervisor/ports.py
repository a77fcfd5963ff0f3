"""Ports and the gateway's readiness, read over plain sockets because an HTTP client takes longer to import."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass

from moiety_platform.supervisor.errors import CannotListen

LOOPBACK = ("127.0.0.1", "::1", "localhost")
OPERATIONS_PORT = 8002  # default of the operations listener if the API does not listen on loopback
PROBE_TIMEOUT_S = 2.0
MAX_PROBE_BYTES = 65536


def claim_port(host: str, port: int, option: str) -> int:
    """Return the port after checking that it is free; port 0 becomes a free one.

    Raises CannotListen, naming the option.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as exc:
        raise CannotListen(
            f"{host} is not an address of this machine ({exc.strerror}); choose another with --host"
        ) from exc
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as exc:
            raise CannotListen(
                f"cannot listen on {host}:{port} ({exc.strerror}); choose another port with {option}"
            ) from exc
        return int(probe.getsockname()[1])


def reachable_host(host: str) -> str:
    """Return the host name under which a client on this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)


@dataclass(frozen=True, slots=True)
class GatewayReadiness:
    """Result of /readyz; `reason` says briefly what is missing, if the response says so."""

    ready: bool
    reason: str = ""


async def ask_readiness(host: str, port: int) -> GatewayReadiness:
    """Send GET /readyz and return the result. A gateway that does not answer is not ready."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), port)
            try:
                writer.write(f"GET /readyz HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
                answer = await reader.read(MAX_PROBE_BYTES)
                while len(answer) < MAX_PROBE_BYTES and (more := await reader.read(MAX_PROBE_BYTES)):
                    answer += more
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return GatewayReadiness(False, "the gateway does not answer yet")
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    return GatewayReadiness(status == [b"200"], describe(body))


def describe(body: bytes) -> str:
    """Return the reason in a readiness response: the first present of `error.message`, `reason` and `detail`."""
    try:
        answer = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(answer, dict):
        return ""
    error = answer.get("error")
    if isinstance(error, dict):
        return str(error.get("message", ""))
    return str(answer.get("reason") or answer.get("detail") or "")
