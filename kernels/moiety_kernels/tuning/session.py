"""One run of `moiety kernels tune`: every tunable operation, on this machine's GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from moiety_kernels.bench.clocks import clock_of
from moiety_kernels.bench.moe_layer import weight_bytes
from moiety_kernels.bench.shapes import LayerShape
from moiety_kernels.gpu.devices import device_model
from moiety_kernels.tuning.choices import path_of, read
from moiety_kernels.tuning.tuner import TuningFailed, tune

OPERATIONS = ("grouped_gemm",)  # those whose package has a module `tuning`
LAYER_MEMORY_FACTOR = 1.2  # of free memory, in a layer's weights: rows also need memory
PROBLEM_BUDGET_S = 0.15  # for timing; compilation takes additional time, once per candidate

Row = dict[str, Any]


class NoGpu(Exception):
    """There is no GPU to tune for."""


class Session:
    """A tuning session with the device and its previous choices. Raises NoGpu."""

    def __init__(
        self, layers: Sequence[LayerShape], tokens: Sequence[int], weights: Sequence[str], folder: Path | None
    ) -> None:
        if not torch.cuda.is_available():
            raise NoGpu("torch sees no GPU here, and choices are timed on the device that they are for")
        self._device = torch.device("cuda", torch.cuda.current_device())
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        self.layers = [layer for layer in layers if LAYER_MEMORY_FACTOR * weight_bytes(layer) < free_bytes]
        self.too_large = [layer.name for layer in layers if layer not in self.layers]
        self._model = device_model(self._device)
        self.device_name = self._model.name
        self.choices = read(path_of(self.device_name, folder), self.device_name)
        tunables = [import_module(f"moiety_kernels.{name}.tuning").TUNABLE for name in OPERATIONS]
        self.problems = [
            (tunable, problem)
            for tunable in tunables
            for layer in self.layers
            for kind in weights
            for problem in tunable.problems(layer, tokens, kind)
        ]

    def run(self, best: int, *, again: bool, on_done: Callable[[], None]) -> tuple[list[Row], list[str]]:
        """Tune every problem; return one row each, with choice, time and gain, and the errors of the failed ones."""
        clock, rows, failed = clock_of(self._device), [], []
        with torch.inference_mode():
            for tunable, problem in self.problems:
                try:
                    one = tune(
                        tunable,
                        problem,
                        self.choices,
                        model=self._model,
                        device=self._device,
                        clock=clock,
                        best=best,
                        budget_s=PROBLEM_BUDGET_S,
                        again=again,
                    )
                    rows.append({"operation": tunable.operation, **asdict(one), "name": one.candidate.name})
                except (TuningFailed, RuntimeError) as exc:  # RuntimeError: the device is out of memory, or lost
                    failed.append(str(exc))
                on_done()
        return rows, failed
