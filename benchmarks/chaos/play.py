"""One run from the first process to the last check: load, faults with pauses between, and the verdict."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos import judge
from chaos.batch import Batch
from chaos.books import compare_books, what_is_left
from chaos.faults import BOTH, Fault, Scene
from chaos.judge import Window
from chaos.load import SLOS, Asked, Load, make_tenants
from chaos.stage import Stage, on_stage
from chaos.watch import Held, Lateness, grown, until_whole, what_is_held

WHOLE_LIMIT_S, SETTLE_S, LEASE_ENDS_S = 60.0, 120.0, 45.0
IDLE_S = 6.0
FILLING_RATE, FILLING_OPEN = 250.0, 32  # at most: requests a second, and at a time
FILLING_LENGTHS = [(16, 4), (200, 4)]


@dataclass(frozen=True)
class Play:
    """Settings of a run."""

    soft: dict[str, Fault]
    hard: dict[str, Fault]
    rate: float
    demo_rate: float
    warm_up_s: float
    num_filling: int  # requests before all others, after which caches have what they take
    quiet_s: float
    batch_lines: int
    seed: int
    demo: bool


async def play(play: Play, folder: Path) -> dict[str, Any]:
    """Run and return the report."""
    async with on_stage(folder, demo=play.demo) as (stage, postgres, disk):
        async with stage.admin() as client:
            tenants = await make_tenants(client, random.Random(play.seed))
        batch = await Batch.submit(stage, tenants, play.batch_lines)
        scene = Scene(stage, postgres, disk, tenants, {})
        filling = Load(
            stage, tenants, play.seed + 5, lengths=FILLING_LENGTHS, most=play.num_filling, most_open=FILLING_OPEN
        )
        await filling.run(lambda _: FILLING_RATE, play.demo_rate, asyncio.Event())
        warm = Load(stage, tenants, play.seed + 1)
        await _for(warm, play.warm_up_s, play.rate, play.demo_rate)
        warming = dict(list(play.soft.items())[: len(play.soft) // 2])
        soft = {name: fault for name, fault in play.soft.items() if name not in warming}
        first, windows = await _act(play, scene, warming, play.seed + 2)
        before = await _idle(stage)  # what caches, pools and arenas take they have by now
        more_asked, more_windows = await _act(play, scene, soft, play.seed + 4)
        middle = await _idle(stage)
        last_asked, last_windows = await _act(play, scene, play.hard, play.seed + 3)
        asked = [*filling.asked, *warm.asked, *first, *more_asked, *last_asked]
        windows += [*more_windows, *last_windows]
        _say(f"{len(asked)} requests: {judge.count_outcomes(asked)}")
        batch_done = await batch.result(SETTLE_S)
        waited_s = await stage.wait_settled(SETTLE_S)
        await asyncio.sleep(LEASE_ENDS_S)  # leases of those that died expire, and are released where that is proven
        after = await what_is_held(stage)
        held = grown(before, middle) + grown(middle, after)
        books = await compare_books(stage, postgres, tenants, asked, batch.answer_ids)
        left = await what_is_left(stage, postgres, waited_s)
        rows = [judge.row_of(window, asked) for window in windows]
        share, number = judge.attainment(asked, windows)
        return {
            "slos": SLOS,
            "verdict": _verdict(rows, books, left, held, share, batch_done),
            "faults": rows,
            "requests": judge.count_outcomes(asked),
            "priority": {"attainment": round(share, 5), "requests": number},
            "batch": batch_done,
            "books": books,
            "left": left,
            "processes": held,
            "ended_by_themselves": [f"{kind}-{number}: {code}" for _, (kind, number), code in stage.ends],
        }


async def _for(load: Load, seconds: float, rate: float, demo_rate: float) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, stopping.set)
    await load.run(lambda _: rate, demo_rate, stopping)


async def _act(play: Play, scene: Scene, faults: dict[str, Fault], seed: int) -> tuple[list[Asked], list[Window]]:
    """Load for as long as these faults take, one after the other."""
    if not faults:
        return [], []
    load, windows = Load(scene.stage, scene.tenants, seed), []
    stopping = asyncio.Event()
    lateness = Lateness()
    watching = asyncio.create_task(lateness.watch())
    running = asyncio.create_task(load.run(lambda _: play.rate, play.demo_rate, stopping))
    await asyncio.sleep(play.quiet_s / 2)
    for name, fault in faults.items():
        scene.notes = {}
        lateness.take()
        window = Window(name, time.monotonic(), notes=scene.notes)
        await fault(scene)
        window.end_s = time.monotonic()
        window.whole_after_s = await until_whole(scene.stage, WHOLE_LIMIT_S)
        await asyncio.sleep(max(0.0, window.end_s + play.quiet_s - time.monotonic()))
        window.next_s, window.late_s = time.monotonic(), lateness.take()
        windows.append(window)
        _say(f"{name}: {judge.row_of(window, [one for one in load.asked if one.end_s])}")
    stopping.set()
    watching.cancel()
    await running
    return load.asked, windows


async def _idle(stage: Stage) -> dict[int, Held]:
    """Return what is held without load."""
    await asyncio.sleep(IDLE_S)
    return await what_is_held(stage)


def _verdict(
    rows: Sequence[dict[str, Any]],
    books: dict[str, Any],
    left: dict[str, Any],
    held: Sequence[dict[str, Any]],
    share: float,
    batch: dict[str, Any],
) -> dict[str, bool]:
    notes = [row.get("notes", {}) for row in rows]
    engines = books["engines"] or {"differences": ["none"]}
    quarantined = books["reconciliation"]["quarantined"] or ()
    unproven = sum(one["leases"] for one in quarantined)
    both = sum(row["fault"] == BOTH for row in rows)  # which leaves nobody who could prove the gateway's leases unspent
    return {
        "every_request_has_one_outcome": not books["not_one_outcome"],
        "every_line_of_the_batch_is_answered_once": batch["is_whole"],
        "no_limit_is_exceeded": not books["overspent"],
        "books_agree": bool(books["reconciliation"]["agrees"]),
        "settled_is_generated": not engines["differences"],
        "priority_slo_attained": share >= judge.ATTAINMENT,
        "recovered_in_10_s": all(row["recovered"] for row in rows),
        "poison_does_no_harm": not any(note.get("harm") for note in notes),
        "no_process_is_left_behind": not any(note.get("left_behind") for note in notes),
        "no_blocks_or_requests_leak": not any(any(engine.values()) for engine in left["engines"]),
        "no_leases_leak": left["leases_outstanding"] == unproven and len(quarantined) <= both,
        "no_memory_leaks": not any(row["leaks_memory"] for row in held),
        "no_sockets_leak": not any(row["leaks_descriptors"] for row in held),
        "nothing_unsettled": left["settled_after_s"] < SETTLE_S,
    }


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
