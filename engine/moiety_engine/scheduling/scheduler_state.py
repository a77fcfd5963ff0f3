"""State that the parts of one scheduler share: its blocks, queues, policy, counters and predictions."""

from __future__ import annotations

from dataclasses import dataclass

from moiety_engine.images.encoder_cost import EncoderWork
from moiety_engine.scheduling.kv.kv_groups import KvGroups
from moiety_engine.scheduling.policies.policy_interface import Policy
from moiety_engine.scheduling.queues.class_counters import ClassCounters
from moiety_engine.scheduling.queues.request_queues import RequestQueues
from moiety_engine.scheduling.step_time.step_time_model import StepTimeModel


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Objects of one scheduler that its admission, prefill planning and preemption read and change."""

    kv: KvGroups
    queues: RequestQueues
    policy: Policy
    tally: ClassCounters
    step_time: StepTimeModel
    encoder_work: EncoderWork
