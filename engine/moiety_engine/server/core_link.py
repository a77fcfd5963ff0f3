"""Connection to a core: the interface that the engine server needs, and a core in a child process.

The child gets its settings as one line of JSON on standard input, which then stays open: when the engine server ends
for any reason, the pipe closes and the child ends too. A core sends a message at least a few times a second between
steps; a core that is silent for long hangs, and is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from typing import Protocol

import msgspec
import structlog
import zmq

from moiety_engine.first_steps import FirstSteps
from moiety_engine.messages import CoreHello, CoreShutdown, CoreState, ToCore, ToServer
from moiety_engine.server.core_address import CoreAddress
from moiety_engine.server.settings import CORE_SILENCE_S
from moiety_engine.server.zmq_reader import ZmqReader

log = structlog.get_logger()

STOP_GRACE_S = 10.0
LOADING_GRACE_S = 2.0  # of a core that is not ready: it may be importing, and has no state to save
KILL_GRACE_S = 10.0
SILENCE_CHECKS = 4
STANDARD_ERROR = 2  # the engine server's standard output is its report; a core's output goes to the logs


class CoreEvents(Protocol):
    """Callbacks for a core's messages and its death."""

    def on_message(self, message: ToServer) -> None: ...

    def on_death(self, reason: str) -> None:
        """Handle a core that has ended or hangs without a request to stop. No more messages follow."""


class CoreLink(Protocol):
    """Connection to one core."""

    async def start(self, events: CoreEvents) -> None: ...

    def send(self, commands: list[ToCore]) -> None:
        """Send commands to the core. Never blocks; commands to a dead core are lost."""

    def first_step_keys(self) -> frozenset[int] | None:
        """Return the requests whose first token the core was computing when it died; None if unknown."""

    async def stop(self) -> None:
        """End the core, and wait until it has ended."""


class ProcessCore:
    """CoreLink to a child process `python -m MODULE --address …`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        module: str,
        config: msgspec.Struct,
        *,
        listen: str = "",
        silence_s: float = CORE_SILENCE_S,
    ) -> None:
        """Create the link. `listen` is the engine server's own address.

        A core that is ready counts as hanging after `silence_s` without a message.
        """
        self._context = context
        self._module = module
        self._config = config
        self._listen = listen
        self._check_interval_s = silence_s / SILENCE_CHECKS
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
        self._events: CoreEvents | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._reader: ZmqReader | None = None
        self._process: Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._address: CoreAddress | None = None
        self._first_steps: FirstSteps | None = None
        self._is_ready = False
        self._was_heard = False
        self._num_silent_checks = 0
        self._hangs = False  # it hung and was killed
        self._silence_check: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code; None while the process runs; negative for a signal."""
        assert self._process is not None
        return self._process.returncode

    async def start(self, events: CoreEvents) -> None:
        self._events = events
        self._address = CoreAddress(self._listen)
        address = str(self._address)
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the gateways' open requests
        self._socket.setsockopt(zmq.RCVHWM, 0)  # bounded by credit
        self._socket.bind(address)
        self._reader = ZmqReader(self._socket, lambda frames, _: self._take(frames), lambda: None)
        self._first_steps = FirstSteps()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self._module, "--address", address),
            *("--first-steps-fd", str(self._first_steps.fd)),
            stdin=PIPE,
            stdout=STANDARD_ERROR,
            pass_fds=[self._first_steps.fd],
            start_new_session=True,  # a terminal interrupt must only reach the engine server, which drains
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._config) + b"\n")
        self._watch = asyncio.create_task(self._report_death())

    def send(self, commands: Sequence[ToCore]) -> None:
        if self._socket is None or self._reader is None:
            return
        with contextlib.suppress(zmq.Again):  # the peer is gone: on_death follows
            self._socket.send(self._encoder.encode(commands), zmq.NOBLOCK)
        self._reader.read_soon()

    def first_step_keys(self) -> frozenset[int] | None:
        return None if self._first_steps is None else self._first_steps.read()

    async def stop(self) -> None:
        self._events = None
        if self._silence_check is not None:
            self._silence_check.cancel()
        if self._process is not None:
            await self._end(self._process)
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        if self._reader is not None:
            self._reader.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._address is not None:
            self._address.remove()
        if self._first_steps is not None:
            self._first_steps.close()

    async def _end(self, process: Process) -> None:
        if process.returncode is None and not self._hangs:
            if self._is_ready:
                self.send([CoreShutdown()])
            elif process.stdin is not None:
                process.stdin.close()  # ends the core: a core that is loading reads no commands
            if not await _has_ended(process, STOP_GRACE_S if self._is_ready else LOADING_GRACE_S):
                process.kill()
        if not await _has_ended(process, KILL_GRACE_S):  # perhaps in a system call that never returns
            log.error(
                "core_cannot_be_killed",
                pid=process.pid,
                advice="end the process by its id, and check the device's driver",
            )
            return
        if self._watch is not None:
            await self._watch

    def _take(self, frames: list[bytes]) -> None:
        self._was_heard = True
        if self._events is None:
            return
        message = self._decoder.decode(frames[0])
        if isinstance(message, CoreHello) and message.state is CoreState.READY:
            self._is_ready = True
            self._check_silence_later()
        self._events.on_message(message)

    def _check_silence_later(self) -> None:
        self._silence_check = asyncio.get_running_loop().call_later(self._check_interval_s, self._check_silence)

    def _check_silence(self) -> None:
        """Kill the core after too many silent checks.

        Checks are counted instead of seconds: an engine server that was itself suspended did not receive messages then.
        """
        assert self._process is not None and self._reader is not None
        self._reader.read()  # messages that have arrived count
        if self._events is None or self._process.returncode is not None:
            return
        self._num_silent_checks = 0 if self._was_heard else self._num_silent_checks + 1
        self._was_heard = False
        if self._num_silent_checks < SILENCE_CHECKS:
            self._check_silence_later()
            return
        self._hangs = True
        self._process.kill()
        events, self._events = self._events, None  # do not report its end, which may never come
        silence_s = self._check_interval_s * SILENCE_CHECKS
        events.on_death(f"the core process {self._process.pid} sent no message for {silence_s:g} s and was killed")

    async def _report_death(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        if self._reader is not None:
            self._reader.read()  # read its last messages
        if self._events is not None:
            ending = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._events.on_death(f"the core process {self._process.pid} ended with {ending}")


async def _has_ended(process: Process, wait_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), wait_s)
    return process.returncode is not None
