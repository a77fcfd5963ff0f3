"""The decision whether a step is planned and launched while the previous one runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.config import Overlap

if TYPE_CHECKING:
    from moiety_engine.config import EngineConfig
    from moiety_engine.model.remote_experts import ExpertServer
    from moiety_engine.model.transformer import Transformer


def steps_overlap(model: Transformer | ExpertServer, config: EngineConfig) -> bool:
    """Return whether steps overlap: as configured, or by default on CUDA devices, which would idle otherwise.

    In a pipeline with several steps in flight, no step contains a token that a launched step samples.
    """
    if config.steps_in_flight > 1:
        return False
    return model.device.type == "cuda" if config.overlap is Overlap.AUTO else config.overlap is Overlap.ON
