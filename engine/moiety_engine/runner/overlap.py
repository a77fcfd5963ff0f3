"""The decisions whether a step is planned and launched while previous ones run, and while how many."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.config import Overlap
from moiety_wire.engine_choices import Batching

if TYPE_CHECKING:
    from moiety_engine.config import EngineConfig
    from moiety_engine.model.remote_experts import ExpertServer
    from moiety_engine.model.transformer import Transformer


def steps_overlap(model: Transformer | ExpertServer, config: EngineConfig) -> bool:
    """Return whether steps overlap: as configured, or by default on CUDA devices, which would idle otherwise.

    In a pipeline with several steps in flight, no step contains a token that a launched step samples.
    """
    if steps_in_flight_of(config) > 1:
        return False
    return model.device.type == "cuda" if config.overlap is Overlap.AUTO else config.overlap is Overlap.ON


def steps_in_flight_of(config: EngineConfig) -> int:
    """Return how many steps are in the stages of a pipeline at once: by default one for each stage.

    1 without stages, with expert ranks, which compute one step after the other, and with padded batching, whose rows
    run together.
    """
    if config.pp == 1 or config.ffn_ranks or config.batching is Batching.PADDED:
        return 1
    return config.pp if config.pp_microbatches is None else config.pp_microbatches
