"""What a replica tells of its load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.messages import CoreLoad

if TYPE_CHECKING:
    from moiety_engine.runner.rebalancing import Rebalancing
    from moiety_engine.scheduling.scheduler import Scheduler
    from moiety_engine.transfer.exchange import Exchange


def load_of(
    scheduler: Scheduler, exchange: Exchange, rebalancing: Rebalancing | None, steps_total: int, requests_total: int
) -> CoreLoad:
    """The totals are since its start."""
    groups, arrivals = scheduler.groups, exchange.arrivals
    moved = {} if rebalancing is None else rebalancing.figures()
    return CoreLoad(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting + exchange.num_waiting,
        num_paused=scheduler.num_paused,
        kv_blocks_total=groups.num_blocks,
        kv_blocks_used=groups.num_used,
        kv_blocks_cached=sum(kv.pool.num_cached for kv in groups),
        block_size=groups.first.block_size,
        steps_total=steps_total,
        prompt_tokens_total=scheduler.prompt_tokens_total,
        cached_tokens_total=scheduler.cached_tokens_total,
        output_tokens_total=scheduler.output_tokens_total,
        requests_total=requests_total,
        host_blocks_total=sum(host.num_blocks for host in groups.hosts),
        host_blocks_used=sum(host.num_used for host in groups.hosts),
        swapped_out_blocks_total=sum(kv.swapped_out_total for kv in groups),
        swapped_in_blocks_total=sum(kv.swapped_in_total for kv in groups),
        classes=scheduler.class_loads(),
        overshot_tokens_total=scheduler.overshot_tokens_total,
        drafted_tokens_total=scheduler.drafted_tokens_total,
        accepted_tokens_total=scheduler.accepted_tokens_total,
        max_batch_tokens=scheduler.limits.max_batch_tokens,
        max_running=scheduler.limits.max_running,
        step_costs=scheduler.step_time.costs(),
        handed_over_requests_total=exchange.handed_over_requests_total,
        taken_over_requests_total=0 if arrivals is None else arrivals.taken_over_requests_total,
        lost_transfers_total=0 if arrivals is None else arrivals.lost_transfers_total,
        **moved,
    )
