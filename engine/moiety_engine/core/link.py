"""The core's end of the PAIR socket to its front."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

import msgspec
import zmq

from moiety_engine.messages import CoreHello, CoreLoad, CoreState, CoreStep, ToCore, ToFront

LINGER_MS = 1000
IDLE_WAIT_MS = 250  # a core that has nothing to do waits no longer than this, and then beats
BEAT_INTERVAL_S = 0.2


class ServerLink:
    """Sends to and receives from the front. One thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.connect(address)
        self._sent_at_s = 0.0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[list[ToCore]] = msgspec.msgpack.Decoder(list[ToCore])

    def __enter__(self) -> ServerLink:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()

    def send(self, message: ToFront) -> None:
        self._socket.send(self._encoder.encode(message))
        self._sent_at_s = time.monotonic()

    def beat(self, load: Callable[[], CoreLoad]) -> None:
        """To be called between steps: tells the load, and thereby that the core is alive, unless the front has heard
        something a moment ago."""
        if time.monotonic() - self._sent_at_s >= BEAT_INTERVAL_S:
            self.send(CoreStep([], [], load()))

    def send_refusal(self, message: str) -> None:
        """The core cannot serve, and why; it ends after this."""
        self.send(CoreHello(state=CoreState.REFUSED, message=message))

    def receive(self, *, wait_ms: int) -> list[ToCore]:
        """All commands that are there; waits up to `wait_ms` for the first (0: not at all)."""
        commands: list[ToCore] = []
        while self._socket.poll(0 if commands else wait_ms):
            commands += self._decoder.decode(self._socket.recv())
        return commands
