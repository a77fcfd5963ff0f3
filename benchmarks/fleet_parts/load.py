"""Open-loop load on several gateways: requests at a given rate, whatever the answers take."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from moiety_platform.bench.report import percentile


@dataclass
class Answers:
    """Answers of one stage, with the latency from the time at which each request was due."""

    offered_per_s: float
    seconds: float
    latencies_s: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    num_unsent: int = 0  # requests that were due, but for which all connections were taken

    def report(self) -> dict[str, object]:
        """Return the figures."""
        ok = self.statuses["200"]
        spread = {f"p{p}": round(percentile(self.latencies_s, p) * 1000, 1) for p in (50, 99)} if ok else {}
        return {
            "offered_per_s": self.offered_per_s,
            "answered_per_s": round(ok / self.seconds, 1),
            "latency_ms": spread,
            "statuses": dict(self.statuses),
            "unsent": self.num_unsent,
        }


class _Connection:
    """A kept connection to one gateway, for one request at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, request: bytes) -> str:
        """Return the status of the answer, or the name of the error."""
        try:
            async with asyncio.timeout(30):
                if self._writer is None:
                    self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
                self._writer.write(request)
                head = await self._reader.readuntil(b"\r\n\r\n")
                _, found, rest = head.lower().partition(b"content-length:")
                assert found, "answers that are no streams have a length"
                await self._reader.readexactly(int(rest.split(b"\r\n", 1)[0]))
                return head[9:12].decode()
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            self.close()
            return type(error).__name__

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


async def offer(
    ports: Sequence[int], requests: Iterator[bytes], per_s: float, seconds: float, max_connections: int
) -> Answers:
    """Send `per_s` requests a second to the gateways in turn, for `seconds`, over at most `max_connections` to each."""
    answers = Answers(per_s, seconds)
    idle = {port: [_Connection(port) for _ in range(max_connections)] for port in ports}
    tasks: set[asyncio.Task[None]] = set()
    begin_s = time.perf_counter()

    async def send(connection: _Connection, port: int, request: bytes, due_s: float) -> None:
        status = await connection.ask(request)
        answers.statuses[status] += 1
        if status == "200":
            answers.latencies_s.append(time.perf_counter() - due_s)
        idle[port].append(connection)

    for number, port in zip(range(int(per_s * seconds)), itertools.cycle(ports), strict=False):
        due_s = begin_s + number / per_s
        if (wait_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        elif number % 16 == 0:
            await asyncio.sleep(0)
        request = next(requests)
        if not idle[port]:
            answers.num_unsent += 1
            continue
        task = asyncio.create_task(send(idle[port].pop(), port, request, due_s))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    for connection in itertools.chain.from_iterable(idle.values()):
        connection.close()
    return answers
