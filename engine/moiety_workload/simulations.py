"""What a simulation may be asked for by name, for those who have one run and do not import the simulator."""

from __future__ import annotations

DEVICES = (
    "a10g-llama2-7b",
    "a100-llama3-8b",
    "a100-llama3-8b-qoserve",
    "h200-qwen3-30b-a3b",
)  # the simulator's presets
POLICIES = (  # by which requests are scheduled
    *("moiety", "fcfs", "strict-priority", "edf", "vtc", "dlpm"),
    *("qoserve-chunking", "qoserve-demotion", "qoserve"),
)
