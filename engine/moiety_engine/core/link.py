"""The core's end of the PAIR socket to its engine server."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

import msgspec
import zmq

from moiety_engine.messages import CoreHello, CoreLoad, CoreState, CoreStep, ToCore, ToServer

LINGER_MS = 1000
IDLE_WAIT_MS = 250  # longest wait of an idle core before it sends a heartbeat
BEAT_INTERVAL_S = 0.2


class ServerLink:
    """Connection to the engine server. Used by one thread."""

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

    def send(self, message: ToServer) -> None:
        self._socket.send(self._encoder.encode(message))
        self._sent_at_s = time.monotonic()

    def beat(self, load: Callable[[], CoreLoad]) -> None:
        """Send the load as a heartbeat, unless a message was sent a moment ago. Call it between steps."""
        if time.monotonic() - self._sent_at_s >= BEAT_INTERVAL_S:
            self.send(CoreStep([], [], load()))

    def send_refusal(self, message: str) -> None:
        """Tell the engine server why the core cannot serve. The core ends after this."""
        self.send(CoreHello(state=CoreState.REFUSED, message=message))

    def receive(self, *, wait_ms: int) -> list[ToCore]:
        """Return all queued commands; wait up to `wait_ms` for the first (0: do not wait)."""
        commands: list[ToCore] = []
        while self._socket.poll(0 if commands else wait_ms):
            commands += self._decoder.decode(self._socket.recv())
        return commands
