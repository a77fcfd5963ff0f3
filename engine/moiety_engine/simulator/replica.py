"""Scheduler of one simulated replica, built as in the engine's loop, without model and tensors.

Only this module of the simulator knows how to build a scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.cache.host import HostTier
from moiety_engine.errors import InvalidConfig
from moiety_engine.scheduling.admission.batching_strategies import STRATEGIES
from moiety_engine.scheduling.kv.kv_ledger import KvLedger
from moiety_engine.scheduling.limits import SchedulerLimits
from moiety_engine.scheduling.outputs.output_predictor import OutputPredictor
from moiety_engine.scheduling.plan import Plan
from moiety_engine.scheduling.policies.registry import POLICIES
from moiety_engine.scheduling.preemption.preemption_execution import SwapCost
from moiety_engine.scheduling.scheduler import Scheduler
from moiety_engine.scheduling.step_time.step_time_model import StepTimeModel
from moiety_engine.simulator.devices import SimulatedDevice
from moiety_wire.engine_choices import Batching


@dataclass(frozen=True, slots=True)
class PredictionBias:
    """Factors on the scheduler's predictions, for experiments on the harm of wrong ones."""

    step_time: float = 1.0
    output_length: float = 1.0


NO_BIAS = PredictionBias()


def check_policy(name: str) -> None:
    """Raise InvalidConfig where no policy has this name."""
    if name not in POLICIES:
        raise InvalidConfig(f"policy {name!r} is not known; known are {', '.join(sorted(POLICIES))}")


def make_scheduler(
    device: SimulatedDevice, policy_name: str, *, prefix_caching: bool, biases: PredictionBias = NO_BIAS
) -> Scheduler:
    """Return a scheduler under this policy, with the device's limits and memory. Raises InvalidConfig."""
    check_policy(policy_name)
    host = HostTier(device.host_blocks) if device.host_blocks else None
    ledger = KvLedger(BlockPool(device.num_blocks), device.block_size, prefix_caching=prefix_caching, host=host)
    return Scheduler(
        ledger,
        SchedulerLimits(device.max_batch_tokens, device.max_running, chunk_tokens=device.chunk_tokens),
        STRATEGIES[Batching.CONTINUOUS],
        policy_name,
        step_time=StepTimeModel(bias=biases.step_time),
        lengths=OutputPredictor(bias=biases.output_length),
        swap=SwapCost(device.block_size * device.kv_token_bytes / device.copy_bytes_per_s),
    )


def num_copied(plan: Plan) -> int:
    """Return the number of blocks copied from or to the host before the step, or received from another engine."""
    return len(plan.swap_out) + len(plan.swap_in) + sum(len(kv_load.tables[0]) for kv_load in plan.kv_loads)
