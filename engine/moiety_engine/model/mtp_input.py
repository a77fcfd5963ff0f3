"""Input of an MTP layer: a token, and the model's hidden state of the token before it (DeepSeek-V3, section 2.2).

T tokens, D model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.model.norms import make_norm
from moiety_kernels.linear import linear

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.spec import NormSpec
    from moiety_engine.model.weights import MtpInputWeights


class MtpInput:
    """Normalization of both inputs and their joint projection.

    The token's half comes first, as in checkpoints; the report has the opposite order.
    """

    def __init__(self, norm: NormSpec, weights: MtpInputWeights, arithmetic: Arithmetic) -> None:
        self._token_norm = make_norm(norm, weights.token_norm)
        self._before_norm = make_norm(norm, weights.before_norm)
        self._projection_DJ, self._invariant = weights.projection_DJ, arithmetic.invariant

    def __call__(self, token_TD: Tensor, before_TD: Tensor) -> Tensor:
        both_TJ = torch.cat((self._token_norm(token_TD), self._before_norm(before_TD)), dim=1)
        return linear(both_TJ, self._projection_DJ, invariant=self._invariant)
