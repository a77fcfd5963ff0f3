"""What this session has seen of the engines since it began to look, on whichever page. It is kept nowhere else: of each
engine a gateway knows the last heartbeat alone."""

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
    """All that was seen of each engine by its address, the latest last, with what is seen now."""
    samples: Samples = st.session_state.setdefault(SAMPLES, {})
    for engine in engines:
        seen = samples.setdefault(engine["address"], deque(maxlen=KEPT))
        if engine["load"] and (not seen or seen[-1][1]["seq"] != engine["load"]["seq"]):
            seen.append((time.time(), engine["load"]))
    return samples


def latest_rate(samples: Samples, address: str, name: str) -> float | None:
    """Of a counter, a second, between the last two looks; None where there were no two."""
    seen = samples[address]
    if len(seen) < 2:
        return None
    (before_s, before), (now_s, now) = seen[-2], seen[-1]
    found = fleet.rates(before, now, now_s - before_s)
    return None if found is None else found[name]
