"""Input of an MTP layer: a token, and the model's hidden state of the token before it (DeepSeek-V3, section 2.2).

T tokens, D model width, N residual streams, X = T · N, J = 2 · D.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.model.norms import make_norm
from moiety_kernels.linear import linear

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.spec import ModelSpec
    from moiety_engine.model.weights import MtpInputWeights


class MtpInput:
    """Normalization of both inputs and their joint projection.

    The token's half comes first, as in checkpoints; the report has the opposite order. If the residual stream has
    several rows for each token (DeepSeek-V4), each is normalized and projected together with the token.
    """

    def __init__(self, spec: ModelSpec, weights: MtpInputWeights, arithmetic: Arithmetic) -> None:
        norm = spec.norm
        self._token_norm = make_norm(norm, weights.token_norm)
        self._before_norm = make_norm(norm, weights.before_norm)
        self._projection_DJ, self._invariant = weights.projection_DJ, arithmetic.invariant
        self._num_streams = 0 if spec.streams is None else spec.streams.num_streams

    @property
    def has_streams(self) -> bool:
        """Return whether hidden states have several rows for each token."""
        return self._num_streams > 0

    def __call__(self, token_TD: Tensor, before_TD: Tensor) -> Tensor:
        """Return the layer's input, [T, D], or [T, N, D] for streams; `before_TD` is [T, N · D] then."""
        if self._num_streams:
            before_TND = before_TD.view(len(token_TD), self._num_streams, -1)
            normed_XD = self._before_norm(before_TND.flatten(0, 1))
            token_TND = self._token_norm(token_TD).unsqueeze(1).expand_as(before_TND)
            both_XJ = torch.cat((token_TND.flatten(0, 1), normed_XD), dim=1)
            return linear(both_XJ, self._projection_DJ, invariant=self._invariant).view_as(before_TND)
        both_TJ = torch.cat((self._token_norm(token_TD), self._before_norm(before_TD)), dim=1)
        return linear(both_TJ, self._projection_DJ, invariant=self._invariant)
