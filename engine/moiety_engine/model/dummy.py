"""Weights drawn at random: a model's shape without its files, for measurements."""

from __future__ import annotations

import torch

from moiety_engine.model.residence import named_tensors
from moiety_engine.model.weights import ModelWeights

SEED = 0


@torch.inference_mode()
def fill_at_random(weights: ModelWeights) -> None:
    """The same numbers at every call on one kind of device: norms are 1, biases 0, matrices such that a product keeps
    the size of what it multiplies, so that activations neither vanish nor grow."""
    generator = torch.Generator(weights.embedding_VD.device).manual_seed(SEED)
    for name, tensor in named_tensors(weights):
        if "norm" in name and "bias" not in name:
            tensor.fill_(1)
        elif tensor.dim() < 2:
            tensor.zero_()
        else:
            deviation = 0.02 if name == "embedding_VD" else tensor.shape[-1] ** -0.5
            for part in tensor if tensor.dim() > 2 else [tensor]:  # one expert at a time: drawing takes memory beside
                part.normal_(0, deviation, generator=generator)
