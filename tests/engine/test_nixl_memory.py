"""KV that is read by NIXL: the package's own agents where it is installed, and a stand-in with the same calls."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from moiety_engine.config import KvTransport, TransferConfig
from moiety_engine.errors import InvalidConfig
from moiety_engine.kv_transfer.messages import Begin, KvChunk, RemoteMemory
from moiety_engine.kv_transfer.nixl_memory import (
    PROGRESS_S,
    NixlFailed,
    NixlReads,
    NixlReceiver,
    NixlSender,
    NixlTransport,
    receiver_of,
)
from moiety_engine.kv_transfer.sender_thread import SenderThread
from moiety_engine.kv_transfer.staging_buffer import STALLED_S, UNCLAIMED_S, Progress, StagingBuffer
from moiety_engine.model.batch import KvCache
from moiety_kernels.kv_store.caches import LayerCache
from moiety_wire.roles import KvHandoff

from .kv_announcements import begin_of, share_of
from .nixl_stand_in import Agent, BackendError, stand_in

NUM_TOKENS = 4


@pytest.fixture(params=["stand-in", "installed"])
def nixl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Provide the package, and return which one."""
    if request.param == "stand-in":
        monkeypatch.setitem(sys.modules, "nixl", stand_in())
    else:
        pytest.importorskip("nixl")
    return str(request.param)


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Agent]]:
    """Provide the stand-in, and return its agents."""
    monkeypatch.setitem(sys.modules, "nixl", stand_in())
    yield Agent
    Agent.everyone.clear()


@contextlib.contextmanager
def progressing(sender: NixlSender) -> Iterator[None]:
    """Let the sender's agent progress meanwhile, as the sender thread does."""
    ended = threading.Event()

    def progress() -> None:
        while not ended.wait(PROGRESS_S):
            sender.progress()

    thread = threading.Thread(target=progress)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def finish(reads: NixlReads) -> bool:
    """Wait for the reads, and return whether they have ended well."""
    while (ended := reads.finish()) is None:
        pass
    return ended


def end(staging_buffer: StagingBuffer, transfer_id: str = "a") -> bool:
    """End a transfer, and return whether it is complete."""
    while (ended := staging_buffer.end(transfer_id)) is None:
        pass
    return ended


def announced(transport: NixlTransport, kv: KvCache, transfer_id: str = "a") -> Begin:
    return begin_of(kv, transfer_id, NUM_TOKENS, transport=KvTransport.NIXL.value, memory=transport.memory)


@pytest.fixture
def kv() -> KvCache:
    both = torch.zeros(2, 4, 2, 4, 8)
    return KvCache((LayerCache(both[0], both[1], None, None),), 4, 4)


def staging_of(kv: KvCache, nixl: NixlReceiver | None) -> StagingBuffer:
    staging_buffer = StagingBuffer(1 << 20, share_of(kv), nixl)
    staging_buffer.serve(kv)
    return staging_buffer


def test_chunks_are_read_from_the_senders_memory(nixl: str, kv: KvCache) -> None:
    sender = NixlSender(1 << 16)
    first, second = sender.allocate(4096), sender.allocate(8192)
    data = torch.arange(8192, dtype=torch.int64).to(torch.uint8)
    second.put(0, [data[:1000], data[1000:5000]])
    reads = NixlReceiver().open(second.memory, 8192)
    with progressing(sender):
        assert reads.read(0, 5000)
        second.put(5000, [data[5000:]])
        assert reads.read(5000, 3192) and reads.read(8192, 0) and finish(reads)
    assert torch.equal(reads.buffer_B, data)
    reads.close()
    assert not reads.read(0, 1) and not finish(reads)
    first.close()
    second.close()
    second.close()


