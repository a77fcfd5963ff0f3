"""Listening sockets of our servers."""

from __future__ import annotations

import socket

BACKLOG = 2048


class AddressUnavailable(Exception):
    """The address is in use or does not belong to this machine; the message says what to do."""


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """Return a listening socket. Raises AddressUnavailable, which names the option to change."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as exc:
        raise AddressUnavailable(
            f"cannot listen on {host}:{port}: {exc.strerror or exc}; choose another {option}"
        ) from exc
