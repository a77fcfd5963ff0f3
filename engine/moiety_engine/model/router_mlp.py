"""Routers that are a small feed-forward, and continue the router of the layer before (ZAYA1).

T tokens, D model width, W router width, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from moiety_engine.model.spec import MoeSpec
from moiety_kernels.linear import linear
from moiety_kernels.rms_norm import rms_norm

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

    from torch import Tensor

    from moiety_engine.distribution.collectives import Pipeline
    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.router_mlp_spec import RouterMlpSpec
    from moiety_engine.model.spec import ModelSpec
    from moiety_engine.model.tensor_allocator import TensorAllocator


@dataclass(frozen=True, slots=True)
class RouterMlpWeights:
    """Weights before the router's last product, all float32."""

    down_WD: Tensor
    down_bias_W: Tensor
    norm_W: Tensor
    first_WW: Tensor
    first_bias_W: Tensor
    second_WW: Tensor
    second_bias_W: Tensor
    scale_W: Tensor | None  # of the router of the layer before


def allocate_router_mlp(spec: RouterMlpSpec, size: int, new: TensorAllocator) -> RouterMlpWeights:
    """Return uninitialized weights of a router in a model of width `size`."""
    width = spec.width
    return RouterMlpWeights(
        down_WD=new.vector(width, size),
        down_bias_W=new.vector(width),
        norm_W=new.vector(width),
        first_WW=new.vector(width, width),
        first_bias_W=new.vector(width),
        second_WW=new.vector(width, width),
        second_bias_W=new.vector(width),
        scale_W=new.vector(width) if spec.continues else None,
    )


class RouterInputs:
    """Inputs of the newest router of each batch that is being computed, by the batch's tokens.

    The first router of a pipeline stage continues the last one of the stage before, whose input is sent along.
    """

    def __init__(self, spec: ModelSpec, pipeline: Pipeline) -> None:
        """Create it. `spec` is of the whole model, `pipeline` that of its stages."""
        widths = (one.ffn.router_mlp for one in spec.layers if isinstance(one.ffn, MoeSpec))
        self._width = next((router.width for router in widths if router is not None), 0)
        self._pipeline = pipeline
        self._of_tokens: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
        self._received: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()  # of the stage before

    def keep(self, token_ids_T: Tensor, input_TW: Tensor) -> None:
        """Keep a router's input for the next layer."""
        self._of_tokens[token_ids_T] = input_TW

    def of(self, token_ids_T: Tensor) -> Tensor:
        """Return the input of the router of the layer before."""
        return self._of_tokens[token_ids_T]

    def receive(self, token_ids_T: Tensor) -> None:
        """Receive the input of the last router of the stage before, after that stage's output."""
        if self._width and len(token_ids_T) and not self._pipeline.is_first:
            empty_TW = torch.empty(len(token_ids_T), self._width, device=token_ids_T.device)
            self._received[token_ids_T] = self._pipeline.receive(empty_TW)

    def begin_pass(self, token_ids_T: Tensor, parts: Sequence[Tensor] = ()) -> None:
        """Let the stage's first router continue what was received for a batch; also when the pass is run again.

        `parts`: the tokens of the batch's micro-batches, consecutive parts of `token_ids_T`, if it has any.
        """
        received_TW = self._received.get(token_ids_T)
        if received_TW is None:
            return
        self.keep(token_ids_T, received_TW)
        if parts:
            for part_T, input_TW in zip(parts, torch.split(received_TW, [len(one) for one in parts]), strict=True):
                self.keep(part_T, input_TW)

    def end_pass(self, token_ids_T: Tensor, parts: Sequence[Tensor] = ()) -> None:
        """Join the inputs of the stage's last router of a batch's micro-batches, for `send`; see `begin_pass`."""
        if self._width and self._pipeline.size > 1 and len(token_ids_T) and parts:
            self.keep(token_ids_T, torch.cat([self.of(part_T) for part_T in parts if len(part_T)]))

    def send(self, token_ids_T: Tensor) -> None:
        """Send the input of this stage's last router to the next stage, after this stage's output."""
        if self._width and len(token_ids_T):
            self._pipeline.send_to_next_stage(self.of(token_ids_T))


class RouterMlp:
    """Hidden layers of one layer's router."""

    def __init__(
        self, spec: RouterMlpSpec, weights: RouterMlpWeights, arithmetic: Arithmetic, inputs: RouterInputs
    ) -> None:
        self._spec, self._weights, self._inputs = spec, weights, inputs
        self._linear = partial(linear, invariant=arithmetic.invariant)

    def __call__(self, x_TD: Tensor, token_ids_T: Tensor) -> Tensor:
        """Return the input of the router's last product, [T, W], float32."""
        weights = self._weights
        input_TW = self._linear(x_TD.float(), weights.down_WD, weights.down_bias_W)
        if weights.scale_W is not None:
            input_TW = input_TW + self._inputs.of(token_ids_T) * weights.scale_W
        self._inputs.keep(token_ids_T, input_TW)
        inner_TW = rms_norm(input_TW, weights.norm_W, self._spec.norm_eps)
        inner_TW = _gelu(self._linear(inner_TW, weights.first_WW, weights.first_bias_W))
        return _gelu(self._linear(inner_TW, weights.second_WW, weights.second_bias_W))


def _gelu(x_TW: Tensor) -> Tensor:
    """Return the exact GELU. In 64 bits, since torch's 32 bits depend on where in the tensor a value is."""
    return functional.gelu(x_TW.double()).to(x_TW.dtype) if x_TW.is_cpu else functional.gelu(x_TW)
