"""How ranks meet, over sockets that break a message into pieces."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore

from moiety_engine.distribution.joining import Met, Sparing, meet
from moiety_engine.distribution.layout import Layout
from moiety_engine.distribution.lifeline import Beat, Bye, Hello, Lifeline, Line, Loaded, Welcome
from moiety_engine.distribution.losses import Losses
from moiety_engine.distribution.meeting import Meeting
from moiety_engine.errors import InvalidConfig, RanksError

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
    assert met[0].masked == ()
    met[0].lifeline.wait_loaded()
    line.send(Bye())
    met[0].lifeline.close()
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


class Late:
    """Ranks of a group of four with experts on two of their own, which meet in threads."""

    def __init__(self, after_s: float, gone: dict[int, str]) -> None:
        self.store = HashStore()
        self.met: dict[int, Met] = {}
        self.refused: dict[int, str] = {}
        sparing = Sparing(Layout(dp=2, ep=2, expert_ranks=2), after_s)
        self._first = self.start(0, sparing=sparing, gone=lambda: gone)

    def start(self, rank: int, **how: Any) -> threading.Thread:
        def run() -> None:
            try:
                self.met[rank] = meet(Meeting(rank, 4), self.store, SETTINGS, "same", timeout_s=60, **how)
            except RanksError as exc:
                self.refused[rank] = str(exc)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def end(self, *threads: threading.Thread) -> None:
        for thread in (self._first, *threads):
            thread.join(60)
        for rank in sorted(self.met):
            self.met[rank].lifeline.close()


def test_a_rank_that_comes_too_late_hears_that_the_others_have_started_without_it() -> None:
    group = Late(after_s=1, gone={})
    group.end(*(group.start(rank) for rank in (1, 2)))
    assert {rank: met.masked for rank, met in group.met.items()} == {0: (3,), 1: (3,), 2: (3,)}
    late = group.start(3)
    late.join(60)
    assert "rank 3 came after the others had started without it" in group.refused[3]


def test_a_rank_that_is_given_up_is_not_waited_for_and_hears_why_when_it_comes() -> None:
    group = Late(after_s=60, gone={2: "it was lost too often"})
    came = group.start(2)
    came.join(60)
    assert group.refused == {2: "it was lost too often"}
    group.end(*(group.start(rank) for rank in (1, 3)))
    assert {rank: met.masked for rank, met in group.met.items()} == {0: (2,), 1: (2,), 3: (2,)}


def test_a_rank_that_nobody_can_do_without_ends_the_others_as_soon_as_it_cannot_come() -> None:
    group = Late(after_s=60, gone={2: "one has ended", 3: "another has ended"})
    group.end(group.start(1))
    assert set(group.refused.values()) == {
        "one has ended; another has ended. The others cannot start without: no rank with experts is left"
    }
    assert set(group.refused) == {0, 1}


def test_losses_are_counted_for_ten_minutes_over_restarts(tmp_path: Path) -> None:
    file = tmp_path / "losses"
    for rank in (1, 2, 1):
        Losses(file).note(rank)
    assert Losses(file).lost_often(2) == {1: 2}
    assert Losses(file).lost_often(1) == {1: 2, 2: 1}
    longer_ago = time.time() - 700
    file.write_text(f"{longer_ago} 3\n" * 5 + "no line of ours\n\n" + file.read_text())
    assert Losses(file).lost_often(2) == {1: 2}
    with pytest.raises(InvalidConfig, match="choose another file"):
        Losses(tmp_path / "no folder" / "losses")
