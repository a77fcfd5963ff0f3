"""Batching strategies: how many waiting requests may join the batch now.

`none`        one request at a time, to its end
`static`      a batch of the waiting requests, up to a size; the next batch starts when the last of them has ended
`dynamic`     like static, but the first request waits for more requests up to a timeout
`padded`      like static, with every row as long as the longest: prompts are padded, finished rows continue
`continuous`  requests join and leave at every step

All strategies run on the same engine, so that measurements differ only by the strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moiety_engine.scheduling.limits import SchedulerLimits
from moiety_engine.scheduling.queues.request_queues import RequestQueues
from moiety_wire.engine_choices import Batching


@dataclass(frozen=True, slots=True)
class Strategy:
    """Batching strategy. `joinable` returns how many waiting requests may join; `padded` pads rows to the longest."""

    joinable: Callable[[RequestQueues, SchedulerLimits, int], int]  # the last argument is the time in nanoseconds
    padded: bool = False


def _join_none(queues: RequestQueues, _limits: SchedulerLimits, _now_ns: int) -> int:
    return 0 if queues.running else 1


def _join_static(queues: RequestQueues, limits: SchedulerLimits, _now_ns: int) -> int:
    return 0 if queues.running else min(limits.batch_size, limits.max_running)


def _join_dynamic(queues: RequestQueues, limits: SchedulerLimits, now_ns: int) -> int:
    if len(queues.waiting) + len(queues.returning) < limits.batch_size:
        waited_ms = (now_ns - queues.oldest_unix_ns(now_ns)) / 1e6
        if waited_ms < limits.batch_timeout_ms:
            return 0
    return _join_static(queues, limits, now_ns)


def _join_continuous(queues: RequestQueues, limits: SchedulerLimits, _now_ns: int) -> int:
    return limits.max_running - len(queues.running)


STRATEGIES = {
    Batching.NONE: Strategy(_join_none),
    Batching.STATIC: Strategy(_join_static),
    Batching.DYNAMIC: Strategy(_join_dynamic),
    Batching.PADDED: Strategy(_join_static, padded=True),
    Batching.CONTINUOUS: Strategy(_join_continuous),
}
