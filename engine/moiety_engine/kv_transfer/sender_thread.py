"""Sender of KV: a thread with one socket per receiving engine.

The step loop queues chunks and continues computing while they are sent.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import structlog
import zmq
from torch import Tensor

from moiety_engine.config import KvTransport
from moiety_engine.kv_transfer.messages import Begin, Cancel, End, KvChunk, Received, Refused, ToReceiver, ToSender
from moiety_engine.kv_transfer.nixl_memory import PROGRESS_S, NixlFailed, NixlSender
from moiety_engine.kv_transfer.peer_authentication import present_sender
from moiety_engine.kv_transfer.transports import SharedMemoryTransport, TcpTransport, Transport, own_host
from moiety_engine.staging import DeviceMark
from moiety_wire.roles import KvHandoff

ANSWER_S = 30.0  # longest wait for the receiver's answer after everything was sent
POLL_S = 0.05  # polling interval for answers while nothing is sent
LINGER_MS = 2000

log = structlog.get_logger()


@dataclass(slots=True)
class _OutgoingTransfer:
    """One transfer. The step loop reads `problem` and sets `has_ended`; the thread owns all other fields."""

    begin: Begin
    address: str
    transport: Transport
    last_message_s: float  # time of the last activity
    problem: str = ""  # why the transfer failed
    has_ended: bool = False  # all of it is sent or queued


_Job = Callable[[], None]


class SenderThread:
    """Sends KV. Holds at most `max_bytes` that have not arrived. Owns its thread from its creation to `close`."""

    def __init__(
        self, transport: KvTransport, max_bytes: int, secret_key: bytes | None, nixl: NixlSender | None = None
    ) -> None:
        """Start the thread. `nixl`: memory for the transport nixl."""
        self._transport, self._nixl = transport, nixl
        self._poll_s = POLL_S if nixl is None else PROGRESS_S
        self._nixl_has_failed = False
        self._max_bytes = max_bytes
        self._secret_key = secret_key
        self._host = own_host()
        self._lock = threading.Lock()
        self._transfers: dict[tuple[str, str], _OutgoingTransfer] = {}  # by id and address of the receiver
        self._held_bytes = 0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._links: dict[str, zmq.Socket[bytes]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToSender] = msgspec.msgpack.Decoder(ToSender)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="kv-sender", daemon=True)
        self._thread.start()

    # ── from the step loop ──

    def begin(self, hand_over: KvHandoff, begin: Begin) -> str:
        """Announce a transfer. Return why it is not possible, or ""."""
        with self._lock:
            if self._held_bytes + begin.num_bytes > self._max_bytes:
                return f"{self._held_bytes} bytes of other KV have not arrived yet"
            try:
                transport = self._choose_transport(hand_over, begin.num_bytes)
            except OSError as exc:
                return f"memory for the transfer is not available ({exc}); use --kv-transport tcp"
            announced = {"segment": transport.segment, "transport": transport.name.value, "memory": transport.memory}
            begin = msgspec.structs.replace(begin, **announced)
            transfer = _OutgoingTransfer(begin, hand_over.address, transport, time.monotonic())
            self._transfers[begin.transfer_id, hand_over.address] = transfer
            self._held_bytes += begin.num_bytes
        self._jobs.put(lambda: self._send_message(transfer, begin))
        return ""

    def put(self, address: str, piece: KvChunk, parts: Sequence[Tensor], mark: DeviceMark) -> None:
        """Send a chunk of one layer; its tensors are in host memory once the mark is passed."""
        transfer = self._transfers.get((piece.transfer_id, address))
        if transfer is not None and not transfer.problem:
            self._jobs.put(lambda: self._send(transfer, piece, parts, mark))

    def end(self, transfer_id: str, address: str) -> str:
        """End a transfer after all its chunks were queued.

        Return why the receiver refused it, if that is known by now, or "".
        """
        transfer = self._transfers.get((transfer_id, address))
        if transfer is None:
            return ""  # it has arrived already
        if not transfer.problem:
            transfer.has_ended = True
            self._jobs.put(lambda: self._send_message(transfer, End(transfer_id)))
            return ""
        self.cancel(transfer_id, address)
        return transfer.problem

    def cancel(self, transfer_id: str, address: str) -> None:
        transfer = self._transfers.get((transfer_id, address))
        if transfer is not None:
            self._jobs.put(lambda: self._cancel(transfer))

    def close(self) -> None:
        """Send what is queued, within the linger time, and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _choose_transport(self, hand_over: KvHandoff, num_bytes: int) -> Transport:
        if self._transport is KvTransport.TCP:
            return TcpTransport()
        if self._nixl is not None:
            return self._nixl.allocate(num_bytes)
        if self._transport is KvTransport.MEMORY or (self._host and hand_over.host == self._host):
            return SharedMemoryTransport(num_bytes)
        return TcpTransport()

    # ── the thread ──

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._poll_s if self._transfers else None)
                if job is None:
                    break
                job()
            except queue.Empty:
                pass
            except Exception:  # the root of a thread: KV that was not sent is lost, and the receiver recomputes it
                log.exception("kv_sender_failed")
            self._progress()
            self._give_up()
            self._receive_answers()
        for socket in self._links.values():
            socket.close(linger=LINGER_MS)
        self._context.term()

    def _progress(self) -> None:
        if self._nixl is not None:
            try:
                self._nixl.progress()
                self._nixl_has_failed = False
            except NixlFailed as exc:
                if not self._nixl_has_failed:  # else there would be a line each PROGRESS_S
                    log.warning("nixl_failed", reason=str(exc), advice="check the network between the engines")
                self._nixl_has_failed = True

    def _send_message(self, transfer: _OutgoingTransfer, message: ToReceiver) -> None:
        self._post(transfer, message, [])

    def _send(self, transfer: _OutgoingTransfer, piece: KvChunk, parts: Sequence[Tensor], mark: DeviceMark) -> None:
        if not transfer.problem:
            mark.wait()
            self._post(transfer, piece, transfer.transport.put(piece.offset, parts))

    def _post(self, transfer: _OutgoingTransfer, message: ToReceiver, data: list[memoryview]) -> None:
        transfer.last_message_s = time.monotonic()
        link = self._link_to(transfer.address)
        if link is None:
            transfer.problem = f"{transfer.address!r} is not a valid address"
            return
        frames: list[bytes | memoryview] = [self._encoder.encode(message), *data]
        link.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def _cancel(self, transfer: _OutgoingTransfer) -> None:
        self._send_message(transfer, Cancel(transfer.begin.transfer_id))
        self._forget(transfer)

    def _receive_answers(self) -> None:
        """Process the answers that have arrived."""
        for address, socket in self._links.items():
            while True:
                try:
                    answer = self._decoder.decode(socket.recv(zmq.NOBLOCK))
                except zmq.Again:
                    break
                except msgspec.MsgspecError as exc:
                    log.warning("kv_answer_undecodable", reason=str(exc), advice="run the same release of all engines")
                    continue
                transfer = self._transfers.get((answer.transfer_id, address))
                if transfer is not None:
                    self._take(transfer, answer)

    def _take(self, transfer: _OutgoingTransfer, answer: ToSender) -> None:
        match answer:
            case Received():
                self._forget(transfer)
            case Refused():
                if not transfer.problem:
                    transfer.problem = answer.reason
                    log.warning(
                        "kv_transfer_refused",
                        address=transfer.address,
                        reason=answer.reason,
                        advice="see the log of the decode engine, which computes the prompt itself",
                    )
                if transfer.has_ended:  # otherwise `end` or `cancel` will find the problem
                    self._forget(transfer)

    def _give_up(self) -> None:
        """Drop transfers without an answer, and close the connection to their receiver with its queue."""
        now_s = time.monotonic()
        for transfer in list(self._transfers.values()):
            if now_s - transfer.last_message_s > ANSWER_S:
                log.warning(
                    "kv_transfer_timed_out",
                    address=transfer.address,
                    num_bytes=transfer.begin.num_bytes,
                    advice="check the network between the engines; the decode engine computes the prompt",
                )
                self._forget(transfer)
                link = self._links.pop(transfer.address, None)
                if link is not None:
                    link.close(linger=0)

    def _forget(self, transfer: _OutgoingTransfer) -> None:
        with self._lock:
            found = self._transfers.pop((transfer.begin.transfer_id, transfer.address), None)
            if found is not None:
                self._held_bytes -= found.begin.num_bytes
        if found is not None:
            found.transport.close()

    def _link_to(self, address: str) -> zmq.Socket[bytes] | None:
        link = self._links.get(address)
        if link is None:
            link = self._context.socket(zmq.DEALER)
            link.setsockopt(zmq.LINGER, 0)
            link.setsockopt(zmq.IPV6, 1)
            link.setsockopt(zmq.SNDHWM, 0)  # bounded by max_bytes
            if self._secret_key is not None:
                present_sender(link, self._secret_key)
            with contextlib.suppress(zmq.ZMQError):
                link.connect(address)
                self._links[address] = link
                return link
            link.close()
            return None
        return link
