"""Routing: each token's experts and their weights, and the token–expert pairs grouped by expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require, require_shape
from moiety_kernels.lazy_imports import lazy_import
from moiety_kernels.route import reference
from moiety_kernels.route.groups import Groups
from moiety_kernels.route.spec import ALL_EXPERT_SCORINGS, BIAS_SCORINGS, RoutingSpec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Groups", "RoutingSpec", "group", "group_by_expert", "route", "weigh_experts"]


_cpu = lazy_import(__name__, "cpu")
_grouping = lazy_import("moiety_kernels.route.kernels", "grouping")
_kernel = lazy_import(__name__, "kernel")


def route(logits_TE: Tensor, spec: RoutingSpec, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (weight_TK float32, expert_TK int32), the best expert first.

    `bias_E`, float32, affects the choice of experts but not their weights; the scorings in `BIAS_SCORINGS` support it.
    """
    _check(logits_TE, spec, bias_E)
    if logits_TE.is_cpu and _cpu().fits(logits_TE, spec, bias_E):
        fast: tuple[Tensor, Tensor] = _cpu().route(logits_TE, spec, bias_E)
        return fast
    if logits_TE.is_cuda and _kernel().fits(logits_TE):
        on_gpu: tuple[Tensor, Tensor] = _kernel().route(logits_TE, spec, bias_E)
        return on_gpu
    return reference.route(logits_TE, spec, bias_E)


def weigh_experts(logits_TE: Tensor, expert_TK: Tensor, spec: RoutingSpec) -> Tensor:
    """Return weight_TK, float32, of experts that something else has chosen, such as a hash of the token.

    `expert_TK`: int32, K = `spec.top_k`. The weights are those that `route` would return for them; the scoring must be
    one that all experts have.
    """
    require_shape("logits", logits_TE, (-1, spec.num_experts))
    require_shape("expert", expert_TK, (logits_TE.shape[0], spec.top_k))
    require(expert_TK.dtype is torch.int32, "experts must be int32")
    require(
        spec.scoring in ALL_EXPERT_SCORINGS, f"only scores by {', '.join(ALL_EXPERT_SCORINGS)} are those of any expert"
    )
    if logits_TE.is_cpu and _cpu().fits(logits_TE, spec, None) and expert_TK.is_contiguous():
        fast: Tensor = _cpu().weigh_experts(logits_TE, expert_TK, spec)
        return fast
    return reference.weigh_experts(logits_TE, expert_TK, spec)


def group_by_expert(expert_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return (order_R, counts_E), int64: the pairs t · K + k sorted by expert, and each expert's number of pairs."""
    return reference.group_by_expert(expert_TK, num_experts)


def group(expert_TK: Tensor, num_experts: int, tile_rows: int) -> Groups:
    """Return the pairs grouped by expert, in tiles of `tile_rows` rows for a grouped product.

    Every id must be an expert's.
    """
    require_shape("expert", expert_TK, (-1, -1))
    require(tile_rows > 0, "a tile must have rows")
    if expert_TK.is_cuda and _grouping().fits(expert_TK, num_experts):
        on_gpu: Groups = _grouping().group(expert_TK, num_experts, tile_rows)
        return on_gpu
    return reference.group(expert_TK, num_experts, tile_rows)


def _check(logits_TE: Tensor, spec: RoutingSpec, bias_E: Tensor | None) -> None:
    require_shape("logits", logits_TE, (-1, spec.num_experts))
    if bias_E is not None:
        require_shape("bias", bias_E, (spec.num_experts,))
        require(bias_E.dtype is torch.float32, "the bias must be float32")
        require(spec.scoring in BIAS_SCORINGS, f"only scores by {', '.join(BIAS_SCORINGS)} take a bias")
