"""Resources that the processes hold, and the health of the stage."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from dataclasses import dataclass

import psutil

from chaos.stage import Part, Stage

SAMPLES, SAMPLE_S = 5, 0.3
LATENESS_EVERY_S = 0.1
MAX_GROWTH = 0.03  # of memory
LITTLE_BYTES = 1 << 20  # of growth, which is no leak of a small process
SPARE_DESCRIPTORS = 10  # connections of pools that come and go


@dataclass(frozen=True, slots=True)
class Held:
    """Resources that one process holds."""

    part: Part
    role: str  # its place in the part: the engine server is 0
    pid: int
    born_s: float
    rss_bytes: int
    descriptors: int


async def what_is_held(stage: Stage) -> dict[int, Held]:
    """Return the median of some samples by process."""
    samples: dict[int, list[Held]] = {}
    for _ in range(SAMPLES):
        for part in stage.parts:
            for place, process in enumerate(stage.family(part)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    rss, born = process.memory_info().rss, process.create_time()
                    one = Held(part, str(place), process.pid, born, rss, process.num_fds())
                    samples.setdefault(process.pid, []).append(one)
        await asyncio.sleep(SAMPLE_S)
    return {pid: _median(found) for pid, found in samples.items()}


def _median(found: list[Held]) -> Held:
    one = found[-1]
    rss = int(statistics.median(held.rss_bytes for held in found))
    descriptors = int(statistics.median(held.descriptors for held in found))
    return Held(one.part, one.role, one.pid, one.born_s, rss, descriptors)


def grown(before: dict[int, Held], after: dict[int, Held]) -> list[dict[str, object]]:
    """Return the growth of the processes that are in both, and whether it is too much."""
    rows = []
    for pid in before.keys() & after.keys():
        old, new = before[pid], after[pid]
        if old.born_s != new.born_s:
            continue
        growth = new.rss_bytes / old.rss_bytes - 1
        rows.append(
            {
                "process": f"{old.part[0]}-{old.part[1]}" + (f" ({old.role})" if old.role != "0" else ""),
                "rss_bytes": [old.rss_bytes, new.rss_bytes],
                "growth": round(growth, 4),
                "descriptors": [old.descriptors, new.descriptors],
                "leaks_memory": growth > MAX_GROWTH and new.rss_bytes - old.rss_bytes > LITTLE_BYTES,
                "leaks_descriptors": new.descriptors > old.descriptors + SPARE_DESCRIPTORS,
            }
        )
    return sorted(rows, key=lambda row: str(row["process"]))


class Lateness:
    """Largest scheduling delay of this process since the last call, a measure of the machine's load."""

    def __init__(self) -> None:
        self._worst_s = 0.0

    async def watch(self) -> None:
        while True:
            due_s = time.monotonic() + LATENESS_EVERY_S
            await asyncio.sleep(LATENESS_EVERY_S)
            self._worst_s = max(self._worst_s, time.monotonic() - due_s)

    def take(self) -> float:
        worst_s, self._worst_s = self._worst_s, 0.0
        return worst_s


async def until_whole(stage: Stage, limit_s: float) -> float | None:
    """Return the seconds until every part serves and sees all others; None after the time limit."""
    begin_s = time.monotonic()
    while time.monotonic() - begin_s < limit_s:
        if await stage.is_whole():
            return time.monotonic() - begin_s
        await asyncio.sleep(0.2)
    return None
