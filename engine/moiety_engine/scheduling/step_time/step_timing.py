"""Durations of steps and the earliest start of the next step, when planning overlaps execution."""

from __future__ import annotations

from collections import deque

from moiety_engine.scheduling.plan import Plan
from moiety_engine.scheduling.step_time.step_time_model import StepTimeModel


class StepTiming:
    """Tracks the steps that the scheduler launches and commits. Steps end one after the other.

    With several steps in a pipeline, the duration of a step is the time between its end and the end of the step before
    it. If it is alone in the pipeline, this is the time that it takes through all stages.
    """

    def __init__(self, step_time: StepTimeModel) -> None:
        self._step_time = step_time
        self._running: deque[Plan] = deque()
        self._committed_ns = 0

    def launched(self, plan: Plan) -> None:
        self._running.append(plan)

    def committed(self, plan: Plan, now_ns: int) -> float:
        """Return the step's duration in seconds, without the time it waited for the previous step."""
        begun_ns, self._committed_ns = max(plan.planned_ns, self._committed_ns), now_ns
        self._running.popleft()
        return (now_ns - begun_ns) / 1e9

    def free_s(self, now_ns: int) -> float:
        """Return when a step that is planned now can run: now, or at the predicted end of the running steps."""
        running = self._running
        if not running:
            return now_ns / 1e9
        running_s = sum([self._step_time.predict_s(plan.shape) for plan in running])
        return max(now_ns / 1e9, self.begun_ns(running[0]) / 1e9 + running_s)

    def begun_ns(self, plan: Plan) -> int:
        """Return when the oldest running step, or the last step, began to run."""
        return max(plan.planned_ns, self._committed_ns)
