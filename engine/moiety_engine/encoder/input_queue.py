"""Queue of encoder inputs: by class rank, within a rank fairly between tenants (VTC), within a tenant in order.

The queue is bounded. A tenant may have its size divided by the number of waiting tenants and one more, so that there is
always room for another tenant's inputs, and more critical inputs displace less critical ones.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from moiety_wire.trace_events import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moiety_engine.messages import CoreSubmit

MAX_WAITING = 32_768  # inputs
MAX_WAITING_TOKENS = 1 << 23

_Lane = tuple[int, str]  # rank and tenant


class EncoderQueue:
    """Waiting inputs. A tenant's counter grows by its tokens divided by its weight, and the least counter is next."""

    def __init__(self, max_waiting: int = MAX_WAITING, max_tokens: int = MAX_WAITING_TOKENS) -> None:
        self._max_waiting, self._max_tokens = max_waiting, max_tokens
        self._lanes: dict[_Lane, deque[CoreSubmit]] = {}
        self._counters: dict[_Lane, float] = {}
        self._open: dict[int, CoreSubmit] = {}
        self._num_inputs, self._num_tokens = Counter[str](), Counter[str]()  # by tenant

    def __len__(self) -> int:
        return len(self._open)

    @property
    def waiting(self) -> Iterable[CoreSubmit]:
        return self._open.values()

    def find_refusal(self, submit: CoreSubmit) -> Reason | None:
        """Return why the input cannot be added now; None if it can, perhaps after `shed_for` has made room."""
        tenant, num_tokens = submit.tenant_id, len(submit.prompt_ids)
        parts = len(self._num_inputs.keys() | {tenant}) + 1
        own = self._num_inputs[tenant]
        too_many_tokens = self._num_tokens[tenant] + num_tokens > self._max_tokens // parts
        if own and (own >= max(1, self._max_waiting // parts) or too_many_tokens):
            return Reason.TENANT_QUEUE_FULL
        if self._fits(submit) or max(self._lanes)[0] > submit.service.rank:
            return None
        return Reason.QUEUE_FULL

    def shed_for(self, submit: CoreSubmit) -> list[CoreSubmit]:
        """Remove the newest of the less critical inputs until there is room for this one, and return them."""
        shed: list[CoreSubmit] = []
        while not self._fits(submit) and (worst := max(self._lanes)[0]) > submit.service.rank:
            lane = max((one for one in self._lanes if one[0] == worst), key=lambda one: len(self._lanes[one]))
            shed.append(self._lanes[lane].pop())
            self._removed(shed[-1], lane)
        return shed

    def append(self, submit: CoreSubmit) -> None:
        lane = (submit.service.rank, submit.tenant_id)
        if lane not in self._lanes:  # a tenant that returns has no claim to the time when it had no requests
            others = [self._counters[other] for other in self._lanes if other[0] == lane[0]]
            self._counters[lane] = min(others, default=0.0)
            self._lanes[lane] = deque()
        self._lanes[lane].append(submit)
        self._open[submit.key] = submit
        self._num_inputs[submit.tenant_id] += 1
        self._num_tokens[submit.tenant_id] += len(submit.prompt_ids)

    def remove(self, key: int) -> CoreSubmit | None:
        """Remove a waiting input and return it; None if it does not wait."""
        found = self._open.get(key)
        if found is not None:
            lane = (found.service.rank, found.tenant_id)
            self._lanes[lane].remove(found)
            self._removed(found, lane)
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
            self._counters[lane] += num_tokens / (submit.tenant_weight * submit.service.weight)
            self._removed(submit, lane)
            taken.append(submit)
        return taken

    def _fits(self, submit: CoreSubmit) -> bool:
        if not self._open:
            return True
        num_tokens = self._num_tokens.total() + len(submit.prompt_ids)
        return len(self._open) < self._max_waiting and num_tokens <= self._max_tokens

    def _rank(self, lane: _Lane, now_ns: int) -> int:
        """Return the rank of the lane's first input, ahead of all ranks once it has waited its class's longest wait."""
        head = self._lanes[lane][0]
        return -1 if now_ns - head.arrival_unix_ns > head.service.max_queue_s * 1e9 else lane[0]

    def _removed(self, submit: CoreSubmit, lane: _Lane) -> None:
        """Account for an input that was taken from its lane."""
        del self._open[submit.key]
        self._num_tokens[submit.tenant_id] -= len(submit.prompt_ids)
        self._num_inputs[submit.tenant_id] -= 1
        if not self._num_inputs[submit.tenant_id]:
            del self._num_inputs[submit.tenant_id], self._num_tokens[submit.tenant_id]
        if not self._lanes[lane]:
            del self._lanes[lane], self._counters[lane]
