"""Engine samples of this session, from its start, across pages.

They are stored nowhere else: the gateway knows only the last heartbeat of each engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from moiety_dashboard.frames import fleet

SAMPLES = "engine samples"
KEPT = 300

Samples = dict[str, deque[tuple[float, Mapping[str, Any]]]]


def watch(engines: Sequence[Mapping[str, Any]]) -> Samples:
    """Add the current samples, and return all samples of each engine by its address, the latest last."""
    samples: Samples = st.session_state.setdefault(SAMPLES, {})
    for engine in engines:
        seen = samples.setdefault(engine["address"], deque(maxlen=KEPT))
        if engine["load"] and (not seen or seen[-1][1]["seq"] != engine["load"]["seq"]):
            seen.append((time.time(), engine["load"]))
    return samples


def latest_rate(samples: Samples, address: str, name: str) -> float | None:
    """Return a counter's rate per second between the last two samples; None if there are fewer."""
    seen = samples[address]
    if len(seen) < 2:
        return None
    (before_s, before), (now_s, now) = seen[-2], seen[-1]
    found = fleet.rates(before, now, now_s - before_s)
    return None if found is None else found[name]
