"""The rendezvous of ranks, over sockets that split a message into pieces."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from moiety_engine.assembly import losses_of
from moiety_engine.config import EngineConfig
from moiety_engine.distribution.layout import Layout
from moiety_engine.distribution.rank_failure_log import RankFailureLog
from moiety_engine.distribution.rank_heartbeat import (
    LOST_RANK,
    Beat,
    Loaded,
    RankConnection,
    RankFailed,
    RankGroupEnd,
    RankHeartbeat,
    RankHello,
    Welcome,
)
from moiety_engine.distribution.rendezvous import ConnectedRanks, RankExclusion, connect_ranks, open_store
from moiety_engine.distribution.rendezvous_address import Rendezvous
from moiety_engine.errors import InvalidConfig, RanksError

SETTINGS = {"path": "x" * 200_000}  # more than one read takes, as on a network a line of a few kilobytes is


def test_a_rank_whose_words_come_in_pieces_is_welcome_and_strangers_are_not() -> None:
    store, met = HashStore(), []
    first = threading.Thread(
        target=lambda: met.append(connect_ranks(Rendezvous(0, 2), store, SETTINGS, "same", timeout_s=60)), daemon=True
    )
    first.start()
    host, port, secret = msgspec.json.decode(PrefixStore("moiety/0", store).get("heartbeat"))
    stranger = socket.create_connection((host, port))
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    guessing = RankConnection(socket.create_connection((host, port)))
    guessing.send(RankHello(1, "sécret", SETTINGS, "same"))
    line = RankConnection(socket.create_connection((host, port), timeout=60))
    line.send(RankHello(1, secret, SETTINGS, "same"))
    words = line.receive()
    assert words[0] == Welcome()
    line.send(Loaded())
    first.join(60)
    assert met[0].excluded == ()
    met[0].heartbeat.wait_loaded()
    line.send(RankGroupEnd())
    met[0].heartbeat.close()
    for end in (stranger, guessing, line):
        end.close()


def lines() -> tuple[RankConnection, RankConnection]:
    """Return both ends of a line."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), timeout=60)
        far, _ = server.accept()
        far.settimeout(60)
        return RankConnection(near), RankConnection(far)


def test_ranks_that_have_not_heard_a_goodbye_hear_it_before_the_line_ends() -> None:
    (first, one), (second, other) = lines(), lines()
    heartbeat = RankHeartbeat(0, {1: first, 2: second})
    one.send(RankGroupEnd())
    while not heartbeat._over:  # else it would say goodbye to both, whatever it has heard
        time.sleep(0.01)
    heartbeat.close()
    heard = []
    try:
        while True:
            heard += other.receive()
    except EOFError:
        pass
    assert heard[-1] == RankGroupEnd()
    assert set(map(type, heard[:-1])) <= {Beat}
    one.close()
    other.close()


class Late:
    """Ranks of a group of four with experts on two of their own, which meet in threads."""

    def __init__(self, after_s: float, gone: dict[int, str], timeout_s: float = 60) -> None:
        self.store = HashStore()
        self.met: dict[int, ConnectedRanks] = {}
        self.refused: dict[int, str] = {}
        exclusion = RankExclusion(Layout(dp=2, ep=2, ffn_ranks=2), after_s)
        self._first = self.start(0, exclusion=exclusion, gone=lambda: gone, timeout_s=timeout_s)

    def start(self, rank: int, timeout_s: float = 60, **how: Any) -> threading.Thread:
        def run() -> None:
            try:
                self.met[rank] = connect_ranks(
                    Rendezvous(rank, 4), self.store, SETTINGS, "same", timeout_s=timeout_s, **how
                )
            except RanksError as exc:
                self.refused[rank] = str(exc)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def end(self, *threads: threading.Thread) -> None:
        for thread in (self._first, *threads):
            thread.join(60)
        for rank in sorted(self.met):
            self.met[rank].heartbeat.close()


