"""Receiver of KV: a socket and a thread that fills the staging buffer. The step loop polls the buffer."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import threading
import time

import msgspec
import structlog
import zmq

from moiety_engine.errors import InvalidConfig
from moiety_engine.kv_transfer.messages import Begin, Cancel, End, KvChunk, Received, Refused, ToReceiver, ToSender
from moiety_engine.kv_transfer.peer_authentication import PeerAuthenticator, guard_receiver
from moiety_engine.kv_transfer.staging_buffer import StagingBuffer
from moiety_wire.roles import ANY_HOST, transfer_token

MAX_FRAME_BYTES = 1 << 30  # a chunk of one layer is smaller
MAX_MESSAGE_BYTES = 1 << 20  # of a message without its chunk; decoded, it takes many times as much memory
NOT_ALLOWED = (
    "no gateway authorised the transfer: its token belongs to another transfer, to another engine, or to an "
    "earlier start of the engine"
)
POLL_S = 0.0002  # interval of polling while the last of a transfer is read by NIXL
_NUM_LOGGED = 10  # unauthorised transfers in the log; afterwards every thousandth is logged
_WILDCARDS = ("0.0.0.0", "[::]")

log = structlog.get_logger()


class ReceiverThread:
    """Owns its ZeroMQ context, socket and thread, from its creation to `close`."""

    def __init__(self, listen: str, staging_buffer: StagingBuffer, secret_key: bytes | None, secret: str = "") -> None:
        """Start to listen. Raises InvalidConfig if the address cannot be bound.

        `secret` is that of rank 0 on the other ranks; without one, a new one is made.
        """
        self._staging_buffer = staging_buffer
        self.secret = secret or secrets.token_hex(32)
        self.num_disallowed = 0
        self._ending: dict[tuple[bytes, str], None] = {}  # senders and transfers of which the last is being read
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToReceiver] = msgspec.msgpack.Decoder(ToReceiver)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # bounded by the senders
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        if secret_key is not None:
            PeerAuthenticator(self._context, zmq.curve_public(secret_key))
            guard_receiver(self._socket, secret_key)
        try:
            self._socket.bind(listen)
        except zmq.ZMQError as exc:
            self._socket.close(linger=0)
            self._context.term()
            raise InvalidConfig(f"cannot listen for KV on {listen}: {exc}; choose another --kv-listen") from exc
        self.address = _readable_endpoint(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._thread = threading.Thread(target=self._run, name="kv-receiver", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; received KV stays in the staging buffer."""
        self._context.term()  # the thread's receive then raises, and the thread closes the socket
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(zmq.ContextTerminated):
            while True:
                if self._ending and not self._socket.poll(0):
                    time.sleep(POLL_S)
                    frames = None
                else:
                    frames = self._socket.recv_multipart(copy=False)
                try:
                    if frames is not None:
                        self._take(frames)
                    for identity, transfer_id in list(self._ending):
                        self._end(identity, transfer_id)
                except zmq.ContextTerminated:
                    raise
                except Exception:  # the root of a thread: a failed transfer is lost, and its KV is recomputed
                    log.exception("kv_receiver_failed")
        self._socket.close(linger=0)

    def _take(self, frames: list[zmq.Frame]) -> None:
        identity = frames[0].bytes
        try:
            data = frames[1].buffer
            if len(data) > MAX_MESSAGE_BYTES:
                raise ValueError(f"{len(data)} bytes are more than a message has")
            message = self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, IndexError) as exc:
            log.warning(
                "kv_message_undecodable",
                reason=str(exc),
                advice="run the same release of all engines, and check which process sends to this engine's KV address",
            )
            return
        match message:
            case KvChunk():
                self._staging_buffer.put(message, [frame.buffer for frame in frames[2:]], identity)
            case Begin():
                if not self._is_allowed(message):
                    self._note_disallowed(message)
                    self._answer(identity, Refused(message.transfer_id, NOT_ALLOWED))
                    return
                reason = self._staging_buffer.begin(message, identity)
                if reason:
                    log.warning(
                        "kv_transfer_rejected",
                        reason=reason,
                        num_tokens=message.num_tokens,
                        num_bytes=message.num_bytes,
                        advice="raise --kv-buffer-bytes if the staging buffer is full",
                    )
                    self._answer(identity, Refused(message.transfer_id, reason))
            case End():
                self._end(identity, message.transfer_id)
            case Cancel():
                self._staging_buffer.cancel(message.transfer_id, identity)

    def _end(self, identity: bytes, transfer_id: str) -> None:
        """Answer the end of a sender's part, or note that the last of it is still being read."""
        self._ending.pop((identity, transfer_id), None)  # also if the next line fails
        is_there = self._staging_buffer.end(transfer_id, identity)
        if is_there is None:
            self._ending[identity, transfer_id] = None
        else:
            self._answer(identity, Received(transfer_id) if is_there else Refused(transfer_id, "parts are missing"))

    def _is_allowed(self, begin: Begin) -> bool:
        expected = transfer_token(self.secret, begin.transfer_id)
        return hmac.compare_digest(begin.token.encode(), expected.encode())

    def _note_disallowed(self, begin: Begin) -> None:
        self.num_disallowed += 1
        if self.num_disallowed <= _NUM_LOGGED or self.num_disallowed % 1000 == 0:
            log.warning(
                "kv_sender_not_allowed",
                num_bytes=begin.num_bytes,
                num_disallowed=self.num_disallowed,
                advice="check which process sends to this engine's KV address: its token is invalid",
            )

    def _answer(self, identity: bytes, message: ToSender) -> None:
        with contextlib.suppress(zmq.Again):  # a sender that does not read times out
            self._socket.send_multipart((identity, self._encoder.encode(message)), zmq.NOBLOCK)


def _readable_endpoint(endpoint: str) -> str:
    """Return the address for the model card: a wildcard host becomes ANY_HOST, which the gateway replaces."""
    for wildcard in _WILDCARDS:
        endpoint = endpoint.replace(f"tcp://{wildcard}:", f"tcp://{ANY_HOST}:")
    return endpoint
