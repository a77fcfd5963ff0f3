"""How ranks meet, over sockets that break a message into pieces."""

from __future__ import annotations

import socket
import threading

import msgspec
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore

from moiety_engine.distribution.joining import meet
from moiety_engine.distribution.lifeline import Bye, Hello, Line, Loaded, Welcome
from moiety_engine.distribution.meeting import Meeting

SETTINGS = {"path": "x" * 200_000}  # more than one read takes, as on a network a line of a few kilobytes is


def test_a_rank_whose_words_come_in_pieces_is_welcome_and_strangers_are_not() -> None:
    store, met = HashStore(), []
    first = threading.Thread(
        target=lambda: met.append(meet(Meeting(0, 2), store, SETTINGS, "same", timeout_s=20)), daemon=True
    )
    first.start()
    host, port, secret = msgspec.json.decode(PrefixStore("moiety/0", store).get("lifeline"))
    stranger = socket.create_connection((host, port))
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    guessing = Line(socket.create_connection((host, port)))
    guessing.send(Hello(1, "sécret", SETTINGS, "same"))
    line = Line(socket.create_connection((host, port), timeout=20))
    line.send(Hello(1, secret, SETTINGS, "same"))
    words = line.receive()
    assert words[0] == Welcome()
    line.send(Loaded())
    first.join(20)
    met[0].wait_loaded()
    line.send(Bye())
    met[0].close()
    for end in (stranger, guessing, line):
        end.close()
