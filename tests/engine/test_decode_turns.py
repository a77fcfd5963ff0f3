"""Turns of image decoding: no tenant and no class holds all slots while others wait."""

from __future__ import annotations

from moiety_engine.image_decoding.decode_turns import DecodeTurns, ImageJob, Lane, Turn
from moiety_wire.images import ImageInput


class Turns:
    """Turns at time 1, at which late requests are late."""

    def __init__(self) -> None:
        self.turns = DecodeTurns()
        self._num_keys = 0

    def wait(self, tenant: str, number: int = 1, *, rank: int = 1, is_late: bool = False, is_new: bool = True) -> None:
        for _ in range(number):
            self._num_keys += 1
            lane = Lane(is_new, rank, tenant)
            image = ImageInput(0, b"file")
            self.turns.add_new(ImageJob(self._num_keys, lane, 0 if is_late else 9, b"", [image], [b""], [None]))

    def start(self) -> Turn:
        turn = self.turns.start_next(1)
        assert turn is not None
        return turn

    def run(self, number: int, seconds: float = 1.0) -> str:
        """Run turns one after the other. Return their tenants."""
        tenants = ""
        for _ in range(number):
            turn = self.start()
            tenants += turn.job.lane.tenant_id
            self.turns.end(turn, seconds)
        return tenants


def tenants_of(turns: list[Turn]) -> str:
    return "".join(turn.job.lane.tenant_id for turn in turns)


def test_a_tenant_with_a_running_turn_lets_another_one_come_first_whatever_the_ranks() -> None:
    one = Turns()
    one.wait("a", 3, rank=0)
    one.wait("b", 2, rank=3)
    assert tenants_of([one.start() for _ in range(4)]) == "abab"


def test_a_tenant_alone_may_use_all_slots() -> None:
    one = Turns()
    one.wait("a", 3)
    assert tenants_of([one.start() for _ in range(3)]) == "aaa"
    assert one.turns.start_next(1) is None


def test_tenants_of_a_rank_get_equal_seconds_not_equal_turns() -> None:
    one = Turns()
    one.wait("a", 5)
    one.wait("b", 5)
    used = {"a": 0.0, "b": 0.0}
    for _ in range(4):
        turn = one.start()
        tenant = turn.job.lane.tenant_id
        seconds = 3.0 if tenant == "a" else 1.0
        used[tenant] += seconds
        one.turns.end(turn, seconds)
    assert used == {"a": 3.0, "b": 3.0}


def test_a_tenant_that_was_idle_has_saved_no_seconds() -> None:
    one = Turns()
    one.wait("a", 4)
    one.run(2, seconds=5.0)
    one.wait("b", 4)
    assert one.run(4) == "abab"


def test_a_tenant_that_was_idle_for_a_moment_keeps_what_it_used() -> None:
    one = Turns()
    one.wait("a", 6)
    one.wait("b", 1)
    assert one.run(1) == "a"
    assert one.run(1, seconds=50.0) == "b"
    one.wait("b", 1)
    assert one.run(6) == "aaaaab"


def test_late_requests_come_first_in_one_slot_and_every_second_turn() -> None:
    one = Turns()
    for tenant in "abc":
        one.wait(tenant, 1, rank=3, is_late=True)
    for tenant in "xyz":
        one.wait(tenant, 1, rank=0)
    assert tenants_of([one.start() for _ in range(4)]) == "axyz"
    one = Turns()
    one.wait("a", 3, rank=3, is_late=True)
    one.wait("x", 3, rank=0)
    assert one.run(6) == "axaxax"


def test_requests_that_another_engine_began_come_before_new_ones_of_more_critical_classes() -> None:
    one = Turns()
    one.wait("a", rank=0)
    one.wait("b", rank=3, is_new=False)
    assert one.run(2) == "ba"


def test_a_request_that_left_does_not_get_its_turn() -> None:
    one = Turns()
    one.wait("a", 2)
    one.turns.forget_request(1)
    assert one.turns.num_waiting() == {"a": 1}
    assert one.start().job.key == 2
