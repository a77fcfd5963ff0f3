"""What requests used stays with the engine until a gateway has stored it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moiety_engine.server import usage_meter as module
from moiety_engine.server.usage_meter import GRACE_S, RECORDS_AT_ONCE, REPEAT_S, UsageMeter
from moiety_wire.messages import Finished, FinishReason, Hello, Stopping, UnacknowledgedUsage, UsageAcknowledgement
from moiety_wire.trace_events import Phases


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def finished(request_id: str, num_output: int) -> Finished:
    return Finished(request_id, 0, FinishReason.STOP, 3, 1, num_output, Phases(1))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> UsageMeter:
    return UsageMeter(clock, max_records=1000)


def note(meter: UsageMeter, submit: Any, replica_id: str, request_id: str, num_output: int = 5) -> None:
    meter.note(replica_id, submit(request_id, billing_context=b"bill"), finished(request_id, num_output), "standard")


def test_settled_usage_is_removed_from_the_meter(meter: UsageMeter, submit: Any) -> None:
    note(meter, submit, "a", "r1")
    note(meter, submit, "a", "r2")
    assert meter.replicas == {"a"}
    meter.acknowledge("b", ["r1", "r2"])
    assert meter.replicas == {"a"}, "another's request of the same name"
    meter.acknowledge("a", ["r1", "unknown"])
    assert meter.replicas == {"a"}
    meter.acknowledge("a", ["r2"])
    assert meter.replicas == set()


def test_usage_without_billing_context_or_admission_is_not_kept(meter: UsageMeter, submit: Any) -> None:
    meter.note("a", submit("r1"), finished("r1", 5), "standard")
    meter.note("a", submit("r2", billing_context=b"bill"), finished("r2", 0), "")
    assert meter.replicas == set()


def test_connected_gateways_settle_their_usage_and_long_silent_ones_do_not(
    meter: UsageMeter, clock: Clock, submit: Any
) -> None:
    note(meter, submit, "a", "r1", 7)
    note(meter, submit, "b", "r2")
    clock.now_s += GRACE_S + 1
    assert [record.request_id for record in meter.due_of_absent({"b"})] == ["r1"]
    assert meter.due_of_absent({"b"}) == [], "told a moment ago"
    clock.now_s += REPEAT_S
    (record,) = meter.due_of_absent({"b"})
    assert (record.replica_id, record.billing_context, record.num_output_tokens, record.num_cached_tokens) == (
        "a",
        b"bill",
        7,
        1,
    )
    meter.acknowledge("a", ["r1"])
    clock.now_s += REPEAT_S
    assert meter.due_of_absent({"b"}) == []


def test_much_is_told_in_parts_and_the_oldest_is_lost_where_there_is_too_much(
    meter: UsageMeter, clock: Clock, submit: Any
) -> None:
    for number in range(1002):
        note(meter, submit, "a", f"r{number}")
    assert meter.num_lost == 2
    clock.now_s += GRACE_S + 1
    told: list[str] = []
    while records := meter.due_of_absent(set()):
        assert len(records) <= RECORDS_AT_ONCE
        told += [record.request_id for record in records]
    assert told == [f"r{number}" for number in range(2, 1002)]


async def test_a_gateway_is_told_what_another_has_left(
    bench: Any, submit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.1)
    async with bench(silence_limit_s=0.3) as running:
        lost, other = running.connect(), running.connect()
        await lost.send(Hello("lost", replica_id="first"))
        await lost.until(lambda: lost.loads)
        await other.send(Hello("other", replica_id="second"))
        await other.until(lambda: other.loads)
        await lost.send(submit(billing_context=b"theirs", stopping=Stopping(max_tokens=4)))
        answer = await lost.finish()
        assert "first" in (await other.until_load(lambda load: load.unacknowledged_replicas)).unacknowledged_replicas
        lost.socket.close()
        message = None
        while not isinstance(message, UnacknowledgedUsage):
            message = await other.keep_alive_and_receive()
        (record,) = message.records
        assert (record.replica_id, record.request_id, record.billing_context) == ("first", "r", b"theirs")
        assert record.num_output_tokens == answer.end.num_output_tokens == 4
        await other.send(UsageAcknowledgement("first", ["r"]))
        await other.until_load(lambda load: not load.unacknowledged_replicas)


async def test_usage_is_written_after_the_file_was_moved(bench: Any, submit: Any, tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    async with bench(usage_journal=path) as running:
        gateway = running.connect()
        await gateway.send(Hello("gateway", replica_id="first"))
        await gateway.ask(submit("r1", prompt="hello", stopping=Stopping(max_tokens=3)))
        path.rename(tmp_path / "old.jsonl")
        await gateway.ask(submit("r2", prompt="hello", stopping=Stopping(max_tokens=4)))
    (old,) = map(json.loads, (tmp_path / "old.jsonl").read_text().splitlines())
    (new,) = map(json.loads, path.read_text().splitlines())
    assert [(line["request_id"], line["prompt_tokens"], line["output_tokens"]) for line in (old, new)] == [
        ("r1", 5, 3),
        ("r2", 5, 4),
    ]
    assert (new["engine_id"], new["replica_id"], new["tenant_id"]) == (running.front.engine_id, "first", "tenant")
    assert new["at_unix_ns"] > old["at_unix_ns"] > 10**18
