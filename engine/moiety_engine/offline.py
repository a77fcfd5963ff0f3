"""Offline runs of a set of requests on a loop in this process, for benchmarks, evaluation and tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from moiety_engine.errors import EngineError
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreFinish, CoreLogprob, CoreSubmit


@dataclass(slots=True)
class Result:
    """Outcome of one request. Times are monotonic seconds."""

    submitted_s: float
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[CoreLogprob] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    finish: CoreFinish | None = None


def run_all(
    loop: EngineLoop, submits: Iterable[CoreSubmit], *, on_step: Callable[[int], None] | None = None
) -> dict[int, Result]:
    """Submit all requests at once and step until all have ended.

    `on_step` gets the number of ended requests. Raises EngineError if the engine refuses a request.
    """
    results: dict[int, Result] = {}
    for submit in submits:
        results[submit.key] = Result(time.perf_counter())
        loop.submit(submit)
    num_open = len(results)
    while num_open:
        if not loop.step() and (loop.scheduler.num_waiting or loop.waits_for_others):
            time.sleep(0.001)  # waits for a batch or for other threads, which need the interpreter meanwhile
        step = loop.take_outputs()
        if step is None:
            continue
        if step.failures:
            raise EngineError(step.failures[0].message)
        now_s = time.perf_counter()
        for output in step.outputs:
            result = results[output.key]
            result.token_ids += output.token_ids
            result.logprobs += output.logprobs or []
            result.token_times_s += [now_s] * len(output.token_ids)
            result.finish = output.finish or result.finish
            num_open -= output.finish is not None
        if on_step is not None:
            on_step(len(results) - num_open)
    return results
