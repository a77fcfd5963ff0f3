"""Injected faults: functions of the scene that break something, wait, and repair it before they return.

The stage's supervisor restarts processes that ended, as a cluster does.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import httpx
import psutil
from cluster import make_tenant
from postgres import Postgres

from chaos.load import Tenant
from chaos.places import SmallDisk
from chaos.poison import Poison
from chaos.stage import DEMO, SCRIPTED, Part, Stage
from chaos.watch import until_whole

ENGINE, DEMO_ENGINE, OTHER_DEMO_ENGINE = ("engine", 0), ("engine", 2), ("engine", 3)
GATEWAY, OTHER_GATEWAY = ("gateway", 0), ("gateway", 1)
TRACES = ("traces", 0)
PAUSE_S, CUT_S, AWAY_S, FULL_S, CLOCK_S, POISON_S = 6.0, 8.0, 5.0, 8.0, 6.0, 8.0
SLOW_BITS_PER_S = 120_000
BACK_S, AHEAD_S = -3600.0, 120.0
READY_S = 60.0
NUM_LONG, LONG_PROMPT = 8, 150


@dataclass
class Scene:
    """Everything that can be broken, and the faults' notes."""

    stage: Stage
    postgres: Postgres
    disk: SmallDisk
    tenants: Sequence[Tenant]
    notes: dict[str, object]


async def engine_paused(scene: Scene) -> None:
    """Pause an engine's processes for longer than a gateway's heartbeat timeout."""
    with scene.stage.paused(ENGINE):
        await asyncio.sleep(PAUSE_S)


async def gateway_paused(scene: Scene) -> None:
    """Pause a gateway for longer than the engines' heartbeat timeout."""
    with scene.stage.paused(GATEWAY):
        await asyncio.sleep(PAUSE_S)


async def link_slow(scene: Scene) -> None:
    """Put an engine behind a link of 120 kbit/s with delay and loss."""
    with scene.stage.wires.slow("engine-0", SLOW_BITS_PER_S):
        await asyncio.sleep(CUT_S)


async def link_cut(scene: Scene) -> None:
    """Cut the link between one gateway and one engine; both still reach all others."""
    with scene.stage.wires.cut("gateway-0", "engine-1"):
        await asyncio.sleep(CUT_S)


async def database_paused(scene: Scene) -> None:
    """Pause the database: connections stay open without an answer."""
    await _while(scene.postgres.paused())


async def database_stopped(scene: Scene) -> None:
    """Shut down the database, and start it again."""
    await _while(scene.postgres.stopped())


async def database_killed(scene: Scene) -> None:
    """Kill all of the database's processes; another one recovers from its log, as after a failover."""
    await _while(scene.postgres.killed())


async def disk_full(scene: Scene) -> None:
    """Fill the disk of the gateways' journals, the engines' unacknowledged usage and the traces."""
    with scene.disk.full():
        await asyncio.sleep(FULL_S)


async def traces_paused(scene: Scene) -> None:
    """Pause the trace store."""
    with scene.stage.paused(TRACES):
        await asyncio.sleep(PAUSE_S)


async def traces_killed(scene: Scene) -> None:
    """Kill the trace store."""
    await kill(scene, TRACES)


async def poisoned(scene: Scene) -> None:
    """Send invalid requests: malformed, deep, huge, invalid UTF-8, smuggled, a byte at a time."""
    async with scene.stage.admin() as client:
        _, key = await make_tenant(client, "poisoner")  # apart: its rows are of requests that the load has not sent
    poison = Poison(scene.stage, key, seed=0)
    await poison.run(POISON_S)
    scene.notes |= {"sent": poison.answers.total(), "harm": poison.harm}


async def clock_jumps(scene: Scene) -> None:
    """Set the wall clocks of one gateway and one engine back an hour, then two minutes ahead, then right again."""
    try:
        for ahead_s in (BACK_S, AHEAD_S):
            scene.stage.clock.set(ahead_s)
            await asyncio.sleep(CLOCK_S)
    finally:
        scene.stage.clock.set(0)


async def gateway_killed(scene: Scene) -> None:
    """Kill a gateway."""
    await kill(scene, GATEWAY)


async def server_killed(scene: Scene) -> None:
    """Kill an engine server; its core must end too."""
    core = scene.stage.family(ENGINE)[1:]
    await kill(scene, ENGINE)
    _, alive = psutil.wait_procs(core, timeout=10)
    scene.notes["left_behind"] = len(alive)


