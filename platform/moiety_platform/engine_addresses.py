"""How engines are named in the settings: `tcp://HOST:PORT`, `ipc://PATH`, or `dns+tcp://NAME:PORT` for several."""

from __future__ import annotations

DNS_SCHEME = "dns+tcp://"


def is_name(address: str) -> bool:
    """Whether it stands for as many engines as the name has addresses."""
    return address.startswith(DNS_SCHEME)


def split_name(address: str) -> tuple[str, int]:
    """(name, port) of `dns+tcp://NAME:PORT`. Raises ValueError."""
    name, _, port = address.removeprefix(DNS_SCHEME).rpartition(":")
    if not is_name(address) or not name or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"engine address {address!r} must be {DNS_SCHEME}NAME:PORT")
    return name, int(port)


def check_address(address: str) -> None:
    """Raises ValueError for what is none of the three."""
    if is_name(address):
        split_name(address)
    elif not address.startswith(("tcp://", "ipc://")):
        raise ValueError(f"engine address {address!r} must start with tcp://, ipc:// or {DNS_SCHEME}")
