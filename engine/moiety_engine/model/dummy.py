"""Random weights with a model's shapes, without its files, for benchmarks."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moiety_engine.model.weight_offload import named_tensors
from moiety_engine.model.weights import ModelWeights, allocate, products_of
from moiety_kernels.quantization import QuantizedWeight, quantize

if TYPE_CHECKING:
    from moiety_engine.model.spec import ModelSpec
    from moiety_kernels.quantization import WeightFormat

SEED = 0


@torch.inference_mode()
def draw_weights(
    spec: ModelSpec, *, device: torch.device, dtype: torch.dtype, form: WeightFormat | None = None
) -> ModelWeights:
    """Return random weights, the same at every call on one kind of device; products are quantized if `form` is given.

    Norms are 1 and biases 0; matrices are scaled so that products preserve magnitude, and activations neither vanish
    nor grow. Beside the result, at most one matrix (of one expert) is held in full precision.
    """
    generator = torch.Generator(device).manual_seed(SEED)
    if form is None:
        weights = allocate(spec, device=device, dtype=dtype)
        for name, tensor in named_tensors(weights):
            _fill(name, tensor, generator)
        return weights
    shapes = allocate(spec, device=torch.device("meta"), dtype=dtype)
    products = set(map(id, products_of(shapes, experts_only=form.of_experts_only)))
    made: dict[int, Tensor | QuantizedWeight] = {}  # by id of the meta tensor, since a tensor may occur twice
    for name, shape in named_tensors(shapes):
        if id(shape) in products:
            made[id(shape)] = _narrow(name, shape, form, device, generator)
        elif id(shape) not in made:
            made[id(shape)] = tensor = torch.empty_like(shape, device=device)
            _fill(name, tensor, generator)
    drawn: ModelWeights = _replaced(shapes, made)
    return drawn


def _fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    if not tensor.is_floating_point():  # experts of each token
        tensor.copy_(torch.arange(tensor.shape[-1], device=tensor.device).expand_as(tensor))
    elif "norm" in name and "bias" not in name:
        tensor.fill_(1)
    elif tensor.dim() < 2:
        tensor.zero_()
    else:
        deviation = 0.02 if name == "embedding_VD" else tensor.shape[-1] ** -0.5
        for part in tensor if tensor.dim() > 2 else [tensor]:  # one expert at a time: drawing needs temporary memory
            part.normal_(0, deviation, generator=generator)


def _narrow(
    name: str, shape: Tensor, form: WeightFormat, device: torch.device, generator: torch.Generator
) -> QuantizedWeight:
    parts = []
    for one in shape if shape.dim() > 2 else [shape]:
        wide = torch.empty_like(one, device=device)
        _fill(name, wide, generator)
        parts.append(quantize(wide, form))
    if shape.dim() == 2:
        return parts[0]
    values, scales = ([getattr(part, which) for part in parts] for which in ("values_NK", "scales_NG"))
    return QuantizedWeight(torch.stack(values), torch.stack(scales), form)


def _replaced(part: Any, made: dict[int, Tensor | QuantizedWeight]) -> Any:
    """Return a part of a model with its meta tensors replaced by those in `made`."""
    if isinstance(part, tuple):
        return tuple(_replaced(one, made) for one in part)
    if isinstance(part, Tensor):
        return made[id(part)]
    if not is_dataclass(part) or isinstance(part, type):
        return part
    return replace(part, **{field.name: _replaced(getattr(part, field.name), made) for field in fields(part)})