async def core_killed(scene: Scene) -> None:
    """Kill an engine core; its server must end too."""
    await kill(scene, OTHER_DEMO_ENGINE, scene.stage.family(OTHER_DEMO_ENGINE)[-1])


async def engine_without_memory(scene: Scene) -> None:
    """Limit an engine's memory and send prompts that need more; then kill it as the kernel does."""
    part = DEMO_ENGINE if scene.stage.demo else ENGINE
    family = scene.stage.family(part)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms,) * 2)
    scene.notes["long_prompts"] = await _ask_long(scene)
    scene.notes["survived_the_limit"] = scene.stage.process(*part).pid == family[0].pid
    if scene.notes["survived_the_limit"]:
        await kill(scene, part, family[-1])


async def _ask_long(scene: Scene) -> dict[str, int]:
    """Send prompts of many tokens to any engine of the model; return the answers by status."""
    stage, begin_s = scene.stage, time.monotonic()
    async with stage.admin() as client:
        _, key = await make_tenant(client, "long-winded")  # apart, for the same reason
    body = {"model": DEMO if stage.demo else SCRIPTED, "max_tokens": 16, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"}
    found: Counter[str] = Counter()
    async with httpx.AsyncClient(base_url=stage.url(0), headers=headers, timeout=READY_S) as client:

        async def ask(number: int) -> None:
            prompt = f"{number} " + "what is 17 + 25? " * LONG_PROMPT
            try:
                found[str((await client.post("/v1/completions", json={**body, "prompt": prompt})).status_code)] += 1
            except httpx.HTTPError as error:
                found[type(error).__name__] += 1

        await asyncio.gather(*(ask(number) for number in range(NUM_LONG)))
    await asyncio.sleep(max(0.0, begin_s + AWAY_S - time.monotonic()))
    return dict(found)


async def both_killed(scene: Scene) -> None:
    """Kill a gateway and an engine at once."""
    scene.stage.process(*GATEWAY).kill()
    await kill(scene, ENGINE)


async def rolled(scene: Scene) -> None:
    """Stop every part gracefully and start it again, one after the other, as a cluster's rolling update does."""
    for part in scene.stage.parts:
        await stop(scene, part)
        await until_whole(scene.stage, READY_S)


async def _while(away: contextlib.AbstractContextManager[None]) -> None:
    """Enter, wait, and leave in a thread, since entering and leaving block."""
    await asyncio.to_thread(away.__enter__)
    try:
        await asyncio.sleep(AWAY_S)
    finally:
        await asyncio.to_thread(away.__exit__, None, None, None)


async def stop(scene: Scene, part: Part) -> None:
    """Stop a part in order, and wait until the supervisor has started it again."""
    before = scene.stage.process(*part).pid
    scene.stage.process(*part).terminate()
    await _until(lambda: scene.stage.process(*part).pid != before, f"{part} stops and is started again")


async def kill(scene: Scene, part: Part, process: psutil.Process | None = None) -> None:
    """Kill a part, or one of its processes, and wait until the supervisor has started the part again."""
    before = scene.stage.process(*part).pid
    (process or scene.stage.process(*part)).kill()
    await _until(lambda: scene.stage.process(*part).pid != before, f"{part} ends and is started again")


async def _until(holds: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + READY_S
    while not holds():
        if time.monotonic() > until_s:
            raise SystemExit(f"not within {READY_S:.0f} s: {what}")
        await asyncio.sleep(0.05)


Fault = Callable[[Scene], Awaitable[None]]
BOTH = "gateway and engine killed"
SOFT: Mapping[str, Fault] = {  # after these every process is the one that it was
    "engine paused": engine_paused,
    "gateway paused": gateway_paused,
    "link slow": link_slow,
    "link cut": link_cut,
    "database paused": database_paused,
    "database stopped": database_stopped,
    "database killed": database_killed,
    "disk full": disk_full,
    "trace store paused": traces_paused,
    "poisoned requests": poisoned,
    "clock jumps": clock_jumps,
}
HARD: Mapping[str, Fault] = {
    "gateway killed": gateway_killed,
    "trace store killed": traces_killed,
    "engine server killed": server_killed,
    "engine core killed": core_killed,
    "engine out of memory": engine_without_memory,
    BOTH: both_killed,
    "rolling restart": rolled,
}
SHORT = ("gateway killed", "engine paused", "link cut")
