"""Laws of the choice: no endpoint gets more than its bound, a key keeps its endpoint, and keys spread."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.endpoint_picker.picking import (
    LOAD_FACTOR,
    Candidate,
    EndpointChoice,
    PickOutcome,
    most_load,
    pick_endpoints,
)

candidates = st.lists(st.integers(0, 50), min_size=1, max_size=8).map(
    lambda loads: [Candidate(f"10.0.0.{index}:8000", load) for index, load in enumerate(loads)]
)
keys = st.binary(min_size=32, max_size=32)


@given(candidates, keys)
def test_no_endpoint_gets_more_than_the_bound(members: list[Candidate], key: bytes) -> None:
    (chosen,) = pick_endpoints(members, key).addresses
    (load,) = (one.load for one in members if one.address == chosen)
    mean = (sum(one.load for one in members) + 1) / len(members)
    assert load + 1 <= math.ceil(LOAD_FACTOR * mean)


@given(st.integers(1, 8), st.lists(keys, max_size=60), st.floats(1.0, 2.0))
def test_the_bound_holds_after_any_arrivals(num: int, arrivals: list[bytes], factor: float) -> None:
    loads = {f"10.0.0.{index}:8000": 0 for index in range(num)}
    for key in arrivals:
        bound = most_load(loads.values(), factor)
        (chosen,) = pick_endpoints([Candidate(*one) for one in loads.items()], key, factor=factor).addresses
        loads[chosen] += 1
        assert max(loads.values()) <= bound


@given(candidates, keys, st.randoms())
def test_the_choice_does_not_depend_on_the_order_of_members(
    members: list[Candidate], key: bytes, chance: Random
) -> None:
    shuffled = list(members)
    chance.shuffle(shuffled)
    assert pick_endpoints(members, key, 8) == pick_endpoints(shuffled, key, 8)


@given(st.integers(2, 8), keys, st.integers(0, 7))
def test_a_member_that_leaves_moves_only_keys_that_prefer_it(num: int, key: bytes, gone: int) -> None:
    members = [Candidate(f"10.0.0.{index}:8000", 0) for index in range(num)]
    (before,) = pick_endpoints(members, key).addresses
    left = [one for index, one in enumerate(members) if index != gone % num]
    (after,) = pick_endpoints(left, key).addresses
    assert after == before or before == members[gone % num].address


@given(candidates, st.one_of(st.none(), keys), st.integers(1, 8))
def test_the_endpoints_to_try_are_distinct_members(members: list[Candidate], key: bytes | None, num: int) -> None:
    chosen = pick_endpoints(members, key, num).addresses
    assert len(chosen) == len(set(chosen)) == min(num, len(members))
    assert chosen[:1] == pick_endpoints(members, key).addresses, "the first does not depend on the number"


@given(candidates)
def test_a_request_without_a_key_goes_to_the_least_load(members: list[Candidate]) -> None:
    (chosen,) = pick_endpoints(members, None).addresses
    assert next(one.load for one in members if one.address == chosen) == min(one.load for one in members)


def test_keys_spread_over_the_members() -> None:
    members = [Candidate(f"10.0.0.{index}:8000", 0) for index in range(4)]
    counts = Counter(pick_endpoints(members, index.to_bytes(32)).addresses[0] for index in range(2000))
    assert all(400 < count < 600 for count in counts.values()), counts


def test_nothing_is_chosen_without_members() -> None:
    for key in (b"key", None):
        assert pick_endpoints([], key) == EndpointChoice([], PickOutcome.NONE_READY)


@given(candidates, keys)
def test_a_choice_says_whether_a_key_moved_from_the_endpoint_that_it_prefers(
    members: list[Candidate], key: bytes
) -> None:
    (preferred,) = pick_endpoints([Candidate(one.address, 0) for one in members], key).addresses
    choice = pick_endpoints(members, key)
    expected = PickOutcome.PREFERRED if choice.addresses == [preferred] else PickOutcome.MOVED
    assert choice.outcome is expected
    assert pick_endpoints(members, None).outcome is PickOutcome.NO_KEY
