"""The line to a core: what the front needs of one, and the core that is a child process.

The child gets its settings as one line of JSON on standard input, which then stays open: when the front ends, however
it ends, the pipe closes and the child follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from moiety_engine.front.zmq_reader import ZmqReader
from moiety_engine.messages import CoreShutdown, ToCore, ToFront

STOP_GRACE_S = 10.0
STANDARD_ERROR = 2  # standard output of the front is its report; a core's goes with the logs


class CoreEvents(Protocol):
    """What a core tells the front."""

    def on_message(self, message: ToFront) -> None: ...

    def on_death(self, reason: str) -> None:
        """The core has ended without being asked to; nothing more comes from it."""


class CoreLink(Protocol):
    """One core."""

    async def start(self, events: CoreEvents) -> None: ...

    def send(self, commands: list[ToCore]) -> None:
        """Never blocks; what is sent to a dead core is lost."""

    async def stop(self) -> None:
        """End the core, and wait until it has ended."""


class ProcessCore:
    """A CoreLink to `python -m MODULE --address …`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], module: str, config: msgspec.Struct) -> None:
        self._context = context
        self._module = module
        self._config = config
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)
        self._events: CoreEvents | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._reader: ZmqReader | None = None
        self._process: Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative for a signal."""
        assert self._process is not None
        return self._process.returncode

    async def start(self, events: CoreEvents) -> None:
        self._events = events
        self._directory = tempfile.TemporaryDirectory(prefix="moiety-core-")  # readable by this user only
        address = f"ipc://{Path(self._directory.name) / 'core.sock'}"
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # bounded by what gateways have open
        self._socket.setsockopt(zmq.RCVHWM, 0)  # bounded by credit
        self._socket.bind(address)
        self._reader = ZmqReader(self._socket, self._take, lambda: None)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self._module, "--address", address),
            stdin=PIPE,
            stdout=STANDARD_ERROR,
            start_new_session=True,  # an interrupt from the terminal is for the front, which drains
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._config) + b"\n")
        self._watch = asyncio.create_task(self._report_death())

    def send(self, commands: Sequence[ToCore]) -> None:
        if self._socket is None or self._reader is None:
            return
        with contextlib.suppress(zmq.Again):  # no peer any more: on_death tells the rest
            self._socket.send(self._encoder.encode(commands), zmq.NOBLOCK)
        self._reader.read_soon()

    async def stop(self) -> None:
        self._events = None
        if self._process is not None and self._process.returncode is None:
            self.send([CoreShutdown()])
            try:
                await asyncio.wait_for(self._process.wait(), STOP_GRACE_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        if self._watch is not None:
            await self._watch
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        if self._reader is not None:
            self._reader.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._directory is not None:
            self._directory.cleanup()

    def _take(self, frames: list[bytes]) -> None:
        if self._events is not None:
            self._events.on_message(self._decoder.decode(frames[0]))

    async def _report_death(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        if self._reader is not None:
            self._reader.read()  # its last words
        if self._events is not None:
            ending = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._events.on_death(f"the core process {self._process.pid} ended with {ending}")
