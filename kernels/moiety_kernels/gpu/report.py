"""Table of the resources of every kernel on every target: registers, spills, shared memory.

`python -m moiety_kernels.gpu.report sm_90,sm_80 rms_norm` prints it as JSON, one row per variant and target; without
operations, for all of them. With `--covering`, variants are left out if others have their kernel, types and flags.
"""

from __future__ import annotations

import json
import os
import pkgutil
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from importlib import import_module
from multiprocessing import get_context
from typing import Any

import moiety_kernels
from moiety_kernels.gpu.cases import covering_cases
from moiety_kernels.gpu.compiling import CompilationError, compile_case
from moiety_kernels.gpu.targets import TARGETS

Row = dict[str, Any]


def operations() -> list[str]:
    """Return the operations that have Triton kernels."""
    return [one.name for one in pkgutil.iter_modules(moiety_kernels.__path__) if one.ispkg and _has_kernel(one.name)]


def rows(target: str, operation: str, covering: bool = False) -> list[Row]:
    """Return a row for each variant; with `covering`, for those of `covering_cases`.

    Its fields are `{operation, variant, target, registers, spill_bytes, shared_bytes, loads_wait, error}`.
    """
    cases = import_module(f"moiety_kernels.{operation}.kernel").compile_cases()
    cases = [case for case in cases if not case.only or target in case.only]
    found = []
    for case in covering_cases(cases) if covering else cases:
        row: Row = {"operation": operation, "variant": case.name, "target": target, "error": None}
        try:
            row |= asdict(compile_case(case, TARGETS[target]))
        except CompilationError as exc:
            row["error"] = str(exc)
        found.append(row)
    return found


def table(
    targets: list[str], names: list[str], on_done: Callable[[], None] | None = None, *, covering: bool = False
) -> list[Row]:
    """Return rows of all `names` on all `targets`, compiled in as many processes as there are cores.

    `on_done` is called after each operation on each target.
    """
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(rows, target, name, covering) for target in targets for name in names]
        for job in as_completed(jobs):
            job.result()
            if on_done is not None:
                on_done()
        return [row for job in jobs for row in job.result()]


def _has_kernel(name: str) -> bool:
    package = import_module(f"moiety_kernels.{name}")
    return any(one.name == "kernel" for one in pkgutil.iter_modules(package.__path__))


if __name__ == "__main__":
    given = [one for one in sys.argv[1:] if one != "--covering"]
    found = table(given[0].split(","), given[1:] or operations(), covering="--covering" in sys.argv)
    sys.stdout.write(json.dumps(found) + "\n")
