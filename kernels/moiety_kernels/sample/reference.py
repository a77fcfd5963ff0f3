"""Definition of sampling: penalties → temperature → top-k → top-p → min-p → draw. L rows, V vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.sample.rows import IN_PROMPT

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.sample.rows import Draws, Penalties

MIN_TEMPERATURE = 1e-5


def sample(logits_LV: Tensor, draws: Draws, penalties: Penalties | None = None) -> Tensor:
    """Return one token per row, int64; of equally likely tokens the lower comes first."""
    logits_LV = logits_LV if penalties is None else penalised(logits_LV, penalties)
    scaled_LV = logits_LV / draws.temperature_L.clamp_min(MIN_TEMPERATURE)[:, None]
    probs_LV = scaled_LV.softmax(dim=-1)
    best_LV, ids_LV = probs_LV.sort(dim=-1, descending=True, stable=True)
    filtered_L = (draws.top_k_L > 0) | (draws.top_p_L < 1) | (draws.min_p_L > 0)
    token_L = torch.where(
        filtered_L,
        ids_LV.gather(1, _invert(_filter(best_LV, draws), draws.uniform_L)[:, None])[:, 0],
        _invert(probs_LV, draws.uniform_L),
    )
    return torch.where(draws.temperature_L > 0, token_L, logits_LV.argmax(dim=-1))


def penalised(logits_LV: Tensor, penalties: Penalties) -> Tensor:
    """Return the logits with penalties for tokens that were seen before."""
    place_L = penalties.place_L.clamp_min(0)
    repetition_L1, presence_L1, frequency_L1 = (
        each[place_L, None] for each in (penalties.repetition_J, penalties.presence_J, penalties.frequency_J)
    )
    seen_LV = penalties.seen_JV[place_L]
    repeated_LV = torch.where(logits_LV > 0, logits_LV / repetition_L1, logits_LV * repetition_L1)
    times_LV = seen_LV % IN_PROMPT
    lowered_LV = torch.where(seen_LV > 0, repeated_LV, logits_LV)
    lowered_LV = lowered_LV - ((times_LV > 0) * presence_L1 + times_LV * frequency_L1)
    return torch.where(penalties.place_L[:, None] >= 0, lowered_LV, logits_LV)


def _filter(best_LV: Tensor, draws: Draws) -> Tensor:
    """Return probabilities sorted in descending order, with 0 for those that top-k, top-p and min-p exclude."""
    size = best_LV.shape[1]
    top_k_L = torch.where(draws.top_k_L > 0, draws.top_k_L, size)
    in_k_LV = torch.arange(size, device=best_LV.device) < top_k_L[:, None]
    mass_LV = (best_LV * in_k_LV).cumsum(dim=-1, dtype=torch.float64)
    in_p_LV = mass_LV - best_LV * in_k_LV < draws.top_p_L[:, None] * mass_LV[:, -1:]
    in_p_LV[:, 0] = True
    in_p_LV |= draws.top_p_L[:, None] >= 1
    in_min_LV = best_LV >= draws.min_p_L[:, None] * best_LV[:, :1]
    return best_LV * (in_k_LV & in_p_LV & in_min_LV)


def _invert(weights_LV: Tensor, uniform_L: Tensor) -> Tensor:
    """Return the first column at which the cumulative weight exceeds uniform × total, never a column of weight 0."""
    mass_LV = weights_LV.cumsum(dim=-1, dtype=torch.float64)
    place_L = torch.searchsorted(mass_LV, uniform_L[:, None] * mass_LV[:, -1:], right=True)[:, 0]
    last_L = (mass_LV < mass_LV[:, -1:]).sum(dim=-1)  # where rounding puts the target at the very end
    return torch.minimum(place_L, last_L)
