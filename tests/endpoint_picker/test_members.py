"""Readiness and load of members, as probes and the streams of requests change them."""

from __future__ import annotations

import pytest

from moiety_platform.endpoint_picker.errors import BadEndpoint
from moiety_platform.endpoint_picker.members import MAX_TIMEOUTS, EndpointAddress, PoolMembers

KEY = b"k" * 32


def ready_pool(num: int = 2) -> PoolMembers:
    pool = PoolMembers()
    pool.replace_members(EndpointAddress.of_ip(f"10.0.0.{index}", 8000, 8002) for index in range(num))
    for one in pool.all():
        pool.end_probe(one, set(), 0)
    return pool


def loads(pool: PoolMembers) -> list[int]:
    return [one.load for one in pool.all()]


def test_a_request_counts_until_the_report_that_includes_it() -> None:
    pool = ready_pool(1)
    (one,) = pool.all()
    _, first = pool.pick(KEY, None)
    included = pool.begin_probe(one)
    _, second = pool.pick(KEY, None)
    assert (first is not second, loads(pool)) == (True, [2])
    pool.end_probe(one, included, 1)
    assert loads(pool) == [2], "one reported, and one since"
    pool.end_pick(first, has_ended=True)
    assert loads(pool) == [2], "the report has it"
    pool.end_pick(second, has_ended=True)
    assert loads(pool) == [1]


def test_a_stream_that_ends_before_its_response_still_counts() -> None:
    pool = ready_pool(1)
    _, pick = pool.pick(KEY, None)
    pool.end_pick(pick, has_ended=False)
    assert loads(pool) == [1]
    (one,) = pool.all()
    pool.end_probe(one, pool.begin_probe(one), 0)
    assert loads(pool) == [0]


def test_without_reports_the_load_is_that_of_open_streams() -> None:
    pool = ready_pool(1)
    (one,) = pool.all()
    pool.end_probe(one, set(), None)
    _, pick = pool.pick(KEY, None)
    pool.end_probe(one, pool.begin_probe(one), None)
    assert loads(pool) == [1]
    pool.end_pick(pick, has_ended=False)
    assert loads(pool) == [0]


def test_an_endpoint_is_picked_only_while_it_is_ready() -> None:
    pool = ready_pool()
    (first, _), both = pool.all(), {one.at.address for one in pool.all()}
    pool.fail_probe(first, "refused")
    assert {tuple(pool.pick(None, None)[0]) for _ in range(4)} == {("10.0.0.1:8000",)}
    pool.end_probe(first, set(), 0)
    assert {pool.pick(None, None)[0][0] for _ in range(10)} == both


def test_a_slow_probe_is_forgiven_and_several_in_a_row_are_not() -> None:
    pool = ready_pool(1)
    (one,) = pool.all()
    for expected in [True] * (MAX_TIMEOUTS - 1) + [False]:
        pool.time_out_probe(one, "slow")
        assert one.is_ready is expected
    pool.end_probe(one, set(), 0)
    pool.time_out_probe(one, "slow")
    assert one.is_ready, "the count starts again"


def test_a_subset_names_addresses_or_ips() -> None:
    pool = ready_pool(3)
    assert pool.pick(KEY, {"10.0.0.1:8000"})[0] == ["10.0.0.1:8000"]
    assert pool.pick(KEY, {"10.0.0.2"})[0] == ["10.0.0.2:8000"]
    for none in (set(), {"10.0.0.9:8000"}, {"10.0.0.1:9000"}):
        assert pool.pick(KEY, none) == ([], None)


def test_members_that_stay_keep_their_state_and_new_ones_are_probed_first() -> None:
    pool = PoolMembers()
    assert not pool.is_settled(), "nothing has been read"
    pool.replace_members(EndpointAddress.of_ip(f"10.0.0.{index}", 8000) for index in (0, 1))
    assert not pool.is_settled(), "nothing has been probed"
    for one in pool.all():
        pool.end_probe(one, set(), 0)
    assert pool.is_settled()
    pool.replace_members(EndpointAddress.of_ip(f"10.0.0.{index}", 8000) for index in (1, 2))
    assert [(one.at.address, one.is_ready) for one in pool.all()] == [("10.0.0.1:8000", True), ("10.0.0.2:8000", False)]
    assert pool.is_settled(), "a member that joins does not stop the picker"


def test_the_url_of_readiness_is_that_of_the_operations_listener() -> None:
    assert EndpointAddress.of_url("http://10.0.0.1:8000", 8002).ready_url == "http://10.0.0.1:8002/readyz"
    assert EndpointAddress.of_url("http://10.0.0.1/") == EndpointAddress("10.0.0.1:80", "http://10.0.0.1:80/readyz")
    six = EndpointAddress.of_url("http://[fd00::1]:8000")
    assert (six.address, six.ready_url) == ("[fd00::1]:8000", "http://[fd00::1]:8000/readyz")


@pytest.mark.parametrize(
    "url", ["10.0.0.1:8000", "https://10.0.0.1", "http://", "http://a:b", "http://a/v1", "http://a:8000"]
)
def test_a_url_that_is_not_a_gateways_is_refused(url: str) -> None:
    with pytest.raises(BadEndpoint, match="give http://IP:PORT"):
        EndpointAddress.of_url(url)
