"""Early refusal: a pure decision over an engine's last load report for a class.

The engine's own verdict is exact and comes with every request; this decision only keeps a flood of requests off the
wire. It refuses only what is certainly hopeless, and nothing where no report is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from moiety_wire.classes import OverloadAction, ServiceClass
from moiety_wire.figures import ClassLoad
from moiety_wire.notes import Reason

HOPELESS = 2.0  # times the class's longest wait
MIN_RETRY_S = 1.0
MAX_RETRY_S = 3600.0


@dataclass(frozen=True, slots=True)
class AdmissionRefusal:
    """Reason for a refusal, and the time after which a retry makes sense."""

    reason: Reason
    retry_after_s: float
    message: str


def refuse_hopeless(service: ServiceClass, load: ClassLoad | None) -> AdmissionRefusal | None:
    """Return a refusal, or None to send the request to the engine.

    `load` is None where no recent report on the class is known.
    """
    if load is None or service.on_overload is not OverloadAction.REJECT:
        return None
    if load.predicted_ttft_s <= HOPELESS * service.max_queue_s:
        return None
    retry_after_s = min(max(load.predicted_ttft_s - service.max_queue_s, MIN_RETRY_S), MAX_RETRY_S)
    message = (
        f"the class {service.name!r} is overloaded: the first token would take about {load.predicted_ttft_s:.0f} s, "
        f"and the longest wait is to be {service.max_queue_s:g} s; try again in {retry_after_s:.0f} s, or ask for a "
        "lower service_tier"
    )
    return AdmissionRefusal(Reason.PREDICTED_LATE, retry_after_s, message)
