"""From a configuration to a loop, which is only to be warmed up: the checkpoint read, on all ranks that there are."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from moiety_engine.assembly import assemble, telling
from moiety_engine.config import EngineConfig
from moiety_engine.distribution.rendezvous_address import Rendezvous
from moiety_engine.draft_model.loading import load_drafter
from moiety_engine.loop import EngineLoop
from moiety_engine.structured_outputs.service import GrammarServiceStart


def load_loop(
    config: EngineConfig,
    *,
    meeting: Rendezvous | None = None,
    progress: Callable[[int, int], None] | None = None,
    clock_ns: Callable[[], int] = time.time_ns,
) -> EngineLoop:
    """Load the checkpoint folder that the configuration names and make a loop of it, as rank 0 if there are several.
    `meeting`: what a launcher said of the others, who are started here without one. `progress(done, total)` in bytes.
    Raises EngineError with what to do."""
    grammars = GrammarServiceStart(Path(config.model), config.grammar)
    assembled = assemble(config, meeting, progress)
    rank_group, local_ranks = assembled.rank_group, assembled.local_ranks
    with telling(rank_group):
        found = grammars.result()
        model = assembled.model
        try:
            draft_model = load_drafter(config, model, progress)
            return EngineLoop(
                model,
                config,
                clock_ns=clock_ns,
                rank_group=rank_group,
                local_ranks=local_ranks,
                grammars=found,
                draft_model=draft_model,
            )
        except BaseException:
            model.close()
            raise
