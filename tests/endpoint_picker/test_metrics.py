"""Metrics of the endpoint picker, as the command exports them and as docs/metrics.md describes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.conftest import free_port, wait_for
from tests.telemetry.test_metrics import listed

from moiety_platform.endpoint_picker.members import EndpointAddress, PoolMembers
from moiety_platform.endpoint_picker.metrics import MemberState, PickerMetrics, serving_metrics
from moiety_platform.listening import AddressUnavailable

from .picker_process import KEY, FakeGateway, Picker, exchange, request_headers, response_headers, running_picker

NAME = "moiety_endpoint_picker"


@pytest.fixture(scope="module")
def gateways() -> Iterator[list[FakeGateway]]:
    with FakeGateway() as first, FakeGateway() as second:
        yield [first, second]


@pytest.fixture
def picker(gateways: list[FakeGateway], tmp_path: Path) -> Iterator[Picker]:
    for one in gateways:
        one.status, one.answer = 200, {"status": "ready", "open_requests": 0}
    with running_picker(tmp_path, *(f"--endpoint=http://{one.address}" for one in gateways)) as running:
        running.wait_until_ready()
        yield running


def values(picker: Picker, name: str, label: str) -> dict[str, float]:
    """Return the samples of a metric by a label."""
    families = text_string_to_metric_families(picker.metrics())
    return {
        sample.labels[label]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and label in sample.labels
    }


def test_the_documented_metrics_are_those_exported(picker: Picker) -> None:
    wanted = listed("endpoint picker")
    found = {}
    for one in text_string_to_metric_families(picker.metrics()):
        labels = {label for sample in one.samples for label in sample.labels} - {"le"}
        found[f"{one.name}_total" if one.type == "counter" else one.name] = (one.type, labels, one.documentation)
    assert found == wanted


def test_picks_are_counted_by_outcome_and_timed(picker: Picker, gateways: list[FakeGateway]) -> None:
    outcomes = {"preferred": 2.0, "moved": 0.0, "no_key": 1.0, "none_ready": 1.0, "no_members": 0.0}
    with grpc.insecure_channel(f"127.0.0.1:{picker.port}") as channel:
        for key in (KEY, KEY, None):
            exchange(channel, [request_headers(key), response_headers()])
        exchange(channel, [request_headers(KEY, subset=[])])
        assert values(picker, f"{NAME}_picks_total", "outcome") == outcomes
        (preferred,) = (
            one for one in gateways
            if one.address in str(exchange(channel, [request_headers(KEY), response_headers()])[0])
        )  # fmt: skip
        preferred.answer = {"status": "ready", "open_requests": 40}

        def moved() -> bool:
            exchange(channel, [request_headers(KEY), response_headers()])
            return values(picker, f"{NAME}_picks_total", "outcome")["moved"] > 0

        assert wait_for(moved, "the key to move")
    buckets = values(picker, f"{NAME}_pick_seconds_bucket", "le")
    assert buckets["+Inf"] == sum(values(picker, f"{NAME}_picks_total", "outcome").values())


def test_members_and_probes_follow_a_gateway_that_drains(picker: Picker, gateways: list[FakeGateway]) -> None:
    assert values(picker, f"{NAME}_members", "state") == {"ready": 2.0, "not_ready": 0.0, "not_probed": 0.0}
    assert values(picker, f"{NAME}_probes_total", "outcome")["not_ready"] == 0
    gateways[0].drain()
    wait_for(lambda: values(picker, f"{NAME}_members", "state")["not_ready"] == 1, "the picker to notice")
    assert values(picker, f"{NAME}_probes_total", "outcome")["not_ready"] > 0
    assert values(picker, f"{NAME}_probes_total", "outcome")["ready"] > 0


def test_no_key_and_no_address_is_a_label(picker: Picker, gateways: list[FakeGateway]) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{picker.port}") as channel:
        exchange(channel, [request_headers(KEY), response_headers()])
    text = picker.metrics()
    assert KEY.partition(".")[0] not in text
    assert not [one.address for one in gateways if one.address in text]


def test_a_member_that_was_never_probed_has_a_state_of_its_own() -> None:
    pool = PoolMembers()
    pool.replace_members(EndpointAddress.of_ip(f"10.0.0.{index}", 8000) for index in range(3))
    first, second, third = pool.all()
    pool.end_probe(first, set(), 0)
    pool.fail_probe(second, "refused")
    states = [MemberState.of(one) for one in (first, second, third)]
    assert states == [MemberState.READY, MemberState.NOT_READY, MemberState.NOT_PROBED]


def test_a_port_in_use_is_reported_with_the_option_to_change() -> None:
    registry, port = PickerMetrics(PoolMembers()).registry, free_port()
    with serving_metrics(registry, "127.0.0.1", port) as served:
        assert served == port
        with pytest.raises(AddressUnavailable, match="choose another --metrics-port"):
            serving_metrics(registry, "127.0.0.1", port).__enter__()
    with serving_metrics(registry, "127.0.0.1", port) as served_again:
        assert served_again == port, "the port is free after the end"
