"""How ranks meet, over sockets that break a message into pieces."""

from __future__ import annotations

import socket
import threading
import time

import msgspec
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore

from moiety_engine.distribution.joining import meet
from moiety_engine.distribution.lifeline import Beat, Bye, Hello, Lifeline, Line, Loaded, Welcome
from moiety_engine.distribution.meeting import Meeting

SETTINGS = {"path": "x" * 200_000}  # more than one read takes, as on a network a line of a few kilobytes is


def test_a_rank_whose_words_come_in_pieces_is_welcome_and_strangers_are_not() -> None:
    store, met = HashStore(), []
    first = threading.Thread(
        target=lambda: met.append(meet(Meeting(0, 2), store, SETTINGS, "same", timeout_s=60)), daemon=True
    )
    first.start()
    host, port, secret = msgspec.json.decode(PrefixStore("moiety/0", store).get("lifeline"))
    stranger = socket.create_connection((host, port))
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    guessing = Line(socket.create_connection((host, port)))
    guessing.send(Hello(1, "sécret", SETTINGS, "same"))
    line = Line(socket.create_connection((host, port), timeout=60))
    line.send(Hello(1, secret, SETTINGS, "same"))
    words = line.receive()
    assert words[0] == Welcome()
    line.send(Loaded())
    first.join(60)
    met[0].wait_loaded()
    line.send(Bye())
    met[0].close()
    for end in (stranger, guessing, line):
        end.close()


def lines() -> tuple[Line, Line]:
    """The two ends of one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), timeout=60)
        far, _ = server.accept()
        far.settimeout(60)
        return Line(near), Line(far)


def test_ranks_that_have_not_heard_a_goodbye_hear_it_before_the_line_ends() -> None:
    (first, one), (second, other) = lines(), lines()
    lifeline = Lifeline(0, {1: first, 2: second})
    one.send(Bye())
    while not lifeline._over:  # else it would say goodbye to both, whatever it has heard
        time.sleep(0.01)
    lifeline.close()
    heard = []
    try:
        while True:
            heard += other.receive()
    except EOFError:
        pass
    assert heard[-1] == Bye()
    assert set(map(type, heard[:-1])) <= {Beat}
    one.close()
    other.close()
