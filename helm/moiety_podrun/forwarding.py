"""Forwarding from this machine's ports to Services, whose addresses exist only in the release's own network.

Two processes share the work: one outside accepts connections, and the one with the pods forwards them. Sockets in the
folder connect the two.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from moiety_podrun.errors import NotPossible
from moiety_podrun.services import Answer, Services, join, pump_both

LOOPBACK = "127.0.0.1"


async def serve_inside(services: Services, folder: Path, service: str) -> asyncio.Server:
    """Forward the connections on a Service's socket, as the Service itself does."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await join(reader, writer, *services.address(service))

    path = _socket(folder, service)
    path.unlink(missing_ok=True)
    return await asyncio.start_unix_server(answer, path)


async def serve_outside(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, forwards: Mapping[str, int]
) -> int:
    """Run the inner process, forward signals and connections to it, and return its exit code. Raises NotPossible."""
    try:
        servers = [await asyncio.start_server(_outer(folder, name), LOOPBACK, port) for name, port in forwards.items()]
    except OSError as error:
        raise NotPossible(f"{error.strerror}: choose other ports for --forward") from error
    process = await asyncio.create_subprocess_exec(*command, env=environment, start_new_session=True)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, _tell, process, number)
    code = await process.wait()
    for server in servers:
        server.close()
    return code


def _tell(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _outer(folder: Path, service: str) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            other_reader, other_writer = await asyncio.open_unix_connection(_socket(folder, service))
        except OSError:
            writer.transport.abort()  # nothing is ready yet
            return
        await pump_both(reader, writer, other_reader, other_writer)

    return answer


def _socket(folder: Path, service: str) -> Path:
    return folder / f"{service}.sock"
