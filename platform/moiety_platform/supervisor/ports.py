"""Ports and the gateway's readiness, read over plain sockets because an HTTP client takes longer to import."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from dataclasses import dataclass
from pathlib import Path

from moiety_platform.supervisor.errors import CannotListen

LOOPBACK = ("127.0.0.1", "::1", "localhost")
OPERATIONS_PORT = 8002  # default of the operations listener if the API does not listen on loopback
PROBE_TIMEOUT_S = 2.0
FIRST_PORT = 10_240  # of those that are chosen among
MAX_PROBED_PORTS = 64
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
DEFAULT_FIRST_EPHEMERAL_PORT = 32_768
MAX_PROBE_BYTES = 65536
OK = 200


def claim_port(host: str, port: int, option: str) -> int:
    """Return the port after checking that it is free; port 0 becomes a free one.

    The server listens on it later, so a free one is not among the ports that the kernel meanwhile gives to others.
    Raises CannotListen, naming the option.
    """
    if port == 0:
        return _claim_any(host, option)
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


def _claim_any(host: str, option: str) -> int:
    for port in random.SystemRandom().sample(range(FIRST_PORT, _first_ephemeral_port()), MAX_PROBED_PORTS):
        with contextlib.suppress(CannotListen):
            return claim_port(host, port, option)
    raise CannotListen(f"{MAX_PROBED_PORTS} ports of {host} are in use or not allowed; choose one with {option}")


def _first_ephemeral_port() -> int:
    """Return the lowest port that the kernel gives to a socket without one."""
    try:
        return max(FIRST_PORT + MAX_PROBED_PORTS, int(EPHEMERAL_PORTS.read_text().split()[0]))
    except (OSError, ValueError, IndexError):  # not Linux
        return DEFAULT_FIRST_EPHEMERAL_PORT


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
    answer = await http_get(host, port, "/readyz", PROBE_TIMEOUT_S)
    if answer is None:
        return GatewayReadiness(False, "the gateway does not answer yet")
    status, body = answer
    return GatewayReadiness(status == OK, describe(body))


async def http_get(host: str, port: int, path: str, timeout_s: float) -> tuple[int, bytes] | None:
    """Return status and body of a page; None without an HTTP response within the timeout."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host.strip("[]"), port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
                answer = await reader.read(MAX_PROBE_BYTES)
                while len(answer) < MAX_PROBE_BYTES and (more := await reader.read(MAX_PROBE_BYTES)):
                    answer += more
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    fields = head.split(b" ", 2)
    return (int(fields[1]), body) if len(fields) > 1 and fields[1].isdigit() else None


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
