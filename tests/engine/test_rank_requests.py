"""Requests between threads of ranks over the rendezvous' store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from moiety_engine.distribution.rank_requests import RankAnswers, RankRequests, RequestsClosed, exchange

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


def test_what_a_stranger_writes_into_the_store_is_refused(store: Any, pool: ThreadPoolExecutor) -> None:
    done: list[bytes] = []

    def handle(message: bytes) -> tuple[ThreadPoolExecutor, Callable[[], bytes]]:
        done.append(message)
        return pool, lambda: message

    store.set("request/1/1", b"\0" * 32 + b"delete everything")
    answers = RankAnswers(store, KEY, 1, handle)
    answers.join(60)
    assert not done
    requests = RankRequests(store, KEY)
    number = requests.send(2, b"question")
    store.set(f"answer/2/{number}", b"\0" * 32 + b"a lie")
    with pytest.raises(RequestsClosed, match="not from a rank of this engine"):
        requests.answer(2, number)


def test_ranks_exchange_values(store: Any, pool: ThreadPoolExecutor) -> None:
    found = [pool.submit(exchange, store, KEY, "name", rank, range(3), bytes([rank])) for rank in range(3)]
    assert [one.result(60) for one in found] == [[b"\0", b"\1", b"\2"]] * 3
