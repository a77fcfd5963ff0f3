"""Environment of a loop: what its figures depend on besides its settings."""

from __future__ import annotations

from typing import Any

import torch

from moiety_engine.loop import EngineLoop
from moiety_kernels.environment import describe_environment


def environment(loop: EngineLoop) -> dict[str, Any]:
    """Return the versions, the device, the threads and the type of the weights."""
    on_cpu = loop.executor.model.device.type == "cpu"
    return describe_environment() | {
        "torch": torch.__version__,
        "device": str(loop.executor.model.device) if on_cpu else torch.cuda.get_device_name(),
        "threads": torch.get_num_threads(),
        "dtype": str(loop.executor.model.dtype).removeprefix("torch."),
    }
