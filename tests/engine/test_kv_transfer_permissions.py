"""Permissions of KV transfers over real sockets: a transfer needs its token and belongs to the connection that began
it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
import zmq
from structlog.testing import capture_logs

from moiety_engine.config import KvTransport
from moiety_engine.kv_transfer.messages import Begin, Cancel, End, KvChunk, Received, Refused, ToReceiver, ToSender
from moiety_engine.kv_transfer.peer_authentication import present_sender
from moiety_engine.kv_transfer.receiver_thread import MAX_MESSAGE_BYTES, NOT_ALLOWED, ReceiverThread
from moiety_engine.kv_transfer.sender_thread import ANSWER_S, SenderThread
from moiety_engine.kv_transfer.staging_buffer import Progress, StagingBuffer, prompt_hash
from moiety_engine.kv_transfer.transports import SharedMemoryTransport, open_segment
from moiety_engine.model.batch import KvCache
from moiety_kernels.kv_store.caches import LayerCache
from moiety_wire.roles import KvHandoff, transfer_token

from .kv_announcements import begin_of, share_of

NUM_TOKENS = 4
WAIT_MS = 30_000


class Link:
    """A connection that speaks as senders do."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, key: bytes | None = None) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if key is not None:
            present_sender(self.socket, key)
        self.socket.connect(address)

    def send(self, message: ToReceiver, *frames: bytes) -> None:
        self.socket.send_multipart([msgspec.msgpack.encode(message), *frames])

    def answer(self) -> ToSender:
        assert self.socket.poll(WAIT_MS), "no answer came"
        return msgspec.msgpack.decode(self.socket.recv(), type=ToSender)

    def ask(self, message: ToReceiver) -> ToSender:
        self.send(message)
        return self.answer()


Connect = Callable[..., Link]


@pytest.fixture
def connect() -> Iterator[Connect]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    links: list[Link] = []

    def make(address: str, key: bytes | None = None) -> Link:
        links.append(Link(context, address, key))
        return links[-1]

    yield make
    for link in links:
        link.socket.close()
    context.term()


@pytest.fixture
def kv() -> KvCache:
    both = torch.zeros(2, 4, 2, 4, 8)
    return KvCache((LayerCache(both[0], both[1], None, None),), 4, 4)


@pytest.fixture
def staging_buffer(kv: KvCache) -> StagingBuffer:
    found = StagingBuffer(1 << 20, share_of(kv))
    found.serve(kv)
    return found


@pytest.fixture
def receiver(staging_buffer: StagingBuffer) -> Iterator[ReceiverThread]:
    found = ReceiverThread("tcp://127.0.0.1:0", staging_buffer, None)
    yield found
    found.close()


def announced(kv: KvCache, transfer_id: str, token: str) -> Begin:
    return begin_of(kv, transfer_id, NUM_TOKENS, prompt_hash(range(NUM_TOKENS)), token=token)


def test_a_kv_transfer_without_a_token_is_refused(
    connect: Connect, receiver: ReceiverThread, staging_buffer: StagingBuffer, kv: KvCache
) -> None:
    stranger = connect(receiver.address)
    for token in ("", "ü" * 16, transfer_token("guessed", "a"), transfer_token(receiver.secret, "b")):
        assert stranger.ask(announced(kv, "a", token)) == Refused("a", NOT_ALLOWED)
        assert staging_buffer.claim("a") is Progress.UNKNOWN, "it keeps nobody else from beginning"
    own = connect(receiver.address)
    begin = announced(kv, "a", transfer_token(receiver.secret, "a"))
    own.send(begin)
    own.send(KvChunk("a", 0, 0, NUM_TOKENS, 0), secrets.token_bytes(begin.num_bytes))
    assert own.ask(End("a")) == Received("a")


