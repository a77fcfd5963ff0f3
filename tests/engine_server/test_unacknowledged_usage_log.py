"""Usage that no gateway has acknowledged survives the engine that counted it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tests.full_disk import full_disk

from moiety_engine.errors import InvalidConfig
from moiety_engine.scripted.script import Script
from moiety_engine.server import unacknowledged_usage_log as module
from moiety_engine.server import usage_meter as meter_module
from moiety_engine.server.frame_file import FrameFile
from moiety_engine.server.unacknowledged_usage_log import UnacknowledgedUsageLog
from moiety_engine.server.usage_meter import GRACE_S, UsageMeter
from moiety_wire.messages import (
    Finished,
    FinishReason,
    Hello,
    MeteredUsage,
    Stopping,
    UnacknowledgedUsage,
    UsageAcknowledgement,
)
from moiety_wire.trace_events import Phases

Key = tuple[str, str]


@dataclass
class Running:
    """A request as the engine server tracks it."""

    request_id: str
    num_output: int = 0
    num_cached_tokens: int = 0

    def metered(self, replica_id: str) -> MeteredUsage:
        return MeteredUsage(replica_id, self.request_id, b"bill", "standard", self.num_cached_tokens, self.num_output)


class MeteredRequests:
    """Running and ended requests as a usage meter keeps them, over a log."""

    def __init__(self, path: Path) -> None:
        self.log = UnacknowledgedUsageLog(path)
        self.running: dict[Key, Running] = {}
        self.ended = {(one.replica_id, one.request_id): one for one in self.log.read()}
        self.changed: set[Key] = set()

    def end(self, key: Key) -> None:
        self.ended[key] = self.running.pop(key).metered(key[0])
        self.changed.add(key)

    def acknowledge(self, key: Key) -> None:
        del self.ended[key]
        self.changed.add(key)

    async def write(self) -> None:
        changed, self.changed = self.changed, set()
        await self.log.write(self.running, self.ended, changed)

    @property
    def unacknowledged(self) -> dict[Key, MeteredUsage]:
        return self.ended | {key: one.metered(key[0]) for key, one in self.running.items()}


def left(path: Path) -> dict[Key, MeteredUsage]:
    """Return what the next engine finds in the log."""
    log = UnacknowledgedUsageLog(path)
    found = {(one.replica_id, one.request_id): one for one in log.read()}
    log.close()
    return found


DEEDS = st.lists(st.tuples(st.sampled_from(["begin", "go on", "end", "settle", "write", "kill"]), st.integers(0, 5)))


@given(deeds=DEEDS)
@settings(max_examples=60, deadline=None)
def test_the_next_engine_finds_all_that_was_unsettled_when_it_was_last_written(
    tmp_path_factory: pytest.TempPathFactory, deeds: list[tuple[str, int]]
) -> None:
    path = tmp_path_factory.mktemp("log") / "unacknowledged"

    async def live() -> None:
        metered = MeteredRequests(path)
        written: dict[Key, MeteredUsage] = {}
        for deed, number in deeds:
            key = (f"gateway-{number % 2}", f"r-{number}")
            if deed == "begin" and key not in metered.running:
                metered.running[key] = Running(key[1])
            elif deed == "go on" and key in metered.running:
                metered.running[key].num_output += 1 + number
                metered.running[key].num_cached_tokens = number
            elif deed == "end" and key in metered.running:
                metered.end(key)
            elif deed == "settle" and key in metered.ended and key not in metered.running:
                metered.acknowledge(key)
            elif deed == "write":
                await metered.write()
                written = metered.unacknowledged
            elif deed == "kill":
                metered.log.close()  # the kernel does
                metered = MeteredRequests(path)
                assert metered.ended == written
        metered.log.close()
        assert left(path) == written

    asyncio.run(live())


async def test_records_before_a_torn_write_are_found(tmp_path: Path) -> None:
    path, states = tmp_path / "unacknowledged", {}
    metered = MeteredRequests(path)
    metered.running = {("g", "a"): Running("a", 1)}
    for number in range(4):
        metered.running["g", f"r{number}"] = Running(f"r{number}", number)
        await metered.write()
        states[path.stat().st_size] = metered.unacknowledged
    metered.log.close()
    data = path.read_bytes()
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        expected = max((size for size in states if size <= length), default=0)
        assert left(path) == states.get(expected, {})
    (tmp_path / "unacknowledged.damaged").unlink()
    path.write_bytes(data[:-1] + b"?")
    assert left(path) == states[sorted(states)[-2]], "a frame with another sum"
    assert (tmp_path / "unacknowledged.damaged").read_bytes() == data[sorted(states)[-2] : -1] + b"?"


async def test_the_file_does_not_grow_with_what_was_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPACT_BYTES", 4096)
    metered = MeteredRequests(tmp_path / "unacknowledged")
    metered.running["g", "long"] = Running("long")
    for number in range(500):
        key = ("g", f"r{number}")
        metered.running[key] = Running(key[1], 3)
        metered.running["g", "long"].num_output += 1
        await metered.write()
        metered.end(key)
        await metered.write()
        metered.acknowledge(key)
        assert (tmp_path / "unacknowledged").stat().st_size < 3 * 4096
    await metered.write()
    metered.end(("g", "long"))
    metered.acknowledge(("g", "long"))
    await metered.write()
    assert (tmp_path / "unacknowledged").stat().st_size == 0
    metered.log.close()


async def test_once_a_full_disk_has_room_again_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "unacknowledged"
    metered = MeteredRequests(path)
    metered.running["g", "a"] = Running("a", 1)
    await metered.write()
    with capture_logs() as said, full_disk(path.stat().st_size + 20):
        for number in range(3):
            metered.running["g", f"r{number}"] = Running(f"r{number}", number)
            await metered.write()
        assert [line["event"] for line in said] == ["unacknowledged_usage_not_written"]
        assert left_beside(path) == {("g", "a"): Running("a", 1).metered("g")}
    await metered.write()
    assert left_beside(path) == metered.unacknowledged
    metered.log.close()


def left_beside(path: Path) -> dict[Key, MeteredUsage]:
    """Return what the next engine would find if this one were killed now."""
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    return left(copy)


def test_a_file_is_one_engines(tmp_path: Path) -> None:
    first = FrameFile.open(tmp_path / "unacknowledged")
    first.replace(b"frame")  # which makes it another file under the same name
    with pytest.raises(InvalidConfig, match="in use by another engine; give each"):
        FrameFile.open(tmp_path / "unacknowledged")
    first.close()
    second = FrameFile.open(tmp_path / "unacknowledged")
    assert second.read() == [b"frame"]
    second.close()
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidConfig, match="cannot be written: Is a directory"):
        FrameFile.open(tmp_path / "folder")


# ── as an engine has it ──


async def written(path: Path, condition: Callable[[dict[Key, MeteredUsage]], bool]) -> dict[Key, MeteredUsage]:
    """Wait until the contents of the file meet the condition, and return them."""
    async with asyncio.timeout(60):
        while True:
            if condition(found := left_beside(path)):
                return found
            await asyncio.sleep(0.02)


async def test_an_engine_tells_another_gateway_what_the_engine_before_it_had_begun(
    bench: Any, submit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter_module, "GRACE_S", 0.1)
    path = tmp_path / "unacknowledged"
    log = UnacknowledgedUsageLog(path)
    async with bench(Script(step_delay_s=0.002), unacknowledged=log) as running:
        gateway = running.connect()
        await gateway.send(Hello("gateway", replica_id="dead"))
        await gateway.until(lambda: gateway.loads)
        await gateway.send(
            submit("r-0", billing_context=b"theirs", stopping=Stopping(max_tokens=100_000, ignore_eos=True))
        )
        await gateway.until(lambda: len(gateway.answers["r-0"].token_ids) > 20 if gateway.answers else False)
        found = await written(path, lambda left: any(one.num_output_tokens > 10 for one in left.values()))
        killed = path.with_name("copy").rename(tmp_path / "as it was")
    log.close()
    (begun,) = found.values()
    inherited = UnacknowledgedUsageLog(killed)
    async with bench(unacknowledged=inherited) as running:
        other = running.connect()
        await other.send(Hello("other", replica_id="alive"))
        assert "dead" in (await other.until_load(lambda load: load.unacknowledged_replicas)).unacknowledged_replicas
        message = None
        while not isinstance(message, UnacknowledgedUsage):
            message = await other.keep_alive_and_receive()
        assert message.records == [begun]
        assert (begun.replica_id, begun.request_id, begun.billing_context) == ("dead", "r-0", b"theirs")
        await other.send(UsageAcknowledgement("dead", ["r-0"]))
        await other.until_load(lambda load: not load.unacknowledged_replicas)
    inherited.close()
    assert left(killed) == {}


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_gateway_that_lives_is_asked_for_what_it_did_not_settle_and_for_nothing_else(
    tmp_path: Path, submit: Any
) -> None:
    async def leave() -> None:
        metered = MeteredRequests(tmp_path / "unacknowledged")
        metered.running = {("g", name): Running(name, 3) for name in ("a", "b", "c")}
        await metered.write()
        metered.log.close()

    asyncio.run(leave())
    clock, log = Clock(), UnacknowledgedUsageLog(tmp_path / "unacknowledged")
    meter = UsageMeter(clock, None, log)
    assert meter.due_from_earlier_engine("g") == [], "it has yet to settle by itself"
    meter.acknowledge("g", ["a"])
    meter.note(
        "g", submit("r", billing_context=b"bill"), Finished("r", 0, FinishReason.STOP, 3, 0, 5, Phases(1)), "standard"
    )
    clock.now_s += GRACE_S + 1
    assert meter.due_of_absent({"g"}) == []
    assert {one.request_id for one in meter.due_from_earlier_engine("g")} == {"b", "c"}
    assert meter.due_from_earlier_engine("g") == [], "told a moment ago"
    assert meter.due_from_earlier_engine("another") == []
    log.close()
