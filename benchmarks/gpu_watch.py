"""Instruments of `gpu_engine.py`: host and device time of a step, and the fewest bytes that it must read."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.spec import MoeSpec
from moiety_engine.model.transformer import Transformer
from moiety_engine.model.weight_offload import named_tensors
from moiety_engine.scheduling.plan import Plan


class Watch:
    """Recorder of each step's host and device time."""

    def __init__(self, loop: EngineLoop) -> None:
        assert loop.executor.device_state is not None
        self._runner = loop.executor.device_state.runner
        self.loop = loop
        self.steps: list[dict[str, Any]] = []
        launch, collect = self._runner.launch, self._runner.collect
        self._waited_s = 0.0

        def watched_launch(plan: Plan) -> Any:
            begin, end = self._event(), self._event()
            rows = plan.num_rows if plan.num_decode == plan.num_rows else 0
            _record(begin)
            flight = launch(plan)
            _record(end)
            self.steps.append({"rows": rows, "begin": begin, "end": end, "done_s": 0.0})
            return flight

        def watched_collect(flight: Any) -> Any:
            begin_s = time.perf_counter()
            flight.done.wait()
            self._waited_s += time.perf_counter() - begin_s
            return collect(flight)

        self._runner.launch, self._runner.collect = watched_launch, watched_collect  # type: ignore[method-assign]

    def run(self, submits: list[CoreSubmit]) -> None:
        """Submit all requests and step to the end; record the end of each step and the host time that it took."""
        for submit in submits:
            self.loop.submit(submit)
        while not self.loop.scheduler.idle:
            begin_s, waited_s = time.perf_counter(), self._waited_s
            self.loop.step()
            self.loop.take_outputs()
            now_s = time.perf_counter()
            if self.steps:
                self.steps[-1]["host_s"] = now_s - begin_s - (self._waited_s - waited_s)
                self.steps[-1]["done_s"] = now_s

    def decode_steps(self, rows: int) -> dict[str, float]:
        """Return medians over the steps in which this number of sequences decoded and nothing else ran."""
        pairs = [
            (a, b) for a, b in zip(self.steps, self.steps[1:], strict=False) if a["rows"] == b["rows"] == rows
        ]  # both, so that neither has a neighbour of another kind
        if len(pairs) < 3:
            return {}
        found = {
            "steps": len(pairs),
            "step_ms": statistics.median((b["done_s"] - a["done_s"]) * 1e3 for a, b in pairs),
            "host_work_us": statistics.median(b["host_s"] * 1e6 for _, b in pairs),
        }
        if pairs[0][0]["begin"] is not None:
            found["device_idle_us"] = statistics.median(
                max(0.0, a["end"].elapsed_time(b["begin"])) * 1e3 for a, b in pairs
            )
        return found

    def _event(self) -> Any:
        return torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else None


def _record(event: Any) -> None:
    if event is not None:
        event.record()


def copy_bandwidth() -> float:
    """Return the bytes per second that a large copy on the device reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times: list[float] = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / statistics.median(times)


def step_bytes(model: Transformer, streams: int, context: int) -> float:
    """Return the fewest bytes that a decode step reads.

    Each weight is read once, for experts those that uniform routing is expected to choose, and all KV.
    """
    total = 0.0
    for layer, weights in zip(model.spec.layers, model._weights.layers, strict=True):
        for name, tensor in named_tensors(weights):
            chosen = 1.0
            if isinstance(layer.ffn, MoeSpec) and tensor.dim() == 3:
                routing = layer.ffn.routing
                chosen = 1 - (1 - routing.top_k / routing.num_experts) ** streams
            total += tensor.nbytes * chosen if name else 0
    total += sum(tensor.nbytes for _, tensor in named_tensors(model._weights.head_VD))
    return total + streams * context * model.kv_bytes_per_block(16) / 16
