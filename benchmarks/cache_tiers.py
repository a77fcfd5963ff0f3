"""TTFT of a conversation's second turn against its first, with its KV blocks on each cache tier.

The tiers are the device, host memory, disk, and disk under an engine that has just started.

    python benchmarks/cache_tiers.py [--rounds 5] [--tokens 1500] [--threads 2] [--checkpoint FOLDER]

It runs the real engine in one process and measures the tiers in turn. Each round begins a conversation on each tier,
evicts it from the device with another one (except for the first tier), and continues it. Figures are wall seconds and
CPU seconds, which other load on the machine changes least. A second turn of another tenant with the same words must
find nothing in the cache.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
from on_checkpoint import find_or_make_checkpoint, make_parser, write_report

from moiety_engine.config import EngineConfig
from moiety_engine.environment import environment
from moiety_engine.loop import EngineLoop
from moiety_engine.loop_setup import build_loop
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.transformer import Transformer
from moiety_engine.startup import load_loop
from moiety_wire.classes import BATCH
from moiety_wire.messages import Sampling

TIERS = ("device", "host", "disk", "disk_after_restart", "disk_not_in_page_cache")
ANSWER_TOKENS, QUESTION_TOKENS = 16, 32
MOST = 0.15  # of the first turn's


@dataclass(slots=True)
class Turn:
    """One turn of a conversation; times are seconds to the first token."""

    wall_s: float = 0.0
    processor_s: float = 0.0
    num_cached: int = 0
    ended: bool = False
    token_ids: list[int] = field(default_factory=list)


class Conversations:
    """Two turns on one tier after the other, each with its own engine over one model."""

    def __init__(self, model: Transformer, config: EngineConfig, num_tokens: int, folder: Path) -> None:
        self._model, self._config, self._num_tokens, self._folder = model, config, num_tokens, folder
        self._number = 0

    def two_turns(self, tier: str, *, others: bool) -> dict[str, float]:
        """Return the seconds to the first token of both turns; `others` also counts what another tenant finds."""
        loop = self._engine(tier)
        prompt = self._words(self._num_tokens)
        first = self._ask(loop, prompt, b"acme")
        if tier != "device":
            self._ask(loop, self._words(self._num_tokens), b"filler")  # takes the blocks
        if tier == "disk_after_restart":
            loop.close()
            loop = self._engine(tier)
        if tier == "disk_not_in_page_cache":
            forget_files(self._folder)
        follows = [*prompt, *first.token_ids, *self._words(QUESTION_TOKENS)]
        second = self._ask(loop, follows, b"acme")
        other = self._ask(loop, follows, b"globex").num_cached if others else 0
        load = loop.load()
        loop.close()
        return {
            "first_s": round(first.wall_s, 4),
            "second_s": round(second.wall_s, 4),
            "first_processor_s": round(first.processor_s, 4),
            "second_processor_s": round(second.processor_s, 4),
            "cached_tokens": second.num_cached,
            "from_host_blocks": load.host_hit_blocks_total,
            "from_disk_blocks": load.disk_restored_blocks_total,
            "cached_tokens_of_another_tenant": other,
        }

    def _engine(self, tier: str) -> EngineLoop:
        size = self._config.block_size or 16
        tokens = 8 * self._num_tokens if tier == "device" else self._num_tokens + 8 * QUESTION_TOKENS
        num_bytes = -(-tokens // size) * self._model.kv_bytes_per_block(size)
        loop = build_loop(
            self._model,
            msgspec.structs.replace(
                self._config,
                kv_memory_bytes=num_bytes,
                host_kv_memory_bytes=2 * num_bytes if tier == "host" else 0,
                disk_cache=str(self._folder) if tier.startswith("disk") else "",
            ),
        )
        loop.warm_up()
        return loop

    def _words(self, count: int) -> list[int]:
        self._number += 1
        chance = random.Random(self._number)
        return [chance.randrange(10, 10_000) for _ in range(count)]

    def _ask(self, loop: EngineLoop, prompt: list[int], salt: bytes) -> Turn:
        sampling = Sampling(temperature=0.0)
        submit = CoreSubmit(1, "t", BATCH, prompt, sampling, ANSWER_TOKENS, 0, [], ANSWER_TOKENS, salt, 0)
        turn, begin_s, begin_processor_s = Turn(), time.perf_counter(), time.process_time()
        loop.submit(submit)
        while not turn.ended or loop.waits_for_others:  # until what it left is on the disk
            if not loop.step():
                time.sleep(0.002)  # as the core does while anybody waits
            step = loop.take_outputs()
            for output in [] if step is None else step.outputs:
                if not turn.token_ids:
                    turn.wall_s = time.perf_counter() - begin_s
                    turn.processor_s = time.process_time() - begin_processor_s
                turn.token_ids += output.token_ids
                if output.finish is not None:
                    turn.ended, turn.num_cached = True, output.finish.num_cached_tokens
        return turn


def forget_files(folder: Path) -> None:
    """Remove the files from the system's page cache, so that reads go to the disk."""
    for path in folder.rglob("*.kv"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def main() -> None:
    parser = make_parser(__doc__, "cache_tiers.json")
    parser.add_argument("--checkpoint", type=Path, help="checkpoint to use instead of the random one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1500)
    options = parser.parse_args()
    folder = options.checkpoint or find_or_make_checkpoint(options.work)
    config = EngineConfig(model=str(folder), name=folder.name, num_threads=options.threads)
    begin = load_loop(config)
    begin.warm_up()
    found: dict[str, list[dict[str, float]]] = {tier: [] for tier in TIERS}
    load_before, begin_s = os.getloadavg(), time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        conversations = Conversations(begin.executor.model, config, options.tokens, Path(work))
        conversations.two_turns("device", others=False)  # what is compiled is there then
        for number in range(options.rounds):
            for tier in TIERS if number % 2 else reversed(TIERS):
                found[tier].append(conversations.two_turns(tier, others=not number))
    tiers = {tier: summary(rows) for tier, rows in found.items()}
    report = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "load_average": [load_before, os.getloadavg()],
        "took_s": round(time.monotonic() - begin_s),
        "settings": {"checkpoint": folder.name, "tokens": options.tokens, "threads": options.threads},
        "environment": environment(begin),
        "tiers": tiers,
    }
    report["verdict"] = {
        f"ttft_at_most_{MOST}": {tier: one["ratio"]["median"] <= MOST for tier, one in tiers.items()},
        "cross_tenant_hits": sum(
            row["cached_tokens_of_another_tenant"] for tier in tiers.values() for row in tier["rounds"]
        ),
    }
    write_report(report, options.output)
    print({tier: (one["ratio"], one["ratio_of_processor_time"]) for tier, one in tiers.items()})
    print(report["verdict"])


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    def ratio(what: str) -> dict[str, float]:
        found = sorted(row[f"second_{what}"] / row[f"first_{what}"] for row in rows)
        return {
            "median": round(statistics.median(found), 4),
            "least": round(found[0], 4),
            "most": round(found[-1], 4),
        }

    return {"ratio": ratio("s"), "ratio_of_processor_time": ratio("processor_s"), "rounds": rows}


if __name__ == "__main__":
    main()
