"""The line to a core: what the front needs of one, and the core that is a child process.

The child gets its settings as one line of JSON on standard input, which then stays open: when the front ends, however
it ends, the pipe closes and the child follows. A core says something at least a few times a second between steps; one
that says nothing for long hangs, and is killed.
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
from moiety_engine.messages import CoreHello, CoreShutdown, CoreState, ToCore, ToFront
from moiety_engine.server.core_address import CoreAddress
from moiety_engine.server.settings import CORE_SILENCE_S
from moiety_engine.server.zmq_reader import ZmqReader

log = structlog.get_logger()

STOP_GRACE_S = 10.0
LOADING_GRACE_S = 2.0  # of a core that is not ready: it may be importing, and has nothing to lose
KILL_GRACE_S = 10.0
SILENCE_CHECKS = 4
STANDARD_ERROR = 2  # standard output of the front is its report; a core's goes with the logs


class CoreEvents(Protocol):
    """What a core tells the front."""

    def on_message(self, message: ToFront) -> None: ...

    def on_death(self, reason: str) -> None:
        """The core has ended or hangs, without being asked to; nothing more comes from it."""


class CoreLink(Protocol):
    """One core."""

    async def start(self, events: CoreEvents) -> None: ...

    def send(self, commands: list[ToCore]) -> None:
        """Never blocks; what is sent to a dead core is lost."""

    def first_step_keys(self) -> frozenset[int] | None:
        """The requests whose first token the core computed when it died; None if that is not known."""

    async def stop(self) -> None:
        """End the core, and wait until it has ended."""


class ProcessCore:
    """A CoreLink to `python -m MODULE --address …`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        module: str,
        config: msgspec.Struct,
        *,
        listen: str = "",
        silence_s: float = CORE_SILENCE_S,
    ) -> None:
        """`listen`: the front's own address. A core that is ready and says nothing for `silence_s` hangs."""
        self._context = context
        self._module = module
        self._config = config
        self._listen = listen
        self._check_interval_s = silence_s / SILENCE_CHECKS
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)
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
        self._hangs = False  # and was killed for it
        self._silence_check: asyncio.TimerHandle | None = None

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
        self._address = CoreAddress(self._listen)
        address = str(self._address)
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # bounded by what gateways have open
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
                process.stdin.close()  # the life line: a core that loads reads no commands
            if not await _has_ended(process, STOP_GRACE_S if self._is_ready else LOADING_GRACE_S):
                process.kill()
        if not await _has_ended(process, KILL_GRACE_S):  # in a system call that never returns, of a driver perhaps
            log.error("core_cannot_be_killed", pid=process.pid)
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
        """Counts checks rather than seconds: a front that was itself stopped for a while did not listen then."""
        assert self._process is not None and self._reader is not None
        self._reader.read()  # what has come by now counts
        if self._events is None or self._process.returncode is not None:
            return
        self._num_silent_checks = 0 if self._was_heard else self._num_silent_checks + 1
        self._was_heard = False
        if self._num_silent_checks < SILENCE_CHECKS:
            self._check_silence_later()
            return
        self._hangs = True
        self._process.kill()
        events, self._events = self._events, None  # its end, which may never come, is no news any more
        silence_s = self._check_interval_s * SILENCE_CHECKS
        events.on_death(f"the core process {self._process.pid} said nothing for {silence_s:g} s and was killed")

    async def _report_death(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        if self._reader is not None:
            self._reader.read()  # its last words
        if self._events is not None:
            ending = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._events.on_death(f"the core process {self._process.pid} ended with {ending}")


async def _has_ended(process: Process, wait_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), wait_s)
    return process.returncode is not None