def test_a_rank_that_comes_too_late_hears_that_the_others_have_started_without_it() -> None:
    group = Late(after_s=5, gone={})
    group.end(*(group.start(rank) for rank in (1, 2)))
    assert {rank: met.excluded for rank, met in group.met.items()} == {0: (3,), 1: (3,), 2: (3,)}
    late = group.start(3)
    late.join(60)
    assert "rank 3 joined after the others had started without it" in group.refused[3]


def test_a_rank_that_is_given_up_takes_part_where_the_others_cannot_start_otherwise() -> None:
    group = Late(after_s=5, gone={2: "it was lost too often"})
    group.end(*(group.start(rank) for rank in (1, 2)))
    assert {rank: met.excluded for rank, met in group.met.items()} == {0: (3,), 1: (3,), 2: (3,)}


def test_an_excluded_rank_and_a_missing_rank_are_both_named_with_the_reason() -> None:
    group = Late(after_s=1, gone={2: "rank 2 was lost too often"}, timeout_s=2)
    group.end(group.start(1))
    for said in (group.refused[0], group.refused[1]):
        assert "(--join-timeout-s): 3; check" in said
        assert (
            "rank 2 was lost too often. The other ranks cannot start without them: no rank with experts is left" in said
        )


def test_a_rank_that_nobody_can_do_without_ends_the_others_as_soon_as_it_cannot_come() -> None:
    group = Late(after_s=60, gone={2: "one has ended", 3: "another has ended"})
    group.end(group.start(1))
    assert set(group.refused.values()) == {
        "one has ended; another has ended. The other ranks cannot start without them: no rank with experts is left"
    }
    assert set(group.refused) == {0, 1}


class MeetingPoint:
    """Rank 0 of four groups that share the experts, which looks for new ranks when it is told to, and the lines of the
    others without the ranks behind them."""

    def __init__(self, after_s: float = 0.0) -> None:
        self.gone: dict[int, str] = {}
        self.noted: list[int] = []
        self.met: list[ConnectedRanks] = []
        self._looks, self._num_asked = threading.Semaphore(0), 0
        store = HashStore()
        self._first = threading.Thread(
            target=self._meet, args=(store, RankExclusion(Layout(dp=4, ep=4), after_s)), daemon=True
        )
        self._first.start()
        self._where = msgspec.json.decode(PrefixStore("moiety/0", store).get("heartbeat"))

    def _meet(self, store: HashStore, exclusion: RankExclusion) -> None:
        how: dict[str, Any] = {"exclusion": exclusion, "gone": self._gone, "note": self.noted.append, "timeout_s": 60}
        self.met.append(connect_ranks(Rendezvous(0, 4), store, {}, "same", **how))

    def _gone(self) -> dict[int, str]:
        self._num_asked += 1
        self._looks.acquire()
        return self.gone

    def come(self, rank: int) -> RankConnection:
        line = RankConnection(socket.create_connection(tuple(self._where[:2]), timeout=60))
        line.send(RankHello(rank, self._where[2], {}, "same"))
        return line

    def look(self, times: int) -> None:
        """Let rank 0 look `times` times at once, and wait until it has."""
        self._looks.release(times)
        while self._num_asked <= times:
            time.sleep(0.01)

    def look_until_met(self) -> ConnectedRanks:
        while self._first.is_alive():
            self._looks.release()
            self._first.join(0.1)
        return self.met[0]


def end_of(line: RankConnection) -> None:
    line.close()


def reset_of(line: RankConnection) -> None:
    line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.close()


@pytest.mark.parametrize("lose", [end_of, reset_of])
def test_a_rank_that_came_and_is_lost_while_another_is_waited_for_is_done_without_too(
    lose: Callable[[RankConnection], None],
) -> None:
    meeting = MeetingPoint(after_s=5)
    first, second = meeting.come(1), meeting.come(2)
    meeting.look(6)  # both are let in, and some time passes
    lose(second)
    met = meeting.look_until_met()
    assert met.excluded == (2, 3)
    assert first.receive()[0] == Welcome((2, 3))
    assert meeting.noted == [2]
    first.close()
    with pytest.raises(RanksError, match="rank 1 is lost"):
        met.heartbeat.wait_loaded()
    met.heartbeat.close()
    assert meeting.noted == [2, 1]


