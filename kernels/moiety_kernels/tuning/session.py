"""One run of `moiety kernels tune`: every operation that can be tuned, on the GPU that is here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from moiety_kernels.bench.clocks import clock_of
from moiety_kernels.bench.shapes import LayerShape
from moiety_kernels.gpu.devices import device_model
from moiety_kernels.tuning.choices import path_of, read
from moiety_kernels.tuning.tuner import tune

OPERATIONS = ("grouped_gemm",)  # those whose package has a module `tuning`
PROBLEM_BUDGET_S = 0.15  # of timing; compiling comes to it, once a candidate


class NoGpu(Exception):
    """There is nothing here to tune for."""


class Session:
    """Knows the device, and what has been chosen for it before. Raises NoGpu."""

    def __init__(self, layers: Sequence[LayerShape], tokens: Sequence[int], folder: Path | None) -> None:
        if not torch.cuda.is_available():
            raise NoGpu("torch sees no GPU here, and choices are timed on the device that they are for")
        self.layers = layers
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._model = device_model(self._device)
        self.device_name = self._model.name
        self.choices = read(path_of(self.device_name, folder), self.device_name)
        self._tunables = [import_module(f"moiety_kernels.{name}.tuning").TUNABLE for name in OPERATIONS]
        self._problems = [
            (tunable, [problem for layer in layers for problem in tunable.problems(layer, tokens)])
            for tunable in self._tunables
        ]

    @property
    def num_problems(self) -> int:
        return sum(len(problems) for _, problems in self._problems)

    def run(self, best: int, *, again: bool, on_done: Callable[[], None]) -> list[dict[str, Any]]:
        """One row a problem: what was chosen, its time, and what that gains. Raises TuningFailed."""
        clock, rows = clock_of(self._device), []
        for tunable, problems in self._problems:
            chosen = tune(
                tunable,
                problems,
                self.choices,
                model=self._model,
                device=self._device,
                clock=clock,
                best=best,
                budget_s=PROBLEM_BUDGET_S,
                again=again,
            )
            with torch.inference_mode():
                for one in chosen:
                    rows.append({"operation": tunable.operation, **asdict(one), "name": str(one.candidate)})
                    on_done()
        return rows