def test_a_transfer_through_the_staging_buffer_is_there_once_all_chunks_are_read(nixl: str, kv: KvCache) -> None:
    sender, staging_buffer = NixlSender(1 << 16), staging_of(kv, NixlReceiver())
    begin = begin_of(kv, "a", NUM_TOKENS)
    transport = sender.allocate(begin.num_bytes)
    begin = announced(transport, kv)
    assert staging_buffer.begin(begin) == ""
    rows = torch.rand(begin.num_bytes // 4)
    transport.put(0, [rows])
    staging_buffer.put(KvChunk("a", 0, 0, NUM_TOKENS, 0), [])
    with progressing(sender):
        assert end(staging_buffer)
    assert staging_buffer.claim("a") is Progress.THERE
    staging_buffer.load("a", 0, [[2]], (0,))
    layer = kv.layers[0]
    assert isinstance(layer, LayerCache)
    got = torch.cat([layer.k_NGPd[2].transpose(0, 1).reshape(-1), layer.v_NGPd[2].transpose(0, 1).reshape(-1)])
    assert torch.equal(got, rows)
    staging_buffer.drop("a")
    transport.close()


def test_kv_sent_by_nixl_is_refused_without_the_option_at_the_receiver(agents: type[Agent], kv: KvCache) -> None:
    begin = announced(NixlSender(1 << 16).allocate(1 << 10), kv)
    assert "start this engine with --kv-transport nixl" in staging_of(kv, None).begin(begin)
    staging_buffer = staging_of(kv, NixlReceiver())
    assert "is unknown" in staging_buffer.begin(msgspec.structs.replace(begin, transport="tcp"))
    assert begin.memory is not None
    memory = msgspec.structs.replace(begin.memory, agent=b"nobody")
    other = msgspec.structs.replace(begin, transfer_id="b", memory=memory)
    assert "cannot be read by NIXL (unknown agent)" in staging_buffer.begin(other)
    assert staging_buffer.claim("b") is Progress.LOST


@pytest.mark.parametrize("when", ["chunk", "end"])
def test_a_sender_that_has_ended_loses_its_transfer_and_is_forgotten(
    agents: type[Agent], kv: KvCache, when: str
) -> None:
    sender, receiver = NixlSender(1 << 16), NixlReceiver()
    staging_buffer = staging_of(kv, receiver)
    begin = announced(sender.allocate(begin_of(kv, "a", NUM_TOKENS).num_bytes), kv)
    assert staging_buffer.begin(begin) == ""
    own = agents.everyone[receiver.agent.library.name]
    agents.holds = when == "end"
    if when == "chunk":
        agents.gone.add(begin.memory.agent.decode() if begin.memory else "")
    staging_buffer.put(KvChunk("a", 0, 0, NUM_TOKENS, 0), [])
    agents.gone.add(begin.memory.agent.decode() if begin.memory else "")
    agents.holds = False
    assert not end(staging_buffer) and staging_buffer.claim("a") is Progress.LOST
    assert not own.known and not own.registered and not own.num_open


def test_memory_stays_registered_until_a_read_that_is_under_way_has_ended(agents: type[Agent], kv: KvCache) -> None:
    sender, receiver = NixlSender(1 << 16), NixlReceiver()
    staging_buffer = staging_of(kv, receiver)
    transport = sender.allocate(begin_of(kv, "a", NUM_TOKENS).num_bytes)
    assert staging_buffer.begin(announced(transport, kv)) == ""
    own = agents.everyone[receiver.agent.library.name]
    agents.holds = True
    staging_buffer.put(KvChunk("a", 0, 0, NUM_TOKENS, 0), [])
    staging_buffer.drop("a")
    assert own.registered and own.num_open == 1
    agents.holds = False
    assert staging_buffer.begin(announced(transport, kv, "b")) == ""
    assert len(own.registered) == 1 and own.num_open == 0
    staging_buffer.drop("b")
    assert not own.registered


@pytest.mark.parametrize("when", ["chunk", "end"])
def test_memory_that_the_sender_gave_to_another_transfer_is_not_taken(nixl: str, kv: KvCache, when: str) -> None:
    sender, staging_buffer = NixlSender(1 << 16), staging_of(kv, NixlReceiver())
    num_bytes = begin_of(kv, "a", NUM_TOKENS).num_bytes
    transport = sender.allocate(num_bytes)
    assert staging_buffer.begin(announced(transport, kv)) == ""
    with progressing(sender):
        if when == "end":
            staging_buffer.put(KvChunk("a", 0, 0, NUM_TOKENS, 0), [])
        transport.close()  # the receiver did not answer in time
        other = sender.allocate(num_bytes)
        assert other.memory.address == transport.memory.address
        other.put(0, [torch.rand(num_bytes // 4)])
        if when == "chunk":
            staging_buffer.put(KvChunk("a", 0, 0, NUM_TOKENS, 0), [])
        assert not end(staging_buffer)
    assert staging_buffer.claim("a") is Progress.LOST


def test_other_messages_are_taken_while_the_last_of_a_transfer_is_read(agents: type[Agent], kv: KvCache) -> None:
    sender, clock = NixlSender(1 << 16), [0.0]
    staging_buffer = StagingBuffer(1 << 20, share_of(kv), NixlReceiver(), clock=lambda: clock[0])
    staging_buffer.serve(kv)
    size = begin_of(kv, "a", NUM_TOKENS).num_bytes
    for transfer_id in "ab":
        assert staging_buffer.begin(announced(sender.allocate(size), kv, transfer_id)) == ""
        staging_buffer.put(KvChunk(transfer_id, 0, 0, NUM_TOKENS, 0), [])
    agents.holds = True
    assert staging_buffer.end("a") is None and staging_buffer.claim("a") is Progress.COMING
    agents.holds = False
    assert end(staging_buffer, "b") and end(staging_buffer, "a")
    agents.holds = True
    assert staging_buffer.begin(announced(sender.allocate(size), kv, "c")) == ""
    staging_buffer.put(KvChunk("c", 0, 0, NUM_TOKENS, 0), [])
    assert staging_buffer.end("c") is None
    clock[0] += STALLED_S + 1
    assert staging_buffer.end("c") is False


@pytest.mark.parametrize("ending", ["drop", "cancel", "stalled", "other prompt", "unclaimed", "refused"])
def test_the_other_thread_uses_the_staging_buffer_while_memory_is_deregistered(
    agents: type[Agent], kv: KvCache, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    sender, clock = NixlSender(1 << 16), [0.0]
    staging_buffer = StagingBuffer(1 << 20, share_of(kv), NixlReceiver(), clock=lambda: clock[0])
    staging_buffer.serve(kv)
    size, waited = begin_of(kv, "a", NUM_TOKENS).num_bytes, list[bool]()
    first = announced(sender.allocate(size), kv)

    def deregister(*_: Any) -> None:
        thread = threading.Thread(target=staging_buffer.claim, args=("other",), daemon=True)
        thread.start()
        thread.join(5)
        waited.append(thread.is_alive())

    monkeypatch.setattr(agents, "deregister_memory", deregister)
    if ending == "refused":  # it ends while its memory is registered
        register = agents.register_memory

        def end_meanwhile(agent: Agent, memory: Any) -> Any:
            assert staging_buffer.begin(msgspec.structs.replace(first, num_tokens=0), b"y")
            return register(agent, memory)

        monkeypatch.setattr(agents, "register_memory", end_meanwhile)
    assert bool(staging_buffer.begin(first, b"x")) is (ending == "refused")
    match ending:
        case "drop":
            staging_buffer.drop("a")
        case "cancel":
            staging_buffer.cancel("a", b"x")
        case "stalled":
            clock[0] += STALLED_S + 1
            assert staging_buffer.claim("a") is Progress.LOST
        case "other prompt":
            assert staging_buffer.arrival("a", b"another") is None
        case "unclaimed":
            clock[0] += UNCLAIMED_S + 1
            assert staging_buffer.begin(announced(sender.allocate(size), kv, "b")) == ""
    assert waited == [False]


def test_a_buffer_that_cannot_be_deregistered_does_not_stop_the_step_loop(
    agents: type[Agent], kv: KvCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise BackendError("busy")

    monkeypatch.setattr(agents, "deregister_memory", fail)
    staging_buffer = staging_of(kv, NixlReceiver())
    transport = NixlSender(1 << 16).allocate(begin_of(kv, "a", NUM_TOKENS).num_bytes)
    assert staging_buffer.begin(announced(transport, kv)) == ""
    staging_buffer.drop("a")
    assert staging_buffer.claim("a") is Progress.LOST


def test_the_step_loop_goes_on_while_memory_is_registered(
    agents: type[Agent], kv: KvCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging_buffer, sender = staging_of(kv, NixlReceiver()), NixlSender(1 << 16)
    begin = announced(sender.allocate(begin_of(kv, "a", NUM_TOKENS).num_bytes), kv)
    register, claimed = agents.register_memory, list[Progress]()

    def claim_meanwhile(agent: Agent, memory: Any) -> Any:
        step_loop = threading.Thread(target=lambda: claimed.append(staging_buffer.claim("a")), daemon=True)
        step_loop.start()
        step_loop.join(5)
        return register(agent, memory)

    monkeypatch.setattr(agents, "register_memory", claim_meanwhile)
    assert staging_buffer.begin(begin) == ""
    assert claimed == [Progress.UNKNOWN] and staging_buffer.claim("a") is Progress.COMING


def test_a_failure_of_the_sender_is_logged_once(
    agents: type[Agent], kv: KvCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        raise BackendError("no network")

    monkeypatch.setattr(agents, "get_new_notifs", fail)
    with capture_logs() as said:
        thread = SenderThread(KvTransport.NIXL, 1 << 16, None, NixlSender(1 << 16))
        assert thread.begin(KvHandoff("a", "tcp://127.0.0.1:1", "", ""), begin_of(kv, "a", NUM_TOKENS)) == ""
        while len(calls) < 5:
            pass
        thread.close()
    assert [one["event"] for one in said] == ["nixl_failed"]


@given(st.lists(st.tuples(st.integers(0, 400), st.booleans(), st.integers(0, 20)), max_size=60))
def test_ranges_of_transfers_never_overlap_and_all_memory_is_free_at_the_end(
    steps: list[tuple[int, bool, int]],
) -> None:
    sender = sender_with(1000)
    there: dict[int, NixlTransport] = {}
    for number, (size, frees, which) in enumerate(steps):
        if frees and there:
            there.pop(sorted(there)[which % len(there)]).close()
            continue
        try:
            there[number] = sender.allocate(size)
        except OSError:
            continue
        ranges = sorted((one._begin, one._begin + len(one._memory_B)) for one in there.values() if len(one._memory_B))
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    for one in there.values():
        one.close()
    sender.allocate(1000)


def sender_with(max_bytes: int) -> NixlSender:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "nixl", stand_in())
        return NixlSender(max_bytes)


def test_nixl_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    config = TransferConfig(transport=KvTransport.NIXL)
    with pytest.raises(InvalidConfig, match=r"needs NIXL, which cannot be imported .*--kv-transport auto"):
        receiver_of(config)
    assert receiver_of(TransferConfig()) is None


def test_memory_that_cannot_be_registered_is_refused(agents: type[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise BackendError("no memory")

    monkeypatch.setattr(agents, "register_memory", fail)
    with pytest.raises(InvalidConfig, match="cannot register 100 bytes"):
        NixlSender(100)
    with pytest.raises(NixlFailed, match="unknown agent"):
        NixlReceiver().open(RemoteMemory(b"nobody", 0, b""), 1)
