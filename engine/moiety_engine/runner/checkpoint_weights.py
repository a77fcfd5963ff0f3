"""Weights that a rank loads from the checkpoint once more: for another position, or for a file that is unreadable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from moiety_engine.errors import CheckpointError
from moiety_engine.model.transformer import Transformer
from moiety_wire.engine_choices import Offload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moiety_engine.config import EngineConfig
    from moiety_engine.distribution.layout import RankPosition
    from moiety_engine.model.loading import WeightShard
    from moiety_engine.model.remote_experts import ExpertServer
    from moiety_engine.model.weights import ModelWeights


class PartLoader(Protocol):
    """Loader of the served model's part of a position, on a rank that has loaded a part before.

    Raises EngineError, also if the checkpoint was changed since.
    """

    def __call__(self, position: RankPosition, on_progress: Callable[[], None] = ..., /) -> WeightShard: ...


class DraftLoader(Protocol):
    """Loader of the draft model or the MTP layers of a rank; see `load_draft_models`."""

    def __call__(
        self, config: EngineConfig, model: Transformer, progress: Callable[[int, int], None], /
    ) -> tuple[Transformer, ...]: ...


class CheckpointWeights:
    """Loader of weights on one rank."""

    def __init__(self, config: EngineConfig, load_part: PartLoader | None, load_drafts: DraftLoader) -> None:
        """Create the loader. `load_part`: None if the models of this rank are not from a checkpoint."""
        self._config, self._load_part, self._load_drafts = config, load_part, load_drafts

    def load_part(self, position: RankPosition, on_progress: Callable[[], None] = lambda: None) -> WeightShard:
        """Load the served model's part of a position. Raises EngineError."""
        if self._load_part is None:
            raise CheckpointError("the model was not loaded from a checkpoint")
        return self._load_part(position, on_progress)

    def load(
        self,
        models: Sequence[Transformer | ExpertServer],
        number: int,
        on_progress: Callable[[], None] = lambda: None,
    ) -> ModelWeights:
        """Load the weights that a model of this rank has now: of the served model, a draft model or an MTP layer.

        `models` has the served model first. Raises EngineError with the reason if the checkpoint does not have them.
        """
        if self._config.offload.what is not Offload.NONE:
            raise CheckpointError("offloaded experts cannot be loaded once more")
        served, model = models[0], models[number]
        _require_first_placement(model)
        if number == 0:
            return self.load_part(served.ranks.rank_position, on_progress).weights
        assert isinstance(served, Transformer), "an expert rank has no draft model"
        if served.ranks.rank_position.layout.is_scaled:
            raise CheckpointError("the number of expert ranks was changed since the start")
        drafts = self._load_drafts(self._config, served, lambda _done, _total: on_progress())
        return drafts[number - 1].weights


def _require_first_placement(model: Transformer | ExpertServer) -> None:
    """Raise CheckpointError if experts have moved to this rank since it has loaded its own."""
    position = model.ranks.rank_position
    if position.layout.ffn_ranks and position.expert_rank is None:
        return  # the expert ranks have them
    for layer in model.spec.moe_layers:
        slots = model.slots_of(layer)
        if slots is not None and slots.held != position.slots_of(slots.placement.num_experts):
            raise CheckpointError("experts have moved between ranks since the start")
