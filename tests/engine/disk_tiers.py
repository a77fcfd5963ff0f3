"""Engines with a prefix-cache tier on disk: start, restart, fill and inspect it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moiety_engine.config import EngineConfig
from moiety_engine.loop import EngineLoop
from moiety_engine.loop_setup import build_loop
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import Result, run_all
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling

BLOCK_SIZE = 4
LIMIT_S = 120.0


class WorkClock:
    """A clock by which each token takes a second, so that reading from disk is always predicted to be faster."""

    loop: EngineLoop | None = None

    def __call__(self) -> int:
        load = None if self.loop is None else self.loop.scheduler
        tokens = load and load.prompt_tokens_total - load.cached_tokens_total + load.output_tokens_total
        return 10**18 + (tokens or 0) * 10**9


class Make:
    """Maker of loops over one folder. A loop is closed before the next one is made."""

    def __init__(self, loops: Any, folder: Path) -> None:
        self._loops, self._folder = loops, folder
        self._made: list[EngineLoop] = []

    def __call__(self, **settings: Any) -> EngineLoop:
        self.end()
        model, clock = self._loops.model, WorkClock()
        few = {"block_size": BLOCK_SIZE, "kv_memory_bytes": 40 * model.kv_bytes_per_block(BLOCK_SIZE)}
        given = {"model": str(self._loops.folder), "name": "tiny", "disk_cache": str(self._folder), **few, **settings}
        loop = build_loop(model, EngineConfig(**given), clock_ns=clock)
        clock.loop = loop
        self._made.append(loop)
        return loop

    def end(self) -> None:
        while self._made:
            self._made.pop().close()


@pytest.fixture
def make(loops: Any, tmp_path: Path) -> Iterator[Make]:
    made = Make(loops, tmp_path / "kv")
    yield made
    made.end()


def make_submit(key: int, salt: bytes = b"s", length: int = 41, tenant: str = "t", **more: Any) -> CoreSubmit:
    prompt = [3 + (key * 31 + i * 7) % 300 for i in range(length)]
    return CoreSubmit(key, tenant, STANDARD, prompt, Sampling(temperature=0.0), 4, 0, [], 4, salt, 0, **more)


def run(loop: EngineLoop, *submits: CoreSubmit) -> Result:
    """Run all requests together, and return the result of the first."""
    found = run_all(loop, list(submits))[submits[0].key]
    settle(loop)
    return found


def settle(loop: EngineLoop) -> None:
    """Run steps until no read or write of the disk is pending."""
    limit_s = time.monotonic() + LIMIT_S
    while loop.waits_for_others:
        loop.step()
        assert time.monotonic() < limit_s, "something is on its way for ever"


def evict(loop: EngineLoop) -> None:
    """Fill every block with the prompts of other requests."""
    run(loop, *(make_submit(key, b"others", 60) for key in range(100, 103)))


def num_cached(result: Result) -> int:
    assert result.finish is not None
    return result.finish.num_cached_tokens


def mtime(path: Path) -> float:
    return path.stat().st_mtime


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "kv").rglob("*.kv"))


def restart(make: Make, **settings: Any) -> EngineLoop:
    """Return a loop that stands for a new process, and that has measured the time of a step."""
    loop = make(**settings)
    run(loop, make_submit(99, b"first"))
    return loop


def flip(path: Path, place: int) -> None:
    contents = bytearray(path.read_bytes())
    contents[place] ^= 1
    path.write_bytes(contents)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
