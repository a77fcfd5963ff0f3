"""How long steps took, and when the next can run, where one may be planned while another runs."""

from __future__ import annotations

from moiety_engine.scheduling.plan import Plan
from moiety_engine.scheduling.step_time_model import StepTimeModel


class StepTiming:
    """Follows the steps that the scheduler launches and commits. Steps run one after the other."""

    def __init__(self, step_time: StepTimeModel) -> None:
        self._step_time = step_time
        self._running: Plan | None = None
        self._committed_ns = 0

    def launched(self, plan: Plan) -> None:
        self._running = plan

    def committed(self, plan: Plan, now_ns: int) -> float:
        """Seconds that the step took, without those in which it waited for the one before it."""
        begun_ns, self._committed_ns = self.begun_ns(plan), now_ns
        self._running = None
        return (now_ns - begun_ns) / 1e9

    def free_s(self, now_ns: int) -> float:
        """When a step that is planned now can run: now, or when the one that runs is predicted to end."""
        running = self._running
        if running is None:
            return now_ns / 1e9
        return max(now_ns / 1e9, self.begun_ns(running) / 1e9 + self._step_time.predict_s(running.shape))

    def begun_ns(self, plan: Plan) -> int:
        """Of the step that runs, or ran last."""
        return max(plan.planned_ns, self._committed_ns)
