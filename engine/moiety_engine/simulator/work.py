"""Work: the cost of a request in predicted device-seconds, independent of when and where it is served.

A step at a typical full batch is divided among its rows. A prompt token costs as much as one more row adds to that
step. An output token costs the same, plus its share of the step's fixed costs (reading the weights, the overhead),
since only decode needs that many steps. The KV reads and attended pairs are counted per request. So all work of a
saturated device adds up to about one second per second, and a cheap prompt gives no advantage. Prefix-cache savings are
not deducted: work is a property of the request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from moiety_engine.simulator.devices import SimulatedDevice
from moiety_workload.request import TraceRequest, Workload


@dataclass(frozen=True, slots=True)
class WorkModel:
    """Seconds per token, at the mix of one workload."""

    prompt_s: float
    output_s: float
    kv_token_s: float
    pair_s: float
    step_s: float  # of the typical full batch

    @classmethod
    def of(cls, device: SimulatedDevice, requests: Iterable[TraceRequest]) -> WorkModel:
        """Return the model at the batch with which these requests fill the device's memory or its row limit."""
        listed = list(requests)
        mean_input = fmean(request.input_tokens for request in listed)
        mean_output = fmean(request.output_tokens for request in listed)
        running = min(device.max_running, device.kv_tokens / (mean_input + mean_output / 2))
        rows_each = (mean_input + mean_output) / mean_output  # rows of a step per decoding request
        rows = min(device.max_batch_tokens, max(1.0, running) * rows_each)
        decoding = rows / rows_each
        step_s = device.step_s(round(rows), round(decoding), 0, 0)
        more_s = device.step_s(round(rows * 1.01) + 1, round(decoding), 0, 0)
        added_s = (more_s - step_s) / (round(rows * 1.01) + 1 - round(rows))
        return cls(
            prompt_s=added_s,
            output_s=added_s + max(0.0, step_s - rows * added_s) / decoding,
            kv_token_s=device.kv_token_s,
            pair_s=device.pair_s,
            step_s=step_s,
        )

    def seconds(self, input_tokens: int, prompt_done: int, output_done: int) -> float:
        """Return the work of the part of a request that is done."""
        context = output_done * input_tokens + output_done * (output_done + 1) // 2
        return (
            prompt_done * self.prompt_s
            + output_done * self.output_s
            + context * self.kv_token_s
            + prompt_done * (prompt_done + 1) // 2 * self.pair_s
        )

    def of_request(self, request: TraceRequest) -> float:
        return self.seconds(request.input_tokens, request.input_tokens, request.output_tokens)

    def offered_per_s(self, workload: Workload) -> float:
        """Return the work that arrives per second."""
        return sum(self.of_request(request) for request in workload.requests) / workload.duration_s
