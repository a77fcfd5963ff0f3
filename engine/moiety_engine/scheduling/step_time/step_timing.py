"""Durations of steps and the earliest start of the next step, when planning overlaps execution."""

from __future__ import annotations

from moiety_engine.scheduling.plan import Plan
from moiety_engine.scheduling.step_time.step_time_model import StepTimeModel


class StepTiming:
    """Tracks the steps that the scheduler launches and commits. Steps run one after the other."""

    def __init__(self, step_time: StepTimeModel) -> None:
        self._step_time = step_time
        self._running: Plan | None = None
        self._committed_ns = 0

    def launched(self, plan: Plan) -> None:
        self._running = plan

    def committed(self, plan: Plan, now_ns: int) -> float:
        """Return the step's duration in seconds, without the time it waited for the previous step."""
        begun_ns, self._committed_ns = self.begun_ns(plan), now_ns
        self._running = None
        return (now_ns - begun_ns) / 1e9

    def free_s(self, now_ns: int) -> float:
        """Return when a step that is planned now can run: now, or at the predicted end of the running step."""
        running = self._running
        if running is None:
            return now_ns / 1e9
        return max(now_ns / 1e9, self.begun_ns(running) / 1e9 + self._step_time.predict_s(running.shape))

    def begun_ns(self, plan: Plan) -> int:
        """Return when the running or last step began to run."""
        return max(plan.planned_ns, self._committed_ns)
