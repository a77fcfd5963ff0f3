"""One target under atheris, in a process of its own: `python -m tests.fuzz.child NAME FOLDER SECONDS CPU_SECONDS`.

It ends with 0 after its time, and with libFuzzer's own codes after a finding, whose input is then in FOLDER/found. Its
progress is written to FOLDER/figures.json."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import time
from pathlib import Path

import atheris
import structlog
from tests.fuzz.corpora import FIGURES, TARGETS

HANGS_AFTER_S, MAX_MB = 20, 2048
TELL_EVERY_S = 5.0


def main(name: str, folder: str, seconds: str, cpu_seconds: str) -> None:
    target, work = TARGETS[name], Path(folder)
    _say_failures_only()
    with atheris.instrument_imports(include=[*target.modules]):
        take = target.opened()
    began_s, began_cpu_s, told_s, num_runs = time.monotonic(), time.process_time(), 0.0, 0

    def run(data: bytes) -> None:
        nonlocal num_runs, told_s
        num_runs += 1
        wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
        is_over = wall_s >= float(seconds) or cpu_s >= float(cpu_seconds)
        if is_over or wall_s - told_s >= TELL_EVERY_S:
            told_s = wall_s
            told = {"executions": num_runs, "wall_s": round(wall_s), "cpu_s": round(cpu_s)}
            (work / FIGURES).write_text(json.dumps(told))
        if is_over:
            os._exit(0)  # libFuzzer has no end that is told from a crash
        take(data)

    def mutated(data: bytes, max_bytes: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if target.mutate is None or chance.random() < 0.5:
            return atheris.Mutate(data, max_bytes)
        return target.mutate(data, chance)[:max_bytes]

    options = [f"-timeout={HANGS_AFTER_S}", f"-rss_limit_mb={MAX_MB}", f"-max_len={target.max_bytes}"]
    atheris.Setup(
        [sys.argv[0], *options, f"-artifact_prefix={work / 'found'}/", str(work / "corpus")],
        run,
        custom_mutator=mutated,
    )
    atheris.Fuzz()


def _say_failures_only() -> None:
    """Log errors only: refusals of input would take most of the time."""
    logging.disable()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        processors=[structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
