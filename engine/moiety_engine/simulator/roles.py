"""Comparison of disaggregated prefill and decode with the same number of devices that do both.

A prefill engine gets no feedback from decode engines, so the two are simulated one after the other, each device by the
real scheduler: first the prompts with one output token, then their decode with the transferred KV. Requests go to the
device with the least predicted work left, as gateways send them to the engine with the shortest wait. KV is sent while
the prompt is computed; decode waits for the rest. A link carries one request's KV as if it were alone on the link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from moiety_engine.errors import InvalidConfig
from moiety_engine.messages import CoreSubmit
from moiety_engine.simulator.capacity import Capacity
from moiety_engine.simulator.driver import OUTPUT_TOKEN, START_NS, DeviceTerms, Driver
from moiety_engine.simulator.metrics import spread, tpot_s
from moiety_engine.simulator.records import Record
from moiety_workload.request import TraceRequest, Workload

HAND_OVER_S = 0.002  # from the first token to the decode engine's scheduler, through the gateway
KV_BYTES_PER_S = 25e9  # 200 Gbit/s
SAME_ATTAINMENT = 0.005  # of first tokens in time; a smaller difference counts as none

CO_LOCATED = "co_located"


@dataclass(frozen=True, slots=True)
class RoleSettings(DeviceTerms):
    """Devices and settings of a role simulation."""

    capacity: Capacity
    kv_bytes_per_s: float = KV_BYTES_PER_S
    on_progress: Callable[[str], None] = lambda name: None


class AnswerDriver(Driver):
    """Device that decodes requests whose prompts another device has computed, in order of arrival."""

    def __init__(self, workload: Workload, fleet: RoleSettings, begun: Sequence[Record], max_tokens: int) -> None:
        super().__init__(workload, fleet.device, fleet.policy, fleet.classes, max_tokens=max_tokens)
        self._begun = begun

    def _give(self, record: Record, submit: CoreSubmit, now_ns: int) -> None:
        begun = self._begun[record.key]
        record.arrival_ns, record.first_ns = begun.arrival_ns, begun.first_ns
        record.latest_ns, record.last_ns, record.num_output = begun.latest_ns, begun.last_ns, 1
        record.peak_computed = record.request.input_tokens
        submit = msgspec.structs.replace(
            submit, arrival_unix_ns=begun.arrival_ns, resumed_ids=[OUTPUT_TOKEN], transfer_id="simulated"
        )
        num_transferred_tokens = record.request.input_tokens
        self._scheduler.add(submit, seed=record.key, now_ns=now_ns, num_transferred_tokens=num_transferred_tokens)


def compare_roles(workload: Workload, fleet: RoleSettings, num_prefill: int, num_decode: int) -> dict[str, Any]:
    """Compare all splits of `num_prefill` + `num_decode` devices with as many that do both.

    Returns the figures of each split and the recommended one. Raises InvalidConfig.
    """
    num_devices = num_prefill + num_decode
    if num_prefill < 1 or num_decode < 1:
        raise InvalidConfig("set both --prefill and --decode to at least 1: the number of devices of each role")
    splits = [(count, num_devices - count) for count in range(1, num_devices)]
    requested = f"{num_prefill}:{num_decode}"
    figures = {CO_LOCATED: _figures(simulate_colocated(workload, fleet, num_devices), workload)}
    for prefill, decode in splits:
        fleet.on_progress(f"{prefill}:{decode}")
        figures[f"{prefill}:{decode}"] = _figures(simulate_disaggregated(workload, fleet, prefill, decode), workload)
    return {
        "devices": num_devices,
        "requested": requested,
        "recommended": recommend(figures),
        "splits": figures,
        "tpot_p99_of_co_located": _ratio(figures[requested], figures[CO_LOCATED]),
    }


def recommend(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the split with the highest attainment; among equals, the one with the lowest p99 TPOT."""
    best = max(one["attainment"] for one in figures.values())
    near = {name: one for name, one in figures.items() if one["attainment"] >= best - SAME_ATTAINMENT}
    return min(near, key=lambda name: near[name]["tpot_s"]["p99"] or 0.0)


def simulate_colocated(workload: Workload, fleet: RoleSettings, num_devices: int) -> list[Record]:
    """Return the records of the workload on devices that do both prefill and decode."""
    records: list[Record] = []
    work = fleet.capacity.model.of_request
    max_tokens = max(request.output_tokens for request in workload.requests)
    for share in _spread(workload, num_devices, work):
        driver = Driver(share, fleet.device, fleet.policy, fleet.classes, max_tokens=max_tokens)
        records += driver.run().records
    return records


