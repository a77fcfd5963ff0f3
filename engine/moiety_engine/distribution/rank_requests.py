"""Requests of rank 0's threads to threads of other ranks, beside the steps, over the store of the rendezvous.

Control messages are executed in order and must not wait for a disk or a network; these requests can wait. Everyone who
reaches the store can write to it, so values carry a keyed digest. The key is sent to the ranks by a control message.
"""

from __future__ import annotations

import hmac
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import structlog
from torch.distributed import DistError, DistStoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

_POLL = timedelta(milliseconds=250)  # interval at which a waiting thread looks whether its end was asked for
_DIGEST_BYTES = 32

log = structlog.get_logger()


class RequestsClosed(OSError):
    """The requests were closed, or the store of rank 0 is gone, before another rank answered."""


class _Clones:
    """One connection to the store for each thread: a connection that waits serves no other thread."""

    def __init__(self, store: Store, key: bytes) -> None:
        self._store: Any = store
        self._key = key
        self._local, self._lock = threading.local(), threading.Lock()
        self.is_closed = False

    def connection(self) -> Any:  # torch's stubs lack `clone`, and `set` of bytes
        """Return this thread's connection."""
        if not hasattr(self._local, "store"):
            with self._lock:
                self._local.store = self._store.clone()
        return self._local.store

    def put(self, name: str, value: bytes) -> None:
        """Publish a value. Raises RequestsClosed."""
        try:
            self.connection().set(name, self._digest(name, value) + value)
        except (DistError, RuntimeError) as exc:
            raise RequestsClosed(f"the store of rank 0 cannot be reached: {exc}") from exc

    def take(self, name: str, *, removes: bool = True) -> bytes:
        """Wait for a value, however long, and return it. Raises RequestsClosed, also for a value of a stranger."""
        while not self.is_closed:
            try:
                connection = self.connection()
                connection.wait([name], _POLL)
                signed = bytes(connection.get(name))
                if removes:
                    connection.delete_key(name)
            except DistStoreError:
                continue  # not there yet
            except (DistError, RuntimeError) as exc:
                raise RequestsClosed(f"the store of rank 0 cannot be reached: {exc}") from exc
            digest, value = signed[:_DIGEST_BYTES], signed[_DIGEST_BYTES:]
            if not hmac.compare_digest(digest, self._digest(name, value)):
                raise RequestsClosed(f"the value {name} in the store of rank 0 is not from a rank of this engine")
            return value
        raise RequestsClosed("the engine ends")

    def _digest(self, name: str, value: bytes) -> bytes:
        return blake2b(name.encode() + b"\0" + value, key=self._key, digest_size=_DIGEST_BYTES).digest()


class RankRequests:
    """Rank 0's end. All threads may call it."""

    def __init__(self, store: Store, key: bytes) -> None:
        self._clones = _Clones(store, key)
        self._lock = threading.Lock()
        self._num_sent: dict[int, int] = {}

    def send(self, rank: int, message: bytes) -> int:
        """Send a request and return its number. Raises RequestsClosed."""
        with self._lock:
            number = self._num_sent[rank] = self._num_sent.get(rank, 0) + 1
        self._clones.put(_request(rank, number), message)
        return number

    def answer(self, rank: int, number: int) -> bytes:
        """Wait for the answer to a request, however long, and return it. Raises RequestsClosed."""
        return self._clones.take(_answer(rank, number))

    def close(self) -> None:
        """End the waits of all threads."""
        self._clones.is_closed = True


class RequestHandler(Protocol):
    """Executes a request in a thread of the pool that it names."""

    def __call__(self, message: bytes) -> tuple[ThreadPoolExecutor, Callable[[], bytes]]: ...


class RankAnswers:
    """Another rank's end: a thread that takes requests in order and has them executed, until `close`."""

    def __init__(self, store: Store, key: bytes, rank: int, handler: RequestHandler) -> None:
        self._clones, self._rank, self._handler = _Clones(store, key), rank, handler
        self._thread = threading.Thread(target=self._run, name="rank-requests", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; requests that are being executed end by themselves."""
        self._clones.is_closed = True
        self._thread.join()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended by itself, because requests cannot be taken any more."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        number = 1
        try:
            while True:
                message = self._clones.take(_request(self._rank, number))
                pool, work = self._handler(message)
                pool.submit(work).add_done_callback(self._sender(number))
                number += 1
        except RequestsClosed as exc:
            if not self._clones.is_closed:
                log.warning("rank_requests_ended", reason=str(exc), advice="see the log of rank 0")

    def _sender(self, number: int) -> Callable[[Future[bytes]], None]:
        def send(done: Future[bytes]) -> None:
            try:
                self._clones.put(_answer(self._rank, number), done.result())
            except RequestsClosed as exc:
                log.warning("rank_request_not_answered", reason=str(exc), advice="see the log of rank 0")

        return send


def exchange(store: Store, key: bytes, name: str, rank: int, ranks: range, value: bytes) -> list[bytes]:
    """Publish a value under a name, once per group, and return those of all `ranks`. Raises RequestsClosed."""
    clones = _Clones(store, key)
    clones.put(f"{name}/{rank}", value)
    return [clones.take(f"{name}/{one}", removes=False) for one in ranks]


def _request(rank: int, number: int) -> str:
    return f"request/{rank}/{number}"


def _answer(rank: int, number: int) -> str:
    return f"answer/{rank}/{number}"
