"""Names of simulated devices and policies, for callers that do not import the simulator."""

from __future__ import annotations

DEVICES = (
    "a10g-llama2-7b",
    "a100-llama3-8b",
    "a100-llama3-8b-qoserve",
    "h200-qwen3-30b-a3b",
)  # the simulator's presets
POLICIES = (  # scheduling policies
    *("moiety", "fcfs", "strict-priority", "edf", "vtc", "dlpm"),
    *("qoserve-chunking", "qoserve-demotion", "qoserve"),
)