def test_another_connection_neither_writes_into_a_transfer_nor_ends_it(
    connect: Connect, receiver: ReceiverThread, staging_buffer: StagingBuffer, kv: KvCache
) -> None:
    own, other = connect(receiver.address), connect(receiver.address)
    begin = announced(kv, "a", transfer_token(receiver.secret, "a"))
    data = torch.arange(begin.num_bytes // 4, dtype=torch.float32).numpy().tobytes()
    own.send(begin)
    own.send(KvChunk("a", 0, 0, NUM_TOKENS, 0), data)
    assert isinstance(own.ask(End("nothing")), Refused), "the first two were taken"
    other.send(KvChunk("a", 0, 0, NUM_TOKENS, 0), bytes(len(data)))
    other.send(Cancel("a"))
    assert isinstance(other.ask(End("a")), Refused)
    assert isinstance(other.ask(begin), Refused)
    assert own.ask(End("a")) == Received("a")
    own.send(KvChunk("a", 0, 0, NUM_TOKENS, 0), bytes(len(data)))
    assert isinstance(own.ask(End("nothing")), Refused)
    assert staging_buffer.arrival("a", begin.prompt_hash) is not None
    staging_buffer.load("a", 0, [[2]], [0])
    stored = torch.cat([part[2].flatten() for part in kv.layers[0].parts])
    assert sorted(stored.tolist()) == list(range(begin.num_bytes // 4))


def test_a_message_that_is_too_long_is_not_decoded(
    connect: Connect, receiver: ReceiverThread, staging_buffer: StagingBuffer, kv: KvCache
) -> None:
    link = connect(receiver.address)
    begin = announced(kv, "a", transfer_token(receiver.secret, "a"))
    with capture_logs() as logs:
        link.send(msgspec.structs.replace(begin, rotation="r" * MAX_MESSAGE_BYTES))
        link.socket.send(b"\xc1")
        assert isinstance(link.ask(End("nothing")), Refused), "the first two were taken"
    assert [one["event"] for one in logs] == ["kv_message_undecodable"] * 2
    assert staging_buffer.claim("a") is Progress.UNKNOWN


def test_shared_memory_keeps_its_size_while_the_receiver_reads_it() -> None:
    shared = SharedMemoryTransport(4096)
    opened = open_segment(shared.segment, 4096)
    descriptor = int(shared.segment.rpartition("/")[2])
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    assert not opened.any()
    shared.close()


def test_shared_memory_that_can_be_made_smaller_is_refused(staging_buffer: StagingBuffer, kv: KvCache) -> None:
    descriptor = os.memfd_create("moiety-kv")  # whose seals are fixed
    try:
        begin = announced(kv, "a", "")
        os.ftruncate(descriptor, begin.num_bytes)
        segment = f"/proc/{os.getpid()}/fd/{descriptor}"
        reason = staging_buffer.begin(msgspec.structs.replace(begin, segment=segment, transport="memory"))
        assert "its shared memory cannot be opened" in reason
    finally:
        os.close(descriptor)


def test_a_token_is_good_for_one_transfer(
    connect: Connect, receiver: ReceiverThread, staging_buffer: StagingBuffer, kv: KvCache
) -> None:
    link = connect(receiver.address)
    begin = announced(kv, "a", transfer_token(receiver.secret, "a"))
    link.send(begin)
    link.send(Cancel("a"))
    assert link.ask(begin) == Refused("a", "a transfer with this id has ended already")
    assert staging_buffer.claim("a") is Progress.LOST


def test_with_keys_a_link_without_one_or_with_another_is_not_even_heard(
    connect: Connect, staging_buffer: StagingBuffer, kv: KvCache
) -> None:
    key = zmq.curve_keypair()[1]
    receiver = ReceiverThread("tcp://127.0.0.1:0", staging_buffer, key)
    try:
        begin = announced(kv, "a", transfer_token(receiver.secret, "a"))
        strangers = [connect(receiver.address), connect(receiver.address, zmq.curve_keypair()[1])]
        for stranger in strangers:
            stranger.send(begin)
        own = connect(receiver.address, key)
        own.send(begin)
        own.send(KvChunk("a", 0, 0, NUM_TOKENS, 0), bytes(begin.num_bytes))
        assert own.ask(End("a")) == Received("a")
        assert not any(stranger.socket.poll(0) for stranger in strangers)
    finally:
        receiver.close()


def test_a_transfer_that_is_refused_after_its_end_leaves_its_room_to_others(
    receiver: ReceiverThread, kv: KvCache
) -> None:
    begin = announced(kv, "a", transfer_token(receiver.secret, "a"))
    sending = SenderThread(KvTransport.TCP, begin.num_bytes, None)
    assert sending.begin(KvHandoff("a", receiver.address), begin) == ""
    assert sending.end("a", receiver.address) == ""  # without a chunk
    until_s = time.monotonic() + ANSWER_S / 2
    while sending.begin(KvHandoff("b", receiver.address), msgspec.structs.replace(begin, transfer_id="b")):
        assert time.monotonic() < until_s, "the transfer keeps its room until it times out"
        time.sleep(0.001)
    sending.close()


def test_each_start_of_an_engine_has_a_secret_of_its_own(
    staging_buffer: StagingBuffer, receiver: ReceiverThread
) -> None:
    other = ReceiverThread("tcp://127.0.0.1:0", staging_buffer, None)
    other.close()
    assert len({receiver.secret, other.secret, ""}) == 3
    assert transfer_token("", "a") == ""
