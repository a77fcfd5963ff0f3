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
from typing import NamedTuple

from moiety_engine.scheduling.limits import SchedulerLimits
from moiety_engine.scheduling.queues.request_queues import RequestQueues
from moiety_wire.engine_choices import Batching


class QueueView(NamedTuple):
    """Input of a strategy."""

    num_running: int
    num_waiting: int
    oldest_wait_ms: Callable[[], float]
    max_running: int
    batch_size: int
    batch_timeout_ms: float


@dataclass(frozen=True, slots=True)
class Strategy:
    """Batching strategy. `joinable` returns how many waiting requests may join; `padded` pads rows to the longest."""

    joinable: Callable[[QueueView], int]
    padded: bool = False


def _join_none(view: QueueView) -> int:
    return 0 if view.num_running else 1


def _join_static(view: QueueView) -> int:
    return 0 if view.num_running else min(view.batch_size, view.max_running)


def _join_dynamic(view: QueueView) -> int:
    full = view.num_waiting >= view.batch_size
    return _join_static(view) if full or view.oldest_wait_ms() >= view.batch_timeout_ms else 0


def _join_continuous(view: QueueView) -> int:
    return view.max_running - view.num_running


def queue_view(queues: RequestQueues, limits: SchedulerLimits, now_ns: int) -> QueueView:
    """Return the current input of a strategy."""
    return QueueView(
        num_running=len(queues.running),
        num_waiting=len(queues.waiting) + len(queues.returning),
        oldest_wait_ms=lambda: (now_ns - queues.oldest_unix_ns(now_ns)) / 1e6,
        max_running=limits.max_running,
        batch_size=limits.batch_size,
        batch_timeout_ms=limits.batch_timeout_ms,
    )


STRATEGIES = {
    Batching.NONE: Strategy(_join_none),
    Batching.STATIC: Strategy(_join_static),
    Batching.DYNAMIC: Strategy(_join_dynamic),
    Batching.PADDED: Strategy(_join_static, padded=True),
    Batching.CONTINUOUS: Strategy(_join_continuous),
}
