"""Requests between threads of ranks over the rendezvous' store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from moiety_engine.distribution.rank_requests import (
    RankAnswers,
    RankRequests,
    RequestFailed,
    RequestsClosed,
    RequestTimedOut,
    exchange_over_store,
)

KEY = b"k" * 32


@pytest.fixture
def store() -> Iterator[Any]:
    yield TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def test_each_request_gets_its_answer_whatever_the_order(store: Any, pool: ThreadPoolExecutor) -> None:
    def handle(message: bytes) -> tuple[ThreadPoolExecutor, Callable[[], bytes]]:
        return pool, message.upper

    answers, requests = RankAnswers(store, KEY, 1, handle), RankRequests(store, KEY)
    sent = [(requests.send(1, bytes([97 + place])), bytes([65 + place])) for place in range(5)]
    assert [requests.answer(1, number) for number, _ in reversed(sent)] == [one for _, one in reversed(sent)]
    answers.close()
    requests.close()
    with pytest.raises(RequestsClosed, match="the engine ends"):
        requests.answer(1, 6)


def test_what_a_stranger_writes_into_the_store_is_ignored(store: Any, pool: ThreadPoolExecutor) -> None:
    done: list[bytes] = []

    def handle(message: bytes) -> tuple[ThreadPoolExecutor, Callable[[], bytes]]:
        done.append(message)
        return pool, lambda: message

    store.set("request/1/1", b"\0" * 32 + b"delete everything")
    answers, requests = RankAnswers(store, KEY, 1, handle), RankRequests(store, KEY)
    assert requests.answer(1, requests.send(1, b"question"), timeout_s=60) == b"question"
    assert done == [b"question"]
    answers.close()
    number = requests.send(2, b"question")
    store.set(f"answer/2/{number}", b"\0" * 32 + b"a lie")
    with pytest.raises(RequestTimedOut):
        requests.answer(2, number, timeout_s=0.0)


def test_a_request_that_fails_gets_an_error_answer_and_later_ones_are_executed(
    store: Any, pool: ThreadPoolExecutor
) -> None:
    def handle(message: bytes) -> tuple[ThreadPoolExecutor, Callable[[], bytes]]:
        if message == b"unreadable":
            raise ValueError("it cannot be decoded")
        return pool, lambda: bytes([7 // len(message)])

    answers, requests = RankAnswers(store, KEY, 1, handle), RankRequests(store, KEY)
    unreadable, empty, good = (requests.send(1, message) for message in (b"unreadable", b"", b"question"))
    with pytest.raises(RequestFailed, match="rank 1: it cannot be decoded"):
        requests.answer(1, unreadable, timeout_s=60)
    with pytest.raises(RequestFailed, match="division"):
        requests.answer(1, empty, timeout_s=60)
    assert requests.answer(1, good, timeout_s=60) == b"\0"
    answers.close()


def test_a_rank_that_does_not_answer_is_not_waited_for_without_limit(store: Any) -> None:
    requests = RankRequests(store, KEY)
    with pytest.raises(RequestTimedOut, match="answer/1/1"):
        requests.answer(1, requests.send(1, b"question"), timeout_s=0.0)
    with pytest.raises(RequestTimedOut, match="name/1"):
        exchange_over_store(store, KEY, "name", 0, range(2), bytes, timeout_s=0.0)


def test_ranks_exchange_values(store: Any, pool: ThreadPoolExecutor) -> None:
    made = [partial(bytes, [rank]) for rank in range(3)]
    found = [pool.submit(exchange_over_store, store, KEY, "name", rank, range(3), made[rank]) for rank in range(3)]
    assert [one.result(60) for one in found] == [[b"\0", b"\1", b"\2"]] * 3


def test_a_rank_that_has_no_value_lets_no_other_wait(store: Any, pool: ThreadPoolExecutor) -> None:
    def fail() -> bytes:
        raise OSError("the checkpoint cannot be read")

    failing = pool.submit(exchange_over_store, store, KEY, "name", 0, range(2), fail)
    waiting = pool.submit(exchange_over_store, store, KEY, "name", 1, range(2), lambda: b"value")
    with pytest.raises(OSError, match="the checkpoint cannot be read"):
        failing.result(60)
    with pytest.raises(RequestFailed, match="rank 0: the checkpoint cannot be read"):
        waiting.result(60)
