"""Headings of groups of an engine's options in `--help` and in the documents."""

from __future__ import annotations

MODEL = "Model"
BATCHING = "Scheduling and batching"
KV_CACHE = "KV cache"
SPECULATION = "Speculative decoding"
STRUCTURED_OUTPUTS = "Structured outputs"
IMAGES = "Images"
ADAPTERS = "LoRA adapters"
OFFLOADING = "Expert offloading"
DISTRIBUTED = "Distributed inference"
ROLES = "Disaggregated prefill and decode"
NETWORK = "Network"
USAGE = "Usage accounting"
PROCESS = "Process"
SIMULATED = "Simulated device"
