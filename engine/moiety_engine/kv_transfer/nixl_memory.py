"""Memory from which NIXL (NVIDIA Inference Xfer Library) reads KV at another engine: by RDMA, TCP or shared memory.

The sender's memory is registered with its agent once. A transfer has a range of it and announces the agent and the
address; the receiver reads each chunk from there once the sender has written and announced it. A random nonce follows
the chunks until the sender frees the range: a receiver that reads it after all chunks has read this transfer, and not
one that got the range later. No agent has a thread of its own, which would use a whole processor: the receiver's
progresses with its calls, the sender's with `progress`. Links between agents are neither authenticated nor encrypted.
The interface is documented in docs/python_api.md of github.com/ai-dynamo/nixl.
"""

from __future__ import annotations

import bisect
import importlib
import logging
import secrets
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import structlog
import torch
from torch import Tensor

from moiety_engine.config import KvTransport, TransferConfig
from moiety_engine.errors import InvalidConfig
from moiety_engine.kv_transfer.messages import RemoteMemory
from moiety_engine.kv_transfer.transports import write_parts

PROGRESS_S = 0.001  # interval at which a sender with open transfers lets its agent progress
NONCE_BYTES = 16
_MAX_AGENTS = 256  # of senders that a receiver remembers

log = structlog.get_logger()


class NixlFailed(Exception):
    """An operation of NIXL failed."""


class _Agent:
    """A NIXL agent with the backend UCX. All threads may call it."""

    def __init__(self) -> None:
        """Create the agent. Raises InvalidConfig if NIXL is not installed or has no UCX."""
        instead = "install it (pip install 'moiety[nixl]'), or use --kv-transport auto"
        try:
            nixl = importlib.import_module("nixl")
        except (ImportError, OSError) as exc:
            raise InvalidConfig(f"--kv-transport nixl needs NIXL, which cannot be imported ({exc}): {instead}") from exc
        logging.getLogger("nixl").setLevel(logging.WARNING)  # its other lines go to the standard output
        found = vars(nixl._bindings).values()
        self._errors: tuple[type[Exception], ...] = tuple(
            one for one in found if isinstance(one, type) and issubclass(one, Exception)
        )
        errors: tuple[type[Exception], ...] = (RuntimeError, *self._errors)
        try:
            strict = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=strict)
            self.library = nixl.nixl_agent(f"moiety-{secrets.token_hex(8)}", config)
        except errors as exc:
            raise InvalidConfig(f"--kv-transport nixl cannot create an agent of NIXL ({exc}): {instead}") from exc
        if "UCX" not in self.library.backends:
            raise InvalidConfig(f"--kv-transport nixl needs NIXL with the backend UCX: {instead}")

    @contextmanager
    def calls(self) -> Iterator[Any]:
        """Yield the library's agent. Raises NixlFailed where it raises an error."""
        try:
            yield self.library
        except self._errors as exc:
            raise NixlFailed(str(exc) or type(exc).__name__) from exc


class NixlSender:
    """Memory of `max_bytes` that other engines read from. The step loop allocates, and the sender thread frees."""

    def __init__(self, max_bytes: int) -> None:
        """Allocate and register the memory. Raises InvalidConfig."""
        self._agent = _Agent()
        self._lock = threading.Lock()
        try:
            self._memory_B = torch.empty(max_bytes + NONCE_BYTES, dtype=torch.uint8)
            with self._agent.calls() as agent:
                self._registered = agent.register_memory(self._memory_B)
                self._metadata: bytes = agent.get_agent_metadata()
        except (NixlFailed, RuntimeError) as exc:
            raise InvalidConfig(
                f"--kv-transport nixl cannot register {max_bytes} bytes ({exc}): set a smaller --kv-buffer-bytes"
            ) from exc
        self._free: list[tuple[int, int]] = [(0, len(self._memory_B))]  # ranges, in order: begin, end

    def allocate(self, num_bytes: int) -> NixlTransport:
        """Return the sender's end of a transfer. Raises OSError if no range is large enough."""
        size = num_bytes + NONCE_BYTES
        with self._lock:
            for place, (begin, end) in enumerate(self._free):
                if end - begin >= size:
                    self._free[place : place + 1] = [(begin + size, end)] if end - begin > size else []
                    return NixlTransport(self, begin, self._memory_B[begin : begin + size], self._metadata)
        raise OSError(f"no {num_bytes} bytes are free in one piece")

    def free(self, begin: int, num_bytes: int) -> None:
        """Free a range, and join it with those beside it."""
        with self._lock:
            place, end = bisect.bisect(self._free, (begin, 0)), begin + num_bytes
            if place < len(self._free) and self._free[place][0] == end:
                end = self._free.pop(place)[1]
            if place and self._free[place - 1][1] == begin:
                place -= 1
                begin = self._free.pop(place)[0]
            self._free.insert(place, (begin, end))

    def progress(self) -> None:
        """Answer the receivers' requests that have arrived."""
        with self._agent.calls() as agent:
            agent.get_new_notifs()


