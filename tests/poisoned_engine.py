"""An engine loop whose cache holds NaN at first, so that an answer that reads what was never written is not right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.core_submits import core_submit

from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreFinish, CoreLogprob
from moiety_wire.messages import Sampling


@dataclass
class PoisonedEngine:
    """A loop whose blocks and recurrent states are NaN at first, with the output of each request by its key."""

    loop: EngineLoop
    answers: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[CoreLogprob]] = field(default_factory=dict)
    finishes: dict[int, CoreFinish] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kv = self.loop.executor.awake().kv
        for cache in (*kv.places, *kv.states):
            for part in cache.parts:
                part.fill_(float("nan"))

    def submit(self, key: int, prompt: list[int], num_output: int = 8, **sampling: Any) -> None:
        """Submit a request that is greedy and returns log probabilities, unless `sampling` says otherwise."""
        asked = Sampling(**{"temperature": 0.0, "num_logprobs": 3, **sampling})
        self.answers[key], self.logprobs[key] = [], []
        self.loop.submit(core_submit(key, prompt, num_output, sampling=asked))

    def step(self) -> None:
        """Run one step and keep its outputs; a failure of a request fails the test."""
        self.loop.step()
        step = self.loop.take_outputs()
        assert step is None or step.failures == []
        for output in [] if step is None else step.outputs:
            self.answers[output.key] += output.token_ids
            self.logprobs[output.key] += output.logprobs or []
            if output.finish is not None:
                self.finishes[output.key] = output.finish

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run steps until all requests have ended, or `until` holds."""
        for _ in range(3000):
            if self.loop.scheduler.idle or until():
                return
            self.step()
        raise AssertionError("the requests do not end")
