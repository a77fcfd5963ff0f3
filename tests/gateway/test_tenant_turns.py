"""The order of turns among tenants."""

from __future__ import annotations

import asyncio

import pytest

from moiety_platform.message_batches.tenant_locks import TenantLocks


async def test_work_of_one_tenant_is_sequential_and_of_several_concurrent() -> None:
    turns, running, seen = TenantLocks(), list[str](), list[list[str]]()

    async def work(tenant_id: str) -> None:
        async with turns.of(tenant_id):
            running.append(tenant_id)
            seen.append(sorted(running))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            running.remove(tenant_id)

    await asyncio.gather(*(work(one) for one in ("a", "a", "b", "a")))
    assert max(len(one) for one in seen) == 2 and all(one.count("a") <= 1 for one in seen)
    assert not turns._locks and not turns._users


async def test_a_turn_is_given_on_after_an_error_and_a_cancellation() -> None:
    turns = TenantLocks()
    with pytest.raises(ValueError, match="failed"):
        async with turns.of("a"):
            raise ValueError("failed")
    holder = asyncio.Event()

    async def hold() -> None:
        async with turns.of("a"):
            await holder.wait()

    first, second = asyncio.create_task(hold()), asyncio.create_task(hold())
    await asyncio.sleep(0)
    second.cancel()
    first.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    async with asyncio.timeout(5), turns.of("a"):
        pass
    assert not turns._locks