def simulate_disaggregated(workload: Workload, fleet: RoleSettings, num_prefill: int, num_decode: int) -> list[Record]:
    """Return the records of the workload on disaggregated prefill and decode devices."""
    model = fleet.capacity.model
    ended: list[Record] = []
    begun: list[tuple[float, Record, TraceRequest]] = []
    for share in _spread(workload, num_prefill, lambda one: model.seconds(one.input_tokens, one.input_tokens, 1)):
        prompts = replace(share, requests=tuple(replace(one, output_tokens=1) for one in share.requests))
        records = Driver(prompts, fleet.device, fleet.policy, fleet.classes, max_tokens=1).run().records
        for record, request in zip(records, share.requests, strict=True):
            record.request, record.num_wanted = request, request.output_tokens
            if record.completed and request.output_tokens > 1:
                begun.append((_transferred_s(record, fleet), record, request))
            else:
                ended.append(record)
    begun.sort(key=lambda one: one[0])
    return ended + _answers(workload, fleet, begun, num_decode)


def _answers(
    workload: Workload, fleet: RoleSettings, begun: list[tuple[float, Record, TraceRequest]], num_decode: int
) -> list[Record]:
    if not begun:
        return []
    model = fleet.capacity.model
    handed = tuple(replace(request, arrival_s=there_s) for there_s, _, request in begun)
    records_of = {id(request): record for request, (_, record, _) in zip(handed, begun, strict=True)}
    duration_s = max(workload.duration_s, handed[-1].arrival_s)
    max_tokens = max(request.output_tokens for request in workload.requests)
    ended: list[Record] = []
    whole = replace(workload, requests=handed, duration_s=duration_s)
    for share in _spread(whole, num_decode, lambda one: model.seconds(one.input_tokens, 0, one.output_tokens)):
        earlier = [records_of[id(request)] for request in share.requests]
        records = AnswerDriver(share, fleet, earlier, max_tokens).run().records
        for record, first in zip(records, earlier, strict=True):
            record.cached_tokens, record.scheduled_ns = first.cached_tokens, first.scheduled_ns
        ended += records
    return ended


def _transferred_s(record: Record, fleet: RoleSettings) -> float:
    """Return the time at which the decode engine has the request and its KV."""
    carry_ns = record.request.input_tokens * fleet.device.kv_token_bytes / fleet.kv_bytes_per_s * 1e9
    there_ns = max(record.first_ns, record.scheduled_ns + carry_ns) - START_NS
    return there_ns / 1e9 + HAND_OVER_S


def _spread(workload: Workload, count: int, work_s: Callable[[TraceRequest], float]) -> list[Workload]:
    """Return the requests of each device: each request goes to the device with the least work left on arrival."""
    free_at_s = [0.0] * count
    shares: list[list[TraceRequest]] = [[] for _ in range(count)]
    for request in workload.requests:
        chosen = min(range(count), key=lambda index: (max(free_at_s[index], request.arrival_s), len(shares[index])))
        free_at_s[chosen] = max(free_at_s[chosen], request.arrival_s) + work_s(request)
        shares[chosen].append(request)
    return [replace(workload, requests=tuple(share)) for share in shares if share]


def _figures(records: Sequence[Record], workload: Workload) -> dict[str, Any]:
    served = [record for record in records if record.completed]
    attained = sum(record.attained for record in records)
    return {
        "attainment": attained / len(records),
        "ttft_attainment": sum(map(_ttft_attained, records)) / len(records),
        "goodput_requests_per_s": attained / workload.duration_s,
        "num": len(records),
        "num_completed": len(served),
        "preemptions": sum(record.num_preemptions for record in records),
        "ttft_s": spread([(record.first_ns - record.arrival_ns) / 1e9 for record in records if record.first_ns]),
        "tpot_s": spread([value for record in served if (value := tpot_s(record)) is not None]),
        "e2e_s": spread([(record.last_ns - record.arrival_ns) / 1e9 for record in served]),
    }


def _ttft_attained(record: Record) -> bool:
    service = record.service_class
    if not record.first_ns:
        return False
    if service.ttft_s is None:
        return True
    allowed_s = service.ttft_s + service.ttft_per_1k_s * (record.request.input_tokens - record.cached_tokens) / 1000
    return record.first_ns - record.arrival_ns <= allowed_s * 1e9


def _ratio(one: Mapping[str, Any], other: Mapping[str, Any]) -> float | None:
    mine, theirs = one["tpot_s"]["p99"], other["tpot_s"]["p99"]
    return mine / theirs if mine and theirs else None
