"""Slots that tenants share: no tenant waits without end for others' work, and no slot is lost."""

from __future__ import annotations

import asyncio
import contextlib

from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.inference.tenant_slots import TenantSlots

NUM_SLOTS = 8


async def num_acquired(slots: TenantSlots, tenant_id: str, num: int, max_per_tenant: int = 4) -> int:
    """Let the tenant ask so many times; return how often it gets a slot at once. The others stop waiting."""
    asked = [asyncio.create_task(slots.acquire(tenant_id, max_per_tenant)) for _ in range(num)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    acquired = [task for task in asked if task.done()]
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    return len(acquired)


async def test_tenants_whose_work_never_ends_leave_a_slot_for_each_of_many_others() -> None:
    slots = TenantSlots(NUM_SLOTS)
    assert [await num_acquired(slots, f"greedy{number}", 9) for number in range(3)] == [4, 1, 1]
    assert [await num_acquired(slots, f"other{number}", 1) for number in range(3)] == [1, 1, 0]
    slots.release("greedy0")
    assert await num_acquired(slots, "greedy0", 1) == 0
    assert await num_acquired(slots, "last", 1) == 1


async def test_a_free_slot_goes_to_the_waiting_tenant_with_the_fewest() -> None:
    slots, order = TenantSlots(4), list[str]()

    async def work(tenant_id: str) -> None:
        await slots.acquire(tenant_id, 4)
        order.append(tenant_id)

    tasks = [asyncio.create_task(work(tenant_id)) for tenant_id in ("a", "b", "c", "d", "a", "a", "b", "e", "e")]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == ["a", "b", "c", "d"]
    for released in ("d", "c", "a", "b", "e"):
        slots.release(released)
        await asyncio.sleep(0)
    assert order[4:] == ["e", "a", "b", "e"]  # and none beside its own, since at most half are free
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans()), max_size=40))
def test_no_slot_is_lost_and_no_limit_exceeded_however_waits_are_cancelled(
    steps: list[tuple[str, int, bool]],
) -> None:
    async def run() -> None:
        slots, held, most = TenantSlots(3), dict.fromkeys("abc", 0), 0

        async def work(tenant_id: str, num_yields: int) -> None:
            nonlocal most
            await slots.acquire(tenant_id, 2)
            try:
                held[tenant_id] += 1
                most = max(most, sum(held.values()), 3 * (held[tenant_id] > 2) + held[tenant_id])
                for _ in range(num_yields):
                    await asyncio.sleep(0)
            finally:
                held[tenant_id] -= 1
                slots.release(tenant_id)

        tasks = []
        for tenant_id, num_yields, is_cancelled in steps:
            tasks.append(asyncio.create_task(work(tenant_id, num_yields)))
            await asyncio.sleep(0)
            if is_cancelled:
                tasks[len(tasks) // 2].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        assert most <= 3
        async with asyncio.timeout(5):
            assert [await num_acquired(slots, tenant_id, 1) for tenant_id in "abc"] == [1, 1, 1]

    asyncio.run(run())
