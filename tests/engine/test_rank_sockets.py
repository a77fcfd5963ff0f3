"""The addresses on which ranks listen, and those on which they refuse to."""

from __future__ import annotations

import ipaddress
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from tests.engine.rank_processes import settings_of, write_checkpoint

from moiety_engine.distribution.rendezvous import open_store
from moiety_engine.distribution.rendezvous_address import Rendezvous, rendezvous_from, require_private_ranks
from moiety_engine.errors import InvalidConfig, RanksError
from moiety_engine.loopback import is_loopback

LAYOUTS = [
    pytest.param({"tp": 2}, marks=pytest.mark.thorough),
    pytest.param({"pp": 2}, marks=pytest.mark.thorough),
    pytest.param({"dp_attention": 2, "ep": 2}, marks=pytest.mark.thorough),
    {"ffn_ranks": 1},
]
LAUNCHED = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "29500"}
PROGRAM = """
import sys
import msgspec
from moiety_engine.config import EngineConfig
from moiety_engine.startup import load_loop

with load_loop(msgspec.json.decode(sys.stdin.readline(), type=EngineConfig)):
    print("ready", flush=True)
    sys.stdin.readline()
"""


def listening(pid: int) -> set[str]:
    """The addresses on which a process and its children accept connections."""
    process = psutil.Process(pid)
    return {
        connection.laddr.ip
        for one in [process, *process.children(recursive=True)]
        for connection in one.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parallel_ranks_of_one_host_listen_on_its_loopback_addresses_alone(
    folder: Path, layout: dict[str, Any]
) -> None:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(settings_of(folder, **layout)) + b"\n")
            process.stdin.flush()
            assert any(line == b"ready\n" for line in process.stdout), "it ended: its log says why"
            found = listening(process.pid)
            assert found and all(ipaddress.ip_address(one).is_loopback for one in found), found
        finally:
            process.stdin.close()
            process.wait(60)


@pytest.mark.parametrize(
    ("environ", "is_local", "own_host", "store_host"),
    [
        ({"MASTER_ADDR": "10.0.0.1", "LOCAL_WORLD_SIZE": "2"}, True, "127.0.0.1", "127.0.0.1"),
        ({"MASTER_ADDR": "10.0.0.1", "LOCAL_WORLD_SIZE": "1"}, False, "10.0.0.1", "10.0.0.1"),
        ({"MASTER_ADDR": "localhost"}, True, "localhost", "localhost"),
        (
            {"MASTER_ADDR": "a-host", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            True,
            "127.0.0.1",
            "a-host",
        ),
    ],
)
def test_ranks_that_a_launcher_started_on_one_host_meet_on_its_loopback_address(
    environ: dict[str, str], is_local: bool, own_host: str, store_host: str
) -> None:
    rendezvous = rendezvous_from(LAUNCHED | environ)
    assert rendezvous is not None
    assert (rendezvous.is_local, rendezvous.own_host, rendezvous.store_host) == (is_local, own_host, store_host)


def test_ranks_of_several_hosts_need_a_network_of_their_own() -> None:
    beyond = Rendezvous(0, 2, host="10.0.0.1", port=29500)
    with pytest.raises(InvalidConfig, match="--allow-unauthenticated-ranks"):
        require_private_ranks(beyond, allowed=False)
    require_private_ranks(beyond, allowed=True)
    require_private_ranks(Rendezvous(0, 2), allowed=False)
    require_private_ranks(Rendezvous(0, 2, host="10.0.0.1", local_num_ranks=2), allowed=False)


def test_a_port_that_is_taken_is_said_so() -> None:
    store = open_store(Rendezvous(0, 2), 5)
    assert listening(psutil.Process().pid) >= {"127.0.0.1"}
    with pytest.raises(RanksError, match=f"{store.port} could not be opened by rank 0"):
        open_store(Rendezvous(0, 2, port=store.port), 5)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.2", True), ("[::1]", True), ("localhost", True), ("*", False), ("0.0.0.0", False), ("eth0", False)],
)
def test_only_loopback_addresses_count_as_such(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