def test_a_rank_that_came_and_was_lost_may_come_again() -> None:
    meeting = MeetingPoint(after_s=60)
    before = meeting.come(2)
    meeting.look(3)
    before.close()
    lines = [meeting.come(rank) for rank in (1, 2, 3)]
    met = meeting.look_until_met()
    assert met.excluded == ()
    assert meeting.noted == [2]
    met.heartbeat.close()
    for line in lines:
        line.close()


def test_ranks_that_are_there_when_the_time_is_over_are_not_excluded() -> None:
    meeting = MeetingPoint(after_s=0)
    lines = [meeting.come(rank) for rank in (1, 2, 3)]
    met = meeting.look_until_met()
    assert met.excluded == ()
    met.heartbeat.close()
    for line in lines:
        line.close()


def test_one_that_comes_and_says_nothing_costs_the_ranks_no_time() -> None:
    meeting = MeetingPoint(after_s=4)
    stranger = socket.create_connection(tuple(meeting._where[:2]))
    lines = [meeting.come(rank) for rank in (1, 2, 3)]
    met = meeting.look_until_met()
    assert met.excluded == ()
    met.heartbeat.close()
    stranger.close()
    for line in lines:
        line.close()


def test_a_rank_that_is_given_up_is_not_waited_for_and_hears_why_when_the_others_start() -> None:
    meeting = MeetingPoint(after_s=60)
    meeting.gone[2] = "it was lost too often"
    came = meeting.come(2)
    meeting.look(3)
    lines = [meeting.come(rank) for rank in (1, 3)]
    met = meeting.look_until_met()
    assert met.excluded == (2,)
    assert came.receive() == [RankFailed("it was lost too often")]
    assert meeting.noted == []
    met.heartbeat.close()
    for line in (came, *lines):
        line.close()


def test_a_rank_that_ends_after_it_came_is_excluded_at_once() -> None:
    meeting = MeetingPoint(after_s=60)
    lines = [meeting.come(rank) for rank in (1, 3)]
    meeting.look(6)
    meeting.gone[3] = "rank 3 ended with exit code 9"
    lines.append(meeting.come(2))
    met = meeting.look_until_met()
    assert met.excluded == (3,)
    assert lines[0].receive()[0] == Welcome((3,))
    met.heartbeat.close()
    for line in lines:
        line.close()


JOINING = """
from moiety_engine.distribution.rank_group import join
from moiety_engine.distribution.rendezvous import open_store
from moiety_engine.distribution.layout import Layout
from moiety_engine.distribution.rendezvous_address import Rendezvous

rendezvous = Rendezvous(0, 2)
store = open_store(rendezvous, 60)
print(store.port, flush=True)
join(Layout(dp=2), rendezvous, settings={}, checkpoint="same", device_type="cpu", timeout_s=60, store=store)
"""


