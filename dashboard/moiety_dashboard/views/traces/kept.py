"""Which traces there are to see, in words, and how to get more."""

from __future__ import annotations

TRACE = "trace"  # in the address of the page of traces: the id of the one that is looked at
KEPT = (
    "Kept are requests that failed, missed their class's promise, were preempted or failed over, the first of every "
    "second, and a share of the others: `MOIETY_TRACE_SAMPLE_RATE=1` for the gateway keeps all, "
    "`MOIETY_TRACE_SAMPLE_RATES=priority=1` all of a class."
)
