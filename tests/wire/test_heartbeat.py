"""Heartbeats of a process to its supervisor."""

from __future__ import annotations

import asyncio
import os

from moiety_wire.heartbeat import VARIABLE, heartbeat_variable, sending_heartbeats

DEADLINE_S = 30


async def test_heartbeats_come_while_the_loop_runs_and_end_with_the_block() -> None:
    read_fd, write_fd = os.pipe()
    environment = heartbeat_variable(write_fd, 0.001)
    received = asyncio.Event()

    def read() -> None:
        if len(os.read(read_fd, 1000)) > 0 and next(counted) >= 3:
            received.set()

    counted = iter(range(1_000_000))
    loop = asyncio.get_running_loop()
    loop.add_reader(read_fd, read)
    with sending_heartbeats(environment):
        assert VARIABLE not in environment  # a child process has no such pipe
        async with asyncio.timeout(DEADLINE_S):
            await received.wait()
    loop.remove_reader(read_fd)
    while os.read(read_fd, 1000):
        pass  # until the end of the pipe, which its reader sees
    os.close(read_fd)


async def test_a_blocked_supervisor_does_not_block_its_process() -> None:
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    while True:
        try:
            os.write(write_fd, b"\0" * 4096)
        except BlockingIOError:
            break
    with sending_heartbeats(heartbeat_variable(write_fd, 1000.0)):
        await asyncio.sleep(0)
    assert len(os.read(read_fd, 1 << 24)) % 4096 == 0  # its own heartbeat found no room
    os.close(read_fd)


async def test_a_process_without_a_supervisor_sends_none() -> None:
    with sending_heartbeats({}):
        await asyncio.sleep(0)
    assert VARIABLE not in os.environ
