"""Load figures of one replica and how often they are reported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from moiety_engine.messages import CoreLoad

if TYPE_CHECKING:
    from moiety_engine.disk.tier import DiskTier
    from moiety_engine.kv_transfer.connector import KvConnector
    from moiety_engine.runner.rebalancing import Rebalancing
    from moiety_engine.scheduling.scheduler import Scheduler

MAX_REPORTED_TENANTS = 20
TENANTS_COUNTED_EACH_NS = 250_000_000
REPORT_INTERVAL_NS = 50_000_000


def load_of(
    scheduler: Scheduler,
    kv_connector: KvConnector,
    disk: DiskTier | None,
    expert_cache: dict[str, int],
    rebalancing: Rebalancing | None,
    steps_total: int,
    requests_total: int,
    waited_s: tuple[float, float],
    excluded_ranks: int,
    tenant_blocks: dict[str, int],
    further: dict[str, Any],
    now_ns: int,
) -> CoreLoad:
    """Collect the load figures of a replica. Totals count since its start.

    `expert_cache` has the figures of the caches of offloaded experts on all ranks. `waited_s` holds the seconds that
    attention waited for the experts and the experts for attention. `excluded_ranks` is the number of excluded ranks.
    `tenant_blocks` is the last reading of `TenantBlocks`. `further` holds the figures of grammar compilation and of
    images. `now_ns` is the wall clock.
    """
    load = _load_of(scheduler, kv_connector, steps_total, requests_total, waited_s, tenant_blocks, further)
    exchange = scheduler.service_exchange
    if exchange is not None:
        load = msgspec.structs.replace(
            load,
            fleet_replicas=exchange.num_replicas,
            remote_service_total=exchange.received_total,
            tenant_service=exchange.take_report(now_ns / 1e9),
        )
    if excluded_ranks:
        load = msgspec.structs.replace(load, excluded_ranks=excluded_ranks)
    if disk is not None:
        load = _with_disk(load, disk)
    if rebalancing is not None:
        load = msgspec.structs.replace(load, **rebalancing.metrics())
    return msgspec.structs.replace(load, **expert_cache) if expert_cache else load


def _with_disk(load: CoreLoad, disk: DiskTier) -> CoreLoad:
    indexes = [group.index for group in disk.groups]
    savers, restorers = [group.saver for group in disk.groups], [group.restorer for group in disk.groups]
    return msgspec.structs.replace(
        load,
        num_waiting=load.num_waiting + disk.num_waiting,
        disk_bytes_total=sum(one.max_bytes for one in indexes),
        disk_bytes_used=sum(one.num_bytes for one in indexes),
        disk_blocks_cached=sum(one.num_blocks for one in indexes),
        disk_written_blocks_total=sum(one.written_blocks_total for one in savers),
        disk_written_bytes_total=sum(one.written_bytes_total for one in savers),
        disk_dropped_blocks_total=sum(one.dropped_blocks_total for one in savers),
        disk_failed_writes_total=sum(one.failed_writes_total for one in savers),
        disk_restored_blocks_total=sum(one.restored_blocks_total for one in restorers),
        disk_restored_bytes_total=sum(one.restored_bytes_total for one in restorers),
        disk_waited_requests_total=sum(one.waited_requests_total for one in restorers),
        disk_passed_over_requests_total=sum(one.passed_over_total for one in restorers),
        disk_lost_files_total=sum(one.lost_files_total for one in restorers),
    )


class TenantBlocks:
    """KV cache usage by tenant, counted a few times a second at most because a count visits all sequences."""

    def __init__(self) -> None:
        self._counted: dict[str, int] = {}
        self._counted_ns = 0

    def read(self, scheduler: Scheduler, now_ns: int) -> dict[str, int]:
        """Return the number of blocks by tenant; empty when no request is open."""
        if scheduler.idle:
            self._counted, self._counted_ns = {}, 0
        elif now_ns - self._counted_ns >= TENANTS_COUNTED_EACH_NS:
            self._counted, self._counted_ns = scheduler.queues.tenant_blocks(MAX_REPORTED_TENANTS), now_ns
        return self._counted


class LoadReporter:
    """Rate limiter of load reports.

    There are dozens of figures, and the engine server needs them only a few times a second; sending them with each step
    would add noticeably to the overhead of a short step.
    """

    def __init__(self) -> None:
        self._reported_ns = -REPORT_INTERVAL_NS

    def is_due(self, now_ns: int, *, is_news: bool) -> bool:
        """Return whether the load is to be reported with this step.

        `is_news` means that a request started or ended in this step. The check uses the wall clock, which may be set
        back.
        """
        if not is_news and 0 <= now_ns - self._reported_ns < REPORT_INTERVAL_NS:
            return False
        self._reported_ns = now_ns
        return True


def _load_of(
    scheduler: Scheduler,
    kv_connector: KvConnector,
    steps_total: int,
    requests_total: int,
    waited_s: tuple[float, float],
    tenant_blocks: dict[str, int],
    further: dict[str, Any],
) -> CoreLoad:
    """Collect the figures that every replica has: the first token of a request waits for this."""
    groups, kv_receiver, speculative = scheduler.groups, kv_connector.kv_receiver, scheduler.speculative_prefill.account
    outputs, limits = scheduler.output_processor, scheduler.limits
    num_cached = num_kept = swapped_out = swapped_in = host_hits = num_host = num_host_used = 0
    for kv in groups:
        num_cached += kv.pool.num_cached
        num_kept += kv.retention.size
        swapped_out += kv.swapped_out_total
        swapped_in += kv.swapped_in_total
        host_hits += kv.host_hit_blocks_total
        if kv.host is not None:
            num_host += kv.host.pool.num_blocks
            num_host_used += kv.host.pool.num_used
    return CoreLoad(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting + kv_connector.num_waiting + further.get("images_waiting", 0),
        num_paused=scheduler.num_paused,
        kv_blocks_total=groups.num_blocks,
        kv_blocks_used=groups.num_used,
        kv_blocks_cached=num_cached,
        block_size=groups.first.block_size,
        steps_total=steps_total,
        prompt_tokens_total=scheduler.prompt_tokens_total,
        cached_tokens_total=scheduler.cached_tokens_total,
        output_tokens_total=scheduler.output_tokens_total,
        requests_total=requests_total,
        host_blocks_total=num_host,
        host_blocks_used=num_host_used,
        swapped_out_blocks_total=swapped_out,
        swapped_in_blocks_total=swapped_in,
        attention_waited_seconds_total=waited_s[0],
        experts_waited_seconds_total=waited_s[1],
        kv_blocks_kept=num_kept,
        host_hit_blocks_total=host_hits,
        classes=scheduler.class_loads(),
        tokens_past_stop_total=outputs.tokens_past_stop_total,
        drafted_tokens_total=outputs.drafted_tokens_total,
        accepted_tokens_total=outputs.accepted_tokens_total,
        max_batch_tokens=limits.max_batch_tokens,
        max_running=limits.max_running,
        step_costs=scheduler.step_time.costs(),
        prefill_seconds_total=scheduler.prefill_seconds_total,
        decode_seconds_total=scheduler.decode_seconds_total,
        tenant_kv_blocks=tenant_blocks,
        pending_prefill_tokens=scheduler.queues.num_pending_tokens(),
        prefill_done_requests_total=kv_connector.prefill_done_requests_total,
        disaggregated_decode_requests_total=0
        if kv_receiver is None
        else kv_receiver.disaggregated_decode_requests_total,
        lost_transfers_total=kv_connector.lost_transfers_total,
        speculative_tokens_total=speculative.computed_total,
        speculative_used_tokens_total=speculative.used_total,
        speculative_wasted_tokens_total=speculative.wasted_total,
        **further,
    )
