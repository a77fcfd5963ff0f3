"""Base of the recurrent layers: their weights, and the rows and states that a batch has for them.

T tokens, D model width.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from moiety_engine.model.batch import RecurrentStateCache
from moiety_engine.model.recurrent_specs import RecurrentSpec
from moiety_kernels.linear import linear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.batch import Batch, Cache, RecurrentRows

Spec = TypeVar("Spec", bound=RecurrentSpec)
Weights = TypeVar("Weights")


class RecurrentMixer(Generic[Spec, Weights]):
    """Layer that mixes the tokens of a sequence by a state of fixed size. Subclasses implement `_mix` and `replay`."""

    def __init__(self, spec: Spec, weights: Weights, arithmetic: Arithmetic) -> None:
        self._spec, self._weights = spec, weights
        self._linear = partial(linear, invariant=arithmetic.invariant)

    def __call__(self, x_TD: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """Return the layer's output for x, [T, D], and advance the states of the batch's sequences."""
        assert isinstance(cache, RecurrentStateCache)
        assert batch.states is not None
        return self._mix(x_TD, batch.states, cache)

    def _mix(self, x_TD: Tensor, rows: RecurrentRows, cache: RecurrentStateCache) -> Tensor:
        """Return the layer's output for x, whose tokens form the runs in `rows`, and advance their states."""
        raise NotImplementedError

    def replay(self, inputs_TC: Sequence[Tensor], rows: RecurrentRows, cache: RecurrentStateCache) -> None:
        """Advance the states in the rows' slots by tokens with these recorded inputs (`input_widths` of the spec)."""
        raise NotImplementedError
