"""Two hundred clients that hang up at any point: no block leaks, and each authenticated request has one usage row."""

from __future__ import annotations

import json
import random
import re
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

NUM_CLIENTS = 200
DEADLINE_S = 120
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PLACES = ("in headers", "after headers", "in body", "after body", "in answer", "in stream", "in stream", "in stream")
RESET = struct.pack("ii", 1, 0)  # a close with this as SO_LINGER is an RST and not a FIN


@dataclass(frozen=True)
class Client:
    """Where a client hangs up, and what it asked for."""

    number: int
    place: str
    path: str
    body: dict[str, Any]
    cut: float  # how far into its part of the request, as a fraction
    num_bytes: int  # what it reads of a stream
    reset: bool

    @property
    def is_stream(self) -> bool:
        return self.place == "in stream"


@dataclass(frozen=True)
class Left:
    """A disconnected client, with the id of its request and the number of pieces that it received."""

    client: Client
    request_id: str | None
    received_pieces: int


def planned(model: str, rng: random.Random) -> list[Client]:
    clients = []
    for number in range(NUM_CLIENTS):
        place = PLACES[number % len(PLACES)]
        body: dict[str, Any] = {
            "model": model,
            "n": rng.choice([1, 1, 1, 3]),
            "max_tokens": rng.choice([200, 1700]),
            "ignore_eos": True,
            "stream": place == "in stream",
        }
        words = f"number {number} " * rng.choice([1, 10, 60])
        if rng.random() < 0.5:
            path, body["messages"] = CHAT, [{"role": "user", "content": words}]
        else:
            path, body["prompt"] = COMPLETIONS, words
        clients.append(Client(number, place, path, body, rng.random(), rng.randrange(1, 20_000), rng.random() < 0.5))
    rng.shuffle(clients)
    return clients


def send(account: Any, client: Client) -> socket.socket:
    """Connect and send as much as this client does."""
    body = json.dumps(client.body).encode()
    address = urlsplit(account.server.url)
    fields = [f"Host: {address.netloc}", f"Content-Length: {len(body)}"]
    fields += [f"{name}: {value}" for name, value in account.headers.items()]
    head = "\r\n".join([f"POST {client.path} HTTP/1.1", *fields, "", ""]).encode()
    # the blank line is the last thing of a head: without its last byte the server cannot know what is asked
    num_sent = {
        "in headers": int(client.cut * (len(head) - 1)),
        "after headers": len(head),
        "in body": len(head) + 1 + int(client.cut * (len(body) - 2)),
    }.get(client.place, len(head) + len(body))
    connection = socket.socket()
    connection.settimeout(DEADLINE_S)
    if client.place == "not reading":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((address.hostname, address.port))
    connection.sendall((head + body)[:num_sent])
    return connection


def leave(account: Any, client: Client) -> Left:
    """Be this client, from its connection to its end."""
    with send(account, client) as connection:
        received = b""
        if client.is_stream:
            while len(received) < client.num_bytes and b"[DONE]" not in received:
                more = connection.recv(min(4096, client.num_bytes - len(received)))
                assert more, f"the server hung up on {client}: {received[-300:]!r}"
                received += more
        if client.place == "in answer":
            account.server.fresh_load()  # by then the engine is busy with it, or has finished
        if client.is_stream and client.reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    found = re.search(rb'"id": ?"([^"]+)"', received)
    pieces = len(re.findall(rb'"(?:content|text)": ?"[^"]', received))
    return Left(client, found[1].decode() if found else None, pieces)


def test_two_hundred_clients_that_hang_up_leave_a_whole_pool_and_all_their_rows(server: Any, account: Any) -> None:
    before = server.wait_until_idle()
    clients = planned(server.model, random.Random(200))
    with ThreadPoolExecutor(8) as pool:
        left = list(pool.map(lambda client: leave(account, client), clients))

    authenticated = [client for client in clients if client.place != "in headers"]
    rows = {row["request_id"]: row for row in account.settled_rows(len(authenticated))}
    assert {row["outcome"] for row in rows.values()} <= {"disconnected", "length"}
    cut_body = [client for client in authenticated if client.place in ("after headers", "in body")]
    assert sum(row["outcome"] == "disconnected" and not row["output_tokens"] for row in rows.values()) >= len(cut_body)

    known = [one for one in left if one.request_id]
    assert len(known) > NUM_CLIENTS // 4
    for one in known:
        row = rows[one.request_id]
        assert one.client.is_stream and row["endpoint"] == one.client.path
        # a piece of text is at least one token; what was on its way when the client left counts too
        assert one.received_pieces <= row["output_tokens"] <= one.client.body["n"] * one.client.body["max_tokens"]
        if row["outcome"] == "disconnected":
            assert (row["http_status"], row["error_code"]) == (499, "client_disconnected")
    long = [one for one in known if one.client.body["max_tokens"] == 1700]
    assert sum(rows[one.request_id]["outcome"] == "disconnected" for one in long) > len(long) // 2

    after = server.wait_until_idle()
    assert after["engine_id"] == before["engine_id"], "the engine did not live through it"
    assert after["kv_blocks_total"] == before["kv_blocks_total"]
    # the rows have all that the engine generated; the additional one is the request that ended the test
    made = after["output_tokens_total"] - before["output_tokens_total"]
    assert sum(row["output_tokens"] for row in rows.values()) == made - 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_blocks_long_before_its_answer_would_have_ended(
    server: Any, account: Any, stream: bool, until: Any
) -> None:
    """The step counter bounds what ran after the client had left; the answer alone would take 2,000 steps."""
    server.wait_until_idle()
    body = {"model": server.model, "prompt": "on and on", "max_tokens": 2000, "ignore_eos": True, "stream": stream}
    client = Client(0, "in stream" if stream else "after body", COMPLETIONS, body, 0, 1, False)
    connection = send(account, client)
    if stream:
        connection.recv(1)
    else:
        until(lambda: server.load()["kv_blocks_used"], "blocks in use")
    connection.close()
    (row,) = account.settled_rows(1)
    assert row["outcome"] == "disconnected"
    assert row["output_tokens"] < 2000
    server.wait_until_idle()


def test_a_client_that_stops_reading_is_paused_and_neither_fills_memory_nor_holds_up_others(
    server: Any, account: Any, until: Any
) -> None:
    message = {"role": "user", "content": "slow"}
    body = {"model": server.model, "messages": [message], "max_tokens": 1900, "n": 4, "ignore_eos": True}
    body |= {"stream": True, "logprobs": True, "top_logprobs": 20}  # much to read for few tokens
    with send(account, Client(0, "not reading", CHAT, body, 0, 1, False)) as connection:
        connection.recv(1)
        until(lambda: server.load()["num_paused"], "a paused sequence")
        answer = account.post(
            COMPLETIONS, {"model": server.model, "prompt": "quick", "max_tokens": 3, "ignore_eos": True}
        )
        assert answer.status_code == 200
    rows = account.settled_rows(2)
    assert sorted(row["outcome"] for row in rows) == ["disconnected", "length"]
