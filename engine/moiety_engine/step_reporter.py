"""Results of the steps, collected for the engine server: outputs, failures, traced steps and load."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from moiety_engine.load_reporter import LoadReporter
from moiety_engine.messages import CoreAdmission, CoreFailure, CoreLoad, CoreOutput, CoreStep

if TYPE_CHECKING:
    from moiety_engine.adapters.adapter_slots import AdapterSlots
    from moiety_engine.kv_transfer.connector import KvConnector
    from moiety_engine.steps.tracer import StepTracer


class StepReporter:
    """Outputs and failures since the last report. Used by the step loop's thread only."""

    def __init__(self, tracer: StepTracer, kv_connector: KvConnector, adapters: AdapterSlots) -> None:
        """Create the reporter. `kv_connector` and `adapters` are notified of ended requests."""
        self.tracer = tracer
        self._kv_connector = kv_connector
        self._adapters = adapters
        self._load_reporter = LoadReporter()
        self._outputs: list[CoreOutput] = []
        self._failures: list[CoreFailure] = []

    def add_output(self, output: CoreOutput | None) -> None:
        """Report an output, if there is one."""
        if output is not None:
            self._outputs.append(output)

    def add_outputs(self, outputs: Iterable[CoreOutput]) -> None:
        """Report the outputs of a step."""
        self._outputs += outputs

    def add_failures(self, *failures: CoreFailure) -> None:
        """Report requests that cannot be served."""
        self._failures += failures

    def take(
        self, admissions: list[CoreAdmission], load: Callable[[], CoreLoad], clock_ns: Callable[[], int]
    ) -> CoreStep | None:
        """Return what happened since the last call, with the admissions; None if nothing did.

        `load` returns the load figures, and is called only when they are due.
        """
        outputs, failures, traced = self._outputs, self._failures, self.tracer.kept and self.tracer.take()
        if not outputs and not failures and not admissions and not traced:
            return None
        num_ended = len(failures)
        for output in outputs:
            if output.finish:
                num_ended += 1
                self._adapters.ended(output.key)
        for failure in failures:
            self._adapters.ended(failure.key)
        if num_ended:
            outputs = self._kv_connector.with_transfer_results(outputs, failures)
        is_due = self._load_reporter.is_due(clock_ns(), is_news=bool(num_ended or admissions))
        self._outputs, self._failures = [], []
        return CoreStep(outputs, failures, load() if is_due else None, admissions, traced or [])