def test_a_rank_that_is_lost_while_the_groups_are_made_ends_the_first_one_too() -> None:
    first = subprocess.Popen([sys.executable, "-c", JOINING], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert first.stdout is not None
    port = int(next(line for line in first.stdout if line.strip().isdigit()))
    store = open_store(Rendezvous(1, 2, port=port), 60)
    host, port, secret = msgspec.json.decode(PrefixStore("moiety/0", store).get("heartbeat"))
    line = RankConnection(socket.create_connection((host, port), timeout=60))
    line.send(RankHello(1, secret, {}, "same"))
    assert line.receive()[0] == Welcome()
    line.close()
    said = first.communicate(timeout=60)[0].decode()
    assert "rank 1 is lost: its process ended" in said
    assert first.returncode == LOST_RANK


def noted_when(happens: Callable[[list[RankConnection]], None]) -> list[int]:
    """Return which of three other ranks rank 0 notes as lost."""
    ends, noted = [lines() for _ in range(3)], list[int]()
    far = [other for _, other in ends]
    heartbeat = RankHeartbeat(0, {rank: near for rank, (near, _) in enumerate(ends, 1)}, noted.append)
    happens(far)
    with pytest.raises(RanksError):
        heartbeat.wait_loaded()
    heartbeat.close()
    for line in far:
        line.close()
    return noted


def test_all_ranks_that_are_lost_together_are_noted() -> None:
    def close_two(far: list[RankConnection]) -> None:
        far[0].close()
        far[2].close()

    assert noted_when(close_two) == [1, 3]


def test_a_rank_that_cannot_go_on_and_says_so_is_noted_but_not_one_that_has_lost_the_first() -> None:
    assert noted_when(lambda far: far[1].send(RankFailed("its disk is full", own=True))) == [2]
    assert noted_when(lambda far: far[1].send(RankFailed("rank 0 sent no heartbeat"))) == []


def test_losses_are_counted_for_so_long_over_restarts(tmp_path: Path) -> None:
    file = tmp_path / "losses"
    for rank in (1, 2, 1):
        RankFailureLog(file, "these", within_s=600).note(rank)
    assert RankFailureLog(file, "these", within_s=600).lost_often(2) == {1: 2}
    assert RankFailureLog(file, "these", within_s=600).lost_often(1) == {1: 2, 2: 1}
    now = time.time()
    strange = f"{now - 700} 3\n" * 5 + "no line of ours\n\n" + "inf 4\nnan 4\n" * 5 + f"{now + 9000} 5\n" * 5
    file.write_text(file.read_text() + strange)
    assert RankFailureLog(file, "these", within_s=600).lost_often(2) == {1: 2}
    assert RankFailureLog(file, "these", within_s=6000).lost_often(2) == {1: 2, 3: 5}
    with pytest.raises(InvalidConfig, match="No such file or directory; choose another file"):
        RankFailureLog(tmp_path / "no folder" / "losses", "these", within_s=600)


def test_a_file_of_losses_is_of_one_group_and_what_was_in_it_is_forgotten_once_it_is_empty(tmp_path: Path) -> None:
    file = tmp_path / "losses"
    losses = RankFailureLog(file, "these", within_s=600)
    losses.note(1)
    with pytest.raises(
        InvalidConfig,
        match="has the header 'lost ranks of these' of another group, while this group is those: choose another file",
    ):
        RankFailureLog(file, "those", within_s=600)
    file.write_text("")
    losses.note(2)
    assert RankFailureLog(file, "these", within_s=600).lost_often(1) == {2: 1}
    for other in (b"a diary\n", b"\xff\xfe\n"):
        file.write_bytes(other)
        with pytest.raises(InvalidConfig, match="choose another file"):
            RankFailureLog(file, "these", within_s=600)
        assert file.read_bytes() == other


def test_ranks_that_failed_often_are_excluded_if_the_others_can_serve_without_them(tmp_path: Path) -> None:
    how: dict[str, Any] = {
        "tp": 2,
        "dp_attention": 2,
        "exclude_rank_after_s": 5,
        "rank_failure_log": str(tmp_path / "losses"),
    }
    config = EngineConfig(model="m", name="n", **how, exclude_rank_after_failures=2, rank_failures_within_s=60)
    losses, given_up = losses_of(config, Layout(dp=2, tp=2), Rendezvous(0, 4))
    assert losses is not None and given_up == {}
    for rank in (1, 3, 1, 3, 1):
        losses.note(rank)
    _, given_up = losses_of(config, Layout(dp=2, tp=2), Rendezvous(0, 4))
    assert given_up.keys() == {3}  # rank 0 cannot do without rank 1
    assert "rank 3 failed 2 times in 60 s" in given_up[3]
    with pytest.raises(InvalidConfig, match=r"n at 127.0.0.1, tp 2, dp 2, ep 1, .* this group is n at 127.0.0.1, tp 1"):
        losses_of(config, Layout(dp=4), Rendezvous(0, 4))
