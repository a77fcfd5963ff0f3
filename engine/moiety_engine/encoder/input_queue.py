"""Queue of encoder inputs: by class rank, within a rank fairly between tenants (VTC), within a tenant in order."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moiety_engine.messages import CoreSubmit

_Lane = tuple[int, str]  # rank and tenant


class EncoderQueue:
    """Waiting inputs. A tenant's counter grows by its tokens divided by its weight, and the least counter is next."""

    def __init__(self) -> None:
        self._lanes: dict[_Lane, deque[CoreSubmit]] = {}
        self._counters: dict[_Lane, float] = {}
        self._open: dict[int, CoreSubmit] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def waiting(self) -> Iterable[CoreSubmit]:
        return self._open.values()

    def append(self, submit: CoreSubmit) -> None:
        lane = (submit.service.rank, submit.tenant_id)
        if lane not in self._lanes:  # a tenant that returns has no claim to the time when it had no requests
            others = [self._counters[other] for other in self._lanes if other[0] == lane[0]]
            self._counters[lane] = min(others, default=0.0)
            self._lanes[lane] = deque()
        self._lanes[lane].append(submit)
        self._open[submit.key] = submit

    def remove(self, key: int) -> CoreSubmit | None:
        """Remove a waiting input and return it; None if it does not wait."""
        found = self._open.pop(key, None)
        if found is not None:
            lane = (found.service.rank, found.tenant_id)
            self._lanes[lane].remove(found)
            self._drop_empty(lane)
        return found

    def take(self, max_tokens: int, max_inputs: int, now_ns: int) -> list[CoreSubmit]:
        """Remove and return whole inputs for a step within both limits; a longer input comes alone."""
        taken: list[CoreSubmit] = []
        left = max_tokens
        while self._lanes and len(taken) < max_inputs:
            lane = min(self._lanes, key=lambda one: (self._rank(one, now_ns), self._counters[one]))
            submit = self._lanes[lane][0]
            num_tokens = len(submit.prompt_ids)
            if taken and num_tokens > left:
                break
            left -= num_tokens
            self._lanes[lane].popleft()
            del self._open[submit.key]
            self._counters[lane] += num_tokens / (submit.tenant_weight * submit.service.weight)
            self._drop_empty(lane)
            taken.append(submit)
        return taken

    def _rank(self, lane: _Lane, now_ns: int) -> int:
        """Return the rank of the lane's first input, ahead of all ranks once it has waited its class's longest wait."""
        head = self._lanes[lane][0]
        return -1 if now_ns - head.arrival_unix_ns > head.service.max_queue_s * 1e9 else lane[0]

    def _drop_empty(self, lane: _Lane) -> None:
        if not self._lanes[lane]:
            del self._lanes[lane], self._counters[lane]
