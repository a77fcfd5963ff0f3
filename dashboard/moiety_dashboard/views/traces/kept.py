"""Text about which traces are stored, and how to get more."""

from __future__ import annotations

TRACE = "trace"  # in the address of the traces page: the id of the selected trace
KEPT = (
    "Kept are requests that failed, missed their class's promise, were preempted or failed over, the first of every "
    "second, and a share of the others: `MOIETY_TRACE_SAMPLE_RATE=1` for the gateway keeps all, "
    "`MOIETY_TRACE_SAMPLE_RATES=priority=1` all of a class."
)
