"""Startup of a loop from a configuration: the checkpoint is read on all ranks; only the warm-up remains."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from moiety_engine.assembly import abandon_on_error, assemble
from moiety_engine.config import EngineConfig
from moiety_engine.distribution.rendezvous_address import Rendezvous
from moiety_engine.loop import EngineLoop
from moiety_engine.loop_setup import build_loop
from moiety_engine.structured_outputs.service import GrammarServiceStart


def load_loop(
    config: EngineConfig,
    *,
    rendezvous: Rendezvous | None = None,
    progress: Callable[[int, int], None] | None = None,
    clock_ns: Callable[[], int] = time.time_ns,
) -> EngineLoop:
    """Load the configured checkpoint folder and return a loop of it, as rank 0 if there are several ranks.

    `rendezvous`: the launcher's rendezvous; without one, the other ranks are started here. `progress(done, total)` in
    bytes. Raises EngineError with advice.
    """
    grammars = GrammarServiceStart(Path(config.model), config.grammar)
    assembled = assemble(config, rendezvous, progress)
    rank_group, local_ranks = assembled.rank_group, assembled.local_ranks
    with abandon_on_error(rank_group):
        found = grammars.result()
        model = assembled.model
        try:
            return build_loop(
                model,
                config,
                clock_ns=clock_ns,
                rank_group=rank_group,
                local_ranks=local_ranks,
                grammars=found,
                draft_models=assembled.draft_models,
                load_part=assembled.load_part,
            )
        except BaseException:
            model.close()
            raise
