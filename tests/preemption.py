"""Preemption of one sequence of an engine loop, as if a decode needed its blocks."""

from __future__ import annotations

from moiety_engine.loop import EngineLoop
from moiety_engine.scheduling.preemption.preemption_execution import SwapCost
from moiety_engine.sequence import Sequence
from moiety_wire.trace_events import Reason


def preempt(loop: EngineLoop, key: int) -> Sequence:
    """Preempt the running sequence, which swaps if the host has memory for it; return it."""
    scheduler = loop.scheduler
    scheduler.swap_costs(SwapCost())
    victim = scheduler.queues.by_key[key]
    scheduler._preemptor.preempt(victim, Reason.DECODE_NEEDS_BLOCKS, 0, None, take_blocks=True)
    return victim
