"""Loopback addresses, which only processes of this machine reach. Imports no torch."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

LOOPBACK = "127.0.0.1"
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address or localhost; "*", interfaces and other names are not."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def keep_collectives_on_loopback() -> None:
    """Make gloo and NCCL listen on the loopback interface, unless the environment names another interface.

    Both read the interface only from the environment of their process.
    """
    interface = next(
        (
            name
            for name, addresses in psutil.net_if_addrs().items()
            if any(one.family == socket.AF_INET and one.address == LOOPBACK for one in addresses)
        ),
        "",
    )
    for variable in _INTERFACE_VARIABLES if interface else ():
        os.environ.setdefault(variable, interface)
