from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from moiety_engine.scripted.script import Script
from moiety_engine.server.core_address import CoreAddress
from moiety_engine.server.core_link import ProcessCore

FRONT_TO_KILL = """
import asyncio, msgspec, sys, zmq
from moiety_engine.server.core_link import ProcessCore
from moiety_engine.scripted.script import Script

class Events:
    def on_message(self, message):
        print("ready", flush=True)
    def on_death(self, reason):
        print(reason, flush=True)

async def serve():
    core = ProcessCore(zmq.Context(), "moiety_engine.scripted.core", Script(), listen=sys.argv[1])
    await core.start(Events())
    await asyncio.Event().wait()

asyncio.run(serve())
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use a short folder as the system's temporary directory, since the path of a socket has a length limit."""
    with tempfile.TemporaryDirectory(prefix="m-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        monkeypatch.undo()


@pytest.fixture
def killed_front(temporary: Path) -> Callable[[str], int]:
    def run(listen: str) -> int:
        command = [sys.executable, "-c", FRONT_TO_KILL, listen]
        environment = {**os.environ, "TMPDIR": str(temporary)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as front:
            assert front.stdout is not None
            assert front.stdout.readline() == b"ready\n"
            front.send_signal(signal.SIGKILL)
        return front.pid

    return run


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_a_core_of_a_front_on_a_file_lives_beside_it_and_leaves_nothing(
    bench: Any, tmp_path: Path, temporary: Path
) -> None:
    listen = f"ipc://{tmp_path}/engine.sock"

    def make_core(context: zmq.Context[Any]) -> ProcessCore:
        return ProcessCore(context, "moiety_engine.scripted.core", Script(), listen=listen)

    async with bench(make_core=make_core, listen=listen) as running:
        await running.connect().greet()
        assert (tmp_path / f"engine.sock.core-{os.getpid()}").is_socket()
        assert names_in(temporary) == []
    assert [name for name in names_in(tmp_path) if ".core" in name] == []


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:0", "ipc://{}/engine.sock"])
def test_the_next_front_removes_what_a_killed_one_left(
    killed_front: Callable[[str], int], tmp_path: Path, temporary: Path, listen: str
) -> None:
    listen = listen.format(tmp_path)
    pid = killed_front(listen)
    left = [*temporary.iterdir(), *tmp_path.glob("engine.sock.*")]
    assert [path for path in left if str(pid) in path.name] == left != []
    address = CoreAddress(listen)
    assert not any(path.exists() for path in left)
    address.remove()


def test_socket_files_of_live_servers_and_other_files_are_kept(temporary: Path) -> None:
    living = CoreAddress("tcp://127.0.0.1:0")
    names = ["moiety-core-notes", f"moiety-core-{os.getppid()}-abc", "other-999999999-x"]
    for name in names:
        (temporary / name).mkdir()
    (temporary / "moiety-core-999999999-gone").mkdir()
    CoreAddress("tcp://127.0.0.1:0").remove()
    assert Path(str(living).removeprefix("ipc://")).parent.is_dir()
    assert sorted(path.name for path in temporary.iterdir() if str(os.getpid()) not in path.name) == sorted(names)


@pytest.mark.parametrize("listen", ["ipc://@abstract", "ipc://*", "ipc:///tmp/" + "x" * 100, "tcp://127.0.0.1:1"])
def test_the_core_gets_a_private_directory_when_the_gateway_address_is_no_short_file(
    listen: str, temporary: Path
) -> None:
    address = CoreAddress(listen)
    (folder,) = temporary.iterdir()
    assert str(address) == f"ipc://{folder}/core.sock"
    assert folder.stat().st_mode & 0o077 == 0
    address.remove()
    assert names_in(temporary) == []


OWNER_ELSEWHERE = """
import os, sys
from moiety_engine.server.core_address import CoreAddress

address = CoreAddress()
if os.fork():
    print(address, flush=True)
    os._exit(0)  # whose pid the name carries; who lives on is to others as one in another container
sys.stdin.read()
"""


def test_a_directory_of_a_front_in_another_container_stays_until_that_has_ended(temporary: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", OWNER_ELSEWHERE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        folder = Path(owner.stdout.readline().decode().strip().removeprefix("ipc://")).parent
        owner.wait(60)
        CoreAddress().remove()
        assert [*temporary.iterdir()] == [folder]
        owner.stdin.close()
        owner.stdout.read()  # until it has ended too
        CoreAddress().remove()
        assert [*temporary.iterdir()] == []
