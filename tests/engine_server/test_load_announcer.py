"""Loads that an engine sends: at each beat to gateways with requests, to others on changes and on heartbeats."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from moiety_engine.server.load_announcer import MAX_IDLE_BEATS, LoadAnnouncer
from moiety_engine.server.sessions import GatewaySession, Sessions
from moiety_wire.engine_load import Load

INTERVAL_S = 0.5
NUM_COUNTS = 12  # required fields of a load


class Announcing:
    """An announcer with one session, whose clock and load a test sets. Nothing is sent."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.load = Load(*[0] * NUM_COUNTS, engine_id="engine", seq=0)
        self.sessions = Sessions(cast(Any, None), max_outbox_messages=10)
        self.session = self.sessions.session_of_sender(b"gateway", self.now_s)
        self.session.has_card = True
        self.announcer = LoadAnnouncer(self.sessions, lambda: self.load, lambda: self.now_s)
        self.announcer.send(self.session)
        self.take()

    def take(self, session: GatewaySession | None = None) -> list[Load]:
        """Return the loads that were queued for the gateway since the last call."""
        session = session or self.session
        queued, session.unsent = session.unsent, []
        assert all(isinstance(one, Load) for one in queued)
        return cast(list[Load], queued)

    def beat(self) -> list[Load]:
        self.now_s += INTERVAL_S
        self.announcer.send_due()
        return self.take()


@pytest.fixture
def announcing() -> Announcing:
    return Announcing()


def test_a_gateway_without_requests_gets_no_load_that_it_has(announcing: Announcing) -> None:
    counts = [len(announcing.beat()) for _ in range(4 * MAX_IDLE_BEATS)]
    assert counts == 4 * [*[0] * (MAX_IDLE_BEATS - 1), 1], "and one in time all the same"


def test_a_gateway_with_requests_gets_a_load_at_each_beat(announcing: Announcing) -> None:
    announcing.session.open_keys["request"] = 1
    assert [len(announcing.beat()) for _ in range(4)] == [1] * 4
    announcing.session.open_keys.clear()
    assert not announcing.beat()


def test_a_change_is_sent_at_the_next_beat(announcing: Announcing) -> None:
    announcing.load = msgspec.structs.replace(announcing.load, num_running=1)
    (sent,) = announcing.beat()
    assert (sent.num_running, sent.seq, sent.running_for_s) == (1, 1, INTERVAL_S)
    assert not announcing.beat()
    announcing.session.sleep_refusal = "not permitted"
    (sent,) = announcing.beat()
    assert sent.sleep_problem == "not permitted"
    other = announcing.sessions.session_of_sender(b"other", announcing.now_s)
    other.has_card = True
    assert not announcing.beat()
    (sent,) = announcing.take(other)
    assert (sent.sleep_problem, sent.seq) == ("", 0), "the reason is that of one gateway"


def test_each_heartbeat_of_an_idle_gateway_is_answered(announcing: Announcing) -> None:
    for expected in (1, 2, 3):
        assert not announcing.beat()
        assert not announcing.beat()
        announcing.announcer.answer_heartbeat(announcing.session)
        assert [one.seq for one in announcing.take()] == [expected]


def test_heartbeats_bring_about_no_more_loads_than_beats(announcing: Announcing) -> None:
    assert not announcing.beat()
    for _ in range(10):
        announcing.announcer.answer_heartbeat(announcing.session)
    assert len(announcing.take()) == 1
    announcing.session.open_keys["request"] = 1
    assert announcing.beat()
    announcing.announcer.answer_heartbeat(announcing.session)
    assert not announcing.take(), "it gets one at each beat"
    new = announcing.sessions.session_of_sender(b"new", announcing.now_s)
    announcing.announcer.answer_heartbeat(new)
    assert not announcing.take(new), "it has no model card yet"
