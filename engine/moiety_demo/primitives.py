"""RMSNorm and rotary embedding with custom backward passes, which touch memory less than the composed ones.

T tokens, H heads, C head dimension.
"""

from typing import Any

import torch
from torch import Tensor


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, -1), None, None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normal = x * scale
        ctx.save_for_backward(normal, weight, scale)
        out: Tensor = normal * weight
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        normal, weight, scale = ctx.saved_tensors
        weighted = grads[0] * normal
        grad_weight = weighted.flatten(0, -2).sum(0)
        mean = (weighted @ weight).div_(weight.shape[0])
        grad_x = (grads[0] * weight).addcmul_(normal, mean.unsqueeze(-1), value=-1).mul_(scale)
        return grad_x, grad_weight, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to queries or keys [T, H, C].

    Tables are [T, 1, C / 2]; pairs are the halves of C (NeoX).
    """
    rotated: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm over the last dimension (Zhang and Sennrich, 2019)."""
    out: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first)
    torch.mul(second, cos, out=out_second)
    out_first.addcmul_(second, sin, value=-direction)
    out_second.addcmul_(first, sin, value=direction)
    return out
