"""Choice of ports for the servers that `moiety serve` starts."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from moiety_platform.supervisor import ports
from moiety_platform.supervisor.errors import CannotListen
from moiety_platform.supervisor.ports import FIRST_PORT, MAX_PROBED_PORTS, claim_port

OWN_HOST = "127.77.0.1"  # no other process listens or has closed connections at this loopback address


def test_a_chosen_port_is_none_that_the_kernel_gives_to_others_meanwhile() -> None:
    lowest = int(ports.EPHEMERAL_PORTS.read_text().split()[0])
    chosen = {claim_port("127.0.0.1", 0, "--port") for _ in range(20)}
    assert len(chosen) > 1
    assert all(FIRST_PORT <= port < lowest for port in chosen)


def test_without_a_free_port_the_option_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "range").write_text(f"{FIRST_PORT + MAX_PROBED_PORTS} 60999")
    monkeypatch.setattr(ports, "EPHEMERAL_PORTS", tmp_path / "range")
    with contextlib.ExitStack() as held:
        for port in range(FIRST_PORT, FIRST_PORT + MAX_PROBED_PORTS):
            one = held.enter_context(socket.socket())
            one.bind((OWN_HOST, port))
            one.listen(1)
        with pytest.raises(CannotListen, match=r"64 ports of 127\.77\.0\.1 are in use or not allowed; .*--port"):
            claim_port(OWN_HOST, 0, "--port")
