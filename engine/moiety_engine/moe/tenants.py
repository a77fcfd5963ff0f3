"""Tenant slots of the expert counters: the tenants with the most tokens have a slot each, all others share one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat

from moiety_wire.experts import OTHER_TENANTS

NO_TENANT, OTHER_SLOT = 0, 1  # slots; NO_TENANT is for rows that belong to no request
NUM_SLOTS = 18
MAX_KNOWN = 4096  # tenants whose tokens are tracked to find the busiest ones
KEPT_A_MINUTE = 0.9  # decay of a tenant's weight per minute


class TenantSlots:
    """Owner of the assignment of tenants to slots. Used by the step loop's thread only."""

    def __init__(self, num_slots: int = NUM_SLOTS, rank_weights: Sequence[int] | None = None) -> None:
        """Create the slots.

        `rank_weights`: weight of a token of service rank 0, 1, 2 … in the weighted counts; further ranks have the last
        weight. None: every token counts as 1.
        """
        self._num_slots = num_slots
        self.rank_weights = None if rank_weights is None else tuple(rank_weights)
        self._slot_of: dict[str, int] = {"": NO_TENANT, OTHER_TENANTS: OTHER_SLOT}
        self._weight_of: dict[str, float] = {}
        self._steps = 0
        self.num_reassigned = 0  # times that tenants may have got another slot

    def slots_of(self, tenants: Sequence[str], num_tokens: Sequence[int]) -> list[int]:
        """Return the slot of each part of a step; part i has `num_tokens[i]` tokens of tenant `tenants[i]`.

        A new tenant gets a free slot if there is one. The empty tenant name has slot NO_TENANT.
        """
        known, weight_of = self._slot_of, self._weight_of
        slots = list(map(known.get, tenants, repeat(-1)))
        if -1 in slots:
            for part, (tenant_id, count) in enumerate(zip(tenants, num_tokens, strict=True)):
                if slots[part] < 0:
                    slots[part] = known[tenant_id] if tenant_id in known else self._take(tenant_id)
                if slots[part] == OTHER_SLOT and (tenant_id in weight_of or len(weight_of) < MAX_KNOWN):
                    weight_of[tenant_id] = weight_of.get(tenant_id, 0.0) + count
        self._steps += any(slots)
        return slots

    def count_step(self) -> None:
        """Count a step with the slots of an earlier one, none of which is OTHER_SLOT."""
        self._steps += 1

    def weight_of_rank(self, rank: int) -> int:
        """Return the weight of a token of this service rank in the weighted counts."""
        weights = self.rank_weights
        return 1 if weights is None else weights[min(rank, len(weights) - 1)]

    def weigh(self, tokens_of: Mapping[str, int]) -> None:
        """Add the tokens counted for tenants with a slot to their weights."""
        for tenant_id, tokens in tokens_of.items():
            self._weight_of[tenant_id] = self._weight_of.get(tenant_id, 0.0) + tokens

    def names(self) -> dict[int, str]:
        """Return the tenant of each assigned slot, except slot NO_TENANT."""
        return {slot: tenant_id for tenant_id, slot in self._slot_of.items() if slot != NO_TENANT}

    def take_steps(self) -> int:
        """Return the number of steps with tokens of any tenant since the last call."""
        steps, self._steps = self._steps, 0
        return steps

    def reassign(self) -> None:
        """Reassign the slots to the busiest tenants. Call it only while no untaken counts exist."""
        weights = dict.fromkeys((one for one, slot in self._slot_of.items() if slot > OTHER_SLOT), 0.0)
        weights |= {one: weight * KEPT_A_MINUTE for one, weight in self._weight_of.items() if weight >= 1}
        weights.pop(OTHER_TENANTS, None)
        busiest = sorted(weights, key=lambda one: (-weights[one], one))[: self._num_slots - 2]
        staying = {one: self._slot_of[one] for one in busiest if self._slot_of.get(one, OTHER_SLOT) > OTHER_SLOT}
        free = sorted(set(range(OTHER_SLOT + 1, self._num_slots)) - set(staying.values()), reverse=True)
        new = {one: free.pop() for one in busiest if one not in staying}
        self._weight_of = weights
        self._slot_of = {"": NO_TENANT, OTHER_TENANTS: OTHER_SLOT} | staying | new
        self.num_reassigned += 1

    def _take(self, tenant_id: str) -> int:
        """Return a free slot for a new tenant and assign it, or OTHER_SLOT if none is free."""
        taken = len(self._slot_of)
        if taken == self._num_slots:
            return OTHER_SLOT
        slot = min(set(range(self._num_slots)) - set(self._slot_of.values()))
        self._slot_of[tenant_id] = slot
        return slot