class NixlTransport:
    """Sender's end of a transfer that the receiver reads by NIXL."""

    name = KvTransport.NIXL
    segment = ""

    def __init__(self, sender: NixlSender, begin: int, memory_B: Tensor, metadata: bytes) -> None:
        self._sender, self._begin, self._memory_B = sender, begin, memory_B
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._memory_B[-NONCE_BYTES:] = torch.tensor(list(nonce), dtype=torch.uint8)
        self.memory = RemoteMemory(metadata, memory_B.data_ptr(), nonce)
        self._is_closed = False

    def put(self, offset: int, parts: Sequence[Tensor]) -> list[memoryview]:
        write_parts(self._memory_B, offset, parts)
        return []

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._memory_B[-NONCE_BYTES:] = 0  # before another transfer can write here
            self._sender.free(self._begin, len(self._memory_B))


class NixlReceiver:
    """Agent of one receiver, with the agents of the senders that it knows. All threads may call it."""

    def __init__(self) -> None:
        """Create the agent. Raises InvalidConfig."""
        self.agent = _Agent()
        self._lock = threading.Lock()
        self._names: dict[bytes, str] = {}  # by metadata
        self._unfinished = deque[NixlReads]()

    def open(self, memory: RemoteMemory, num_bytes: int) -> NixlReads:
        """Return the reads of one transfer, into a buffer of their own. Raises NixlFailed, or RuntimeError."""
        with self._lock:
            for _ in range(len(self._unfinished)):
                self._unfinished.popleft().close()
            name = self._names.get(memory.agent)
            if name is None:
                with self.agent.calls() as agent:
                    found = agent.add_remote_agent(memory.agent)
                name = self._names[memory.agent] = found if isinstance(found, str) else bytes(found).decode()
                if len(self._names) > _MAX_AGENTS:
                    self._forget(next(iter(self._names)))
        return NixlReads(self, name, memory, num_bytes)

    def forget(self, memory: RemoteMemory) -> None:
        """Forget the agent of a sender that has failed; its next transfer adds it anew."""
        with self._lock:
            self._forget(memory.agent)

    def keep(self, reads: NixlReads) -> None:
        """Keep reads that could not be ended yet, with the memory that they write into."""
        self._unfinished.append(reads)

    def _forget(self, metadata: bytes) -> None:
        name = self._names.pop(metadata, None)
        if name is not None:
            try:
                with self.agent.calls() as agent:
                    agent.remove_remote_agent(name)
            except NixlFailed as exc:
                log.warning("nixl_agent_not_removed", reason=str(exc), advice="restart the engine if this repeats")


