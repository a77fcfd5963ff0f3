"""Construction of a replica's scheduler, with a KV ledger for each rank group, from the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.cache.host import HostTier
from moiety_engine.cache.state_slots import StateSlots
from moiety_engine.cache_setup import table_windows, why_windows_are_kept
from moiety_engine.config import FleetFairness, PolicyName, Speculate
from moiety_engine.errors import InvalidConfig
from moiety_engine.model.vision_cost import encoder_cost
from moiety_engine.scheduling.admission.batching_strategies import STRATEGIES
from moiety_engine.scheduling.fairness.service_exchange import ServiceExchange
from moiety_engine.scheduling.kv.kv_ledger import KvLedger
from moiety_engine.scheduling.limits import SchedulerLimits
from moiety_engine.scheduling.policies.registry import counts_tenant_service
from moiety_engine.scheduling.scheduler import Scheduler
from moiety_wire.engine_choices import Batching

if TYPE_CHECKING:
    from moiety_engine.config import EngineConfig
    from moiety_engine.model.transformer import Transformer
    from moiety_engine.mtp_and_draft_model.draft_model import DraftModel
    from moiety_engine.runner.sizes import Sizes

log = structlog.get_logger()


def build_scheduler(config: EngineConfig, model: Transformer, sizes: Sizes, draft: DraftModel | None) -> Scheduler:
    """Build the scheduler. Without a draft model, drafts are found by n-gram lookup."""
    reason = why_windows_are_kept(config)
    if reason and any(getattr(layer.attention, "window", None) for layer in model.spec.layers):
        log.info("sliding_window_blocks_kept", reason=f"blocks behind sliding windows are not freed: {reason}")
    first, *further = [_build_ledger(config, model, sizes) for _ in range(model.ranks.num_cache_groups)]
    limits = SchedulerLimits(
        sizes.max_batch_tokens,
        sizes.max_running,
        config.static_batch_size,
        config.batch_timeout_ms,
        encoder_cost=encoder_cost(model.spec, model.ranks.rank_position.layout),
        batches_experts=config.expert_batching,
        steps_in_flight=config.steps_in_flight,
    )
    policy = config.policy if config.batching is Batching.CONTINUOUS else PolicyName.FCFS
    draft_tokens = 0 if config.speculate is Speculate.OFF else config.speculate_tokens
    strategy = STRATEGIES[config.batching]
    proposer = None if draft is None else draft.proposer
    scheduler = Scheduler(
        first,
        limits,
        strategy,
        policy,
        draft_tokens=draft_tokens,
        proposer=proposer,
        further=further,
    )
    if _exchanges_service(config, policy):
        scheduler.service_exchange = ServiceExchange(scheduler.policy, policy)
    return scheduler


def _exchanges_service(config: EngineConfig, policy: PolicyName) -> bool:
    """Return whether this replica exchanges the service of tenants with others. Raises InvalidConfig."""
    if config.fleet_fairness is FleetFairness.OFF:
        return False
    if counts_tenant_service(policy):
        return True
    names = ", ".join(name for name in PolicyName if counts_tenant_service(name))
    if config.fleet_fairness is FleetFairness.ON:
        raise InvalidConfig(
            f"--fleet-fairness on requires a policy with counters of tenants ({names}) under continuous batching, and "
            f"this engine uses {policy.value} under {config.batching.value} batching: choose one of them, or leave the "
            "option out"
        )
    log.info(
        "fleet_fairness_inactive",
        policy=policy.value,
        batching=config.batching.value,
        reason=f"the policy has no counters of tenants, unlike {names} under continuous batching",
    )
    return False


def _build_ledger(config: EngineConfig, model: Transformer, sizes: Sizes) -> KvLedger:
    """Build the KV ledger of one rank group."""
    return KvLedger(
        BlockPool(sizes.num_blocks),
        sizes.block_size,
        prefix_caching=config.prefix_caching,
        host=HostTier(sizes.num_host_blocks) if sizes.num_host_blocks else None,
        answers_apart=model.arithmetic.invariant,
        windows=table_windows(model, config),
        chunked=frozenset(table for table, group in enumerate(model.cache_groups) if group.chunked),
        max_chunk_tokens=sizes.max_batch_tokens,
        states=_state_slots(sizes) if sizes.num_state_slots else None,
    )


def _state_slots(sizes: Sizes) -> StateSlots:
    """Return the slots of recurrent states; drafts use those that running requests leave, as snapshots do."""
    spare = sizes.num_state_slots - sizes.max_running
    return StateSlots(sizes.num_state_slots, sizes.num_host_state_slots, spare)
