"""Text about which traces are stored, and how to get more."""

from __future__ import annotations

from moiety_dashboard import session

TRACE = "trace"  # in the address of the traces page: the id of the selected trace
KEPT = (
    "Traces are kept for requests that failed, missed their SLO, were preempted or failed over, for the first request "
    "of each second, and for a sample of the others."
)
HOW = (
    "Set `MOIETY_TRACE_SAMPLE_RATE=1` on the gateway to keep all traces, or `MOIETY_TRACE_SAMPLE_RATES=priority=1` to "
    "keep all of a class."
)


def kept() -> str:
    """Return the text; only to the roles that set up gateways it says how to keep more traces."""
    return f"{KEPT}{session.advice(HOW, session.DEPLOYS)}"
