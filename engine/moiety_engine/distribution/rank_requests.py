"""Requests of rank 0's threads to threads of other ranks, beside the steps, over the store of the rendezvous.

Control messages are executed in order and must not wait for a disk or a network; these requests can wait. Everyone who
reaches the store can write to it, so values carry a keyed digest. The key is sent to the ranks by a control message.
"""

from __future__ import annotations

import hmac
import threading
import time
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
_DONE, _FAILED = b"\0", b"\1"  # first byte of an answer
ANSWER_S = 120.0  # longest wait for an answer: far longer than a disk takes for one file
EXCHANGE_S = 60.0

log = structlog.get_logger()


class RequestsClosed(OSError):
    """The requests were closed, or the store of rank 0 is gone, before another rank answered."""


class RequestFailed(OSError):
    """Another rank could not execute a request."""


class RequestTimedOut(OSError):
    """Another rank has not answered in time. It may still be executing the request."""


class _Clones:
    """One connection to the store for each thread: a connection that waits serves no other thread."""

    def __init__(self, store: Store, key: bytes) -> None:
        self._store: Any = store
        self._key = key
        self._local, self._lock = threading.local(), threading.Lock()
        self._closed = threading.Event()
        self._has_warned = False

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

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """End the waits of all threads."""
        self._closed.set()

    def take(self, name: str, timeout_s: float | None = None, *, removes: bool = True) -> bytes:
        """Wait for a value, and return it. A value that no rank of this engine has signed is ignored.

        `timeout_s`: None waits until the connections are closed. Raises RequestsClosed, RequestTimedOut.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.is_closed:
            try:
                connection = self.connection()
                connection.wait([name], _POLL)
                signed = bytes(connection.get(name))
                digest, value = signed[:_DIGEST_BYTES], signed[_DIGEST_BYTES:]
                if hmac.compare_digest(digest, self._digest(name, value)):
                    if removes:
                        connection.delete_key(name)
                    return value
                self.warn_ignored(name, "it is not signed by a rank of this engine")
                self._closed.wait(_POLL.total_seconds())
            except DistStoreError:
                pass  # not there yet
            except (DistError, RuntimeError) as exc:
                raise RequestsClosed(f"the store of rank 0 cannot be reached: {exc}") from exc
            if until_s is not None and time.monotonic() >= until_s:
                raise RequestTimedOut(f"another rank has not sent {name} within {timeout_s} s; see its log")
        raise RequestsClosed("the engine ends")

    def warn_ignored(self, name: str, reason: str) -> None:
        """Log that a value is ignored. Only the first is logged: any process that reaches the store can write many."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "rank_value_ignored",
                name=name,
                reason=reason,
                advice="let only the ranks of this engine reach the rendezvous port, and run one release on all",
            )

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

    def answer(self, rank: int, number: int, timeout_s: float = ANSWER_S) -> bytes:
        """Wait for the answer to a request, and return it.

        Raises RequestsClosed, RequestFailed if the rank could not execute it, and RequestTimedOut.
        """
        return _value_of(rank, self._clones.take(_answer(rank, number), timeout_s))

    def close(self) -> None:
        """End the waits of all threads."""
        self._clones.close()


class RequestHandler(Protocol):
    """Executes a request in a thread of the pool that it names. What it raises is sent as an error answer."""

    def __call__(self, message: bytes) -> tuple[ThreadPoolExecutor, Callable[[], bytes]]: ...


class RankAnswers:
    """Another rank's end: a thread that takes requests in order and has them executed, until `close`."""

    def __init__(self, store: Store, key: bytes, rank: int, handler: RequestHandler) -> None:
        self._clones, self._rank, self._handler = _Clones(store, key), rank, handler
        self._thread = threading.Thread(target=self._run, name="rank-requests", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; requests that are being executed end by themselves."""
        self._clones.close()
        self._thread.join()

    def _run(self) -> None:
        number = 1
        try:
            while True:
                message = self._clones.take(_request(self._rank, number))
                try:
                    pool, work = self._handler(message)
                    pool.submit(work).add_done_callback(self._sender(number))
                except Exception as exc:  # the root of a request: it is answered, and later ones are taken
                    self._clones.warn_ignored(_request(self._rank, number), f"{type(exc).__name__}: {exc}")
                    self._clones.put(_answer(self._rank, number), _error_answer(exc))
                number += 1
        except RequestsClosed as exc:
            if not self._clones.is_closed:
                log.warning("rank_requests_ended", reason=str(exc), advice="see the log of rank 0")

    def _sender(self, number: int) -> Callable[[Future[bytes]], None]:
        def send(done: Future[bytes]) -> None:
            try:
                answer = _DONE + done.result()
            except Exception as exc:  # the root of a task
                log.warning("rank_request_failed", reason=repr(exc), advice="see the log of rank 0")
                answer = _error_answer(exc)
            try:
                self._clones.put(_answer(self._rank, number), answer)
            except RequestsClosed as exc:
                log.warning("rank_request_not_answered", reason=str(exc), advice="see the log of rank 0")

        return send


def exchange_over_store(
    store: Store,
    key: bytes,
    name: str,
    rank: int,
    ranks: range,
    make: Callable[[], bytes],
    timeout_s: float = EXCHANGE_S,
) -> list[bytes]:
    """Publish the value that `make` returns under a name, once per group, and return those of all `ranks`.

    What `make` raises is raised here, and RequestFailed on the other ranks, which do not wait for a value. Raises
    RequestsClosed, and RequestTimedOut if a rank has published nothing after `timeout_s`.
    """
    clones = _Clones(store, key)
    try:
        value = _DONE + make()
    except Exception as exc:
        clones.put(f"{name}/{rank}", _error_answer(exc))
        raise
    clones.put(f"{name}/{rank}", value)
    return [_value_of(one, clones.take(f"{name}/{one}", timeout_s, removes=False)) for one in ranks]


def _value_of(rank: int, answer: bytes) -> bytes:
    """Return the value that a rank answered with. Raises RequestFailed for its error."""
    if answer[:1] != _DONE:
        raise RequestFailed(f"rank {rank}: {answer[1:].decode(errors='replace')}")
    return answer[1:]


def _error_answer(exc: BaseException) -> bytes:
    return _FAILED + (str(exc) or type(exc).__name__).encode()


def _request(rank: int, number: int) -> str:
    return f"request/{rank}/{number}"


def _answer(rank: int, number: int) -> str:
    return f"answer/{rank}/{number}"