class NixlReads:
    """Reads of one transfer. The receiver thread begins them; the step loop may close them."""

    def __init__(self, receiver: NixlReceiver, name: str, memory: RemoteMemory, num_bytes: int) -> None:
        """Allocate and register the buffer. Raises NixlFailed, or RuntimeError if memory is short."""
        self._receiver, self._name, self._memory = receiver, name, memory
        self._memory_B = torch.empty(num_bytes + NONCE_BYTES, dtype=torch.uint8)
        self.buffer_B = self._memory_B[:num_bytes]
        self._lock = threading.Lock()
        self._left: list[Any] = []  # handles of reads that have not been seen to end
        self._is_nonce_read = self._is_closed = False
        with receiver.agent.calls() as agent:
            self._registered = agent.register_memory(self._memory_B)

    def read(self, offset: int, num_bytes: int) -> bool:
        """Begin to read a range of the sender's memory to the same place of the buffer; return False if it failed."""
        with self._lock:
            if self._is_closed:
                return False
            if not num_bytes:
                return True
            try:
                self._begin_read(offset, num_bytes)
            except NixlFailed as exc:
                self._note(exc)
                return False
        return True

    def finish(self) -> bool | None:
        """Return whether all was read before the sender freed the memory; None while reads are under way.

        Call it again in that case, and no other read begins any longer.
        """
        with self._lock:
            if self._is_closed:
                return False
            try:
                self._take_ended()
                if not self._left and not self._is_nonce_read:
                    self._is_nonce_read = True
                    self._begin_read(len(self.buffer_B), NONCE_BYTES)
            except NixlFailed as exc:
                self._note(exc)
                return False
            if self._left:
                return None
            if self._memory_B[-NONCE_BYTES:].numpy().tobytes() == self._memory.nonce:
                return True
        log.warning(
            "kv_read_too_late",
            num_bytes=len(self.buffer_B),
            advice="check whether this engine was stopped for long, or its network with the prefill engine is slow",
        )
        return False

    def close(self) -> None:
        """End the reads, and release the memory; where a read cannot be ended yet, a later call does it."""
        with self._lock:
            self._is_closed = True
            self._left = [handle for handle in self._left if not self._release(handle)]
            if self._left:
                self._receiver.keep(self)
                return
            registered, self._registered = self._registered, None
            if registered is not None:
                try:
                    with self._receiver.agent.calls() as agent:
                        agent.deregister_memory(registered)
                except NixlFailed as exc:  # the step loop calls this, and needs nothing of it
                    advice = "restart the engine if this repeats: the memory stays registered"
                    log.warning("nixl_memory_not_deregistered", reason=str(exc), advice=advice)

    def _begin_read(self, offset: int, num_bytes: int) -> None:
        """Begin to read a range of the sender's memory. Raises NixlFailed."""
        with self._receiver.agent.calls() as agent:
            own, other = (
                agent.get_xfer_descs([(address + offset, num_bytes, 0)], "DRAM")
                for address in (self._memory_B.data_ptr(), self._memory.address)
            )
            handle = agent.initialize_xfer("READ", own, other, self._name)
            self._left.append(handle)
            agent.transfer(handle)
        self._take_ended()

    def _take_ended(self) -> None:
        """Release the reads that have ended. Raises NixlFailed if one has failed."""
        left: list[Any] = []
        with self._receiver.agent.calls() as agent:
            for handle in self._left:
                state = agent.check_xfer_state(handle)
                if state == "ERR":
                    raise NixlFailed("a read failed")
                if state != "DONE" or not self._release(handle):
                    left.append(handle)
        self._left = left

    def _release(self, handle: Any) -> bool:
        try:
            with self._receiver.agent.calls() as agent:
                agent.release_xfer_handle(handle)
        except NixlFailed:  # it is under way: the library ends it later
            return False
        return True

    def _note(self, exc: NixlFailed) -> None:
        log.warning("kv_read_failed", reason=str(exc), advice="check whether the prefill engine and its network are up")
        self._receiver.forget(self._memory)


def sender_of(config: TransferConfig, max_bytes: int) -> NixlSender | None:
    """Return the memory that KV is read from; None with another transport. Raises InvalidConfig."""
    return NixlSender(max_bytes) if config.transport is KvTransport.NIXL else None


def receiver_of(config: TransferConfig) -> NixlReceiver | None:
    """Return what reads KV from senders; None with another transport. Raises InvalidConfig."""
    return NixlReceiver() if config.transport is KvTransport.NIXL else None
