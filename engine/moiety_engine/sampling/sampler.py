"""Draws the next token of every row of a step that wants one.

Legend: L rows, V vocabulary. Order of operations, a row: logit bias and the ban of stop tokens below min_tokens →
repetition, presence and frequency penalties → temperature → top-k → top-p → min-p → draw. Reported log-probabilities
are those of the model itself (log-softmax of the untouched logits), as OpenAI's are.

The draw inverts the cumulative distribution at one uniform number that depends on seed and position only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from moiety_engine.messages import CoreLogprob
from moiety_engine.sampling.randomness import uniform
from moiety_engine.sequence import Sequence
from moiety_wire.messages import Sampling

_PRESELECT = 1024  # top-p seldom needs more of the vocabulary than this; where it does, the whole row is sorted


class Sampler:
    """Stateless but for the vocabulary's size and the device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device

    def sample(self, logits_LV: Tensor, rows: Rows[Sequence]) -> tuple[list[int], list[CoreLogprob | None]]:
        """One token a row. `logits_LV` float32, row i belongs to rows[i]; it may be overwritten."""
        wants_logprobs = [i for i, row in enumerate(rows) if row.submit.sampling.num_logprobs is not None]
        raw_LV = logits_LV[wants_logprobs].clone() if wants_logprobs else None
        for i, row in enumerate(rows):
            if _is_adjusted(row):
                self._adjust(logits_LV[i], row)
        token_ids = torch.argmax(logits_LV, dim=-1).tolist()
        for i, token_id in self._draw(logits_LV, rows).items():
            token_ids[i] = token_id
        logprobs: list[CoreLogprob | None] = [None] * len(rows)
        if raw_LV is not None:
            chosen = [token_ids[i] for i in wants_logprobs]
            counts = [rows[i].submit.sampling.num_logprobs or 0 for i in wants_logprobs]
            for i, logprob in zip(wants_logprobs, _logprobs(raw_LV, chosen, counts), strict=True):
                logprobs[i] = logprob
        return token_ids, logprobs

    def _adjust(self, logits_V: Tensor, row: Sequence) -> None:
        """Bias, bans and penalties, in place."""
        sampling = row.submit.sampling
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=self._device)
            logits_V[ids] += torch.tensor(list(sampling.logit_bias.values()), device=self._device)
        if row.num_output < row.submit.min_tokens and row.submit.stop_token_ids:
            logits_V[torch.tensor(row.submit.stop_token_ids, device=self._device)] = -torch.inf
        if sampling.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(row.tokens)), device=self._device)
            values = logits_V[seen]
            penalty = sampling.repetition_penalty
            logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if (sampling.presence_penalty or sampling.frequency_penalty) and row.num_output:
            counts = Counter(row.tokens[row.num_prompt :])
            seen = torch.tensor(list(counts), device=self._device)
            times = torch.tensor(list(counts.values()), device=self._device)
            logits_V[seen] -= sampling.presence_penalty + sampling.frequency_penalty * times

    def _draw(self, logits_LV: Tensor, rows: Rows[Sequence]) -> dict[int, int]:
        """Tokens of the rows with a temperature; rows with the same kind of filter are drawn together."""
        plain: list[int] = []
        filtered: list[int] = []
        for i, row in enumerate(rows):
            sampling = row.submit.sampling
            if sampling.temperature > 0:
                (filtered if sampling.top_k or sampling.top_p < 1 or sampling.min_p else plain).append(i)
        drawn: dict[int, int] = {}
        if plain:
            probs_LV = self._probabilities(logits_LV, plain, rows)
            drawn.update(zip(plain, _invert(probs_LV, self._uniforms(plain, rows)).tolist(), strict=True))
        if filtered:
            drawn.update(self._draw_filtered(self._probabilities(logits_LV, filtered, rows), filtered, rows))
        return drawn

    def _draw_filtered(self, probs_LV: Tensor, picked: list[int], rows: Rows[Sequence]) -> dict[int, int]:
        """Draws among the best tokens only. Most rows need few of them: those are preselected."""
        settings = [rows[i].submit.sampling for i in picked]
        uniform_L = self._uniforms(picked, rows)
        best_LK, ids_LK = probs_LV.topk(min(_PRESELECT, self._vocab_size), dim=-1)
        kept_LK, enough_L = _filter(best_LK, settings, self._vocab_size)
        token_L = ids_LK.gather(1, _invert(kept_LK, uniform_L)[:, None])[:, 0]
        if not bool(enough_L.all()):  # these rows alone, so that no row's draw depends on its neighbours
            rest = (~enough_L).nonzero()[:, 0]
            best_LK, ids_LK = probs_LV[rest].sort(dim=-1, descending=True, stable=True)
            kept_LK, _ = _filter(best_LK, [settings[i] for i in rest.tolist()], self._vocab_size)
            token_L[rest] = ids_LK.gather(1, _invert(kept_LK, uniform_L[rest])[:, None])[:, 0]
        return dict(zip(picked, token_L.tolist(), strict=True))

    def _probabilities(self, logits_LV: Tensor, picked: list[int], rows: Rows[Sequence]) -> Tensor:
        temperatures = torch.tensor([rows[i].submit.sampling.temperature for i in picked], device=self._device)
        scaled_LV = logits_LV[picked] / temperatures[:, None].clamp_min(1e-5)
        return scaled_LV.softmax(dim=-1)

    def _uniforms(self, picked: list[int], rows: Rows[Sequence]) -> Tensor:
        values = [uniform(rows[i].seed, rows[i].num_output) for i in picked]
        return torch.tensor(values, dtype=torch.float64, device=self._device)


def _is_adjusted(row: Sequence) -> bool:
    sampling = row.submit.sampling
    return bool(
        sampling.logit_bias
        or row.num_output < row.submit.min_tokens
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


def _filter(best_LK: Tensor, settings: list[Sampling], vocab_size: int) -> tuple[Tensor, Tensor]:
    """Zero what top-k, top-p and min-p exclude from probabilities sorted downwards. Also says of each row whether the
    K columns were enough to decide, that is whether the rest of the vocabulary would be excluded anyway."""
    device = best_LK.device
    num_columns = best_LK.shape[1]
    top_k_L = torch.tensor([min(s.top_k or vocab_size, vocab_size) for s in settings], device=device)
    top_p_L = torch.tensor([s.top_p for s in settings], dtype=torch.float64, device=device)
    min_p_L = torch.tensor([s.min_p for s in settings], device=device)
    in_k_LK = torch.arange(num_columns, device=device)[None, :] < top_k_L[:, None]
    mass_LK = (best_LK * in_k_LK).cumsum(dim=-1, dtype=torch.float64)
    whole_L = torch.where(top_k_L == vocab_size, 1.0, mass_LK[:, -1])
    before_LK = mass_LK - best_LK * in_k_LK
    in_p_LK = before_LK < (top_p_L * whole_L)[:, None]
    in_p_LK[:, 0] = True  # the best token always stays, whatever top_p says
    in_min_LK = best_LK >= min_p_L[:, None] * best_LK[:, :1]
    by_k_L = top_k_L <= num_columns
    by_p_L = (top_k_L == vocab_size) & (top_p_L < 1) & ~in_p_LK[:, -1]
    enough_L = by_k_L | by_p_L | ~in_min_LK[:, -1]
    return best_LK * (in_k_LK & in_p_LK & in_min_LK), enough_L


def _invert(weights_LK: Tensor, uniform_L: Tensor) -> Tensor:
    """The first column at which the cumulative weight exceeds uniform × total. Never a column of weight 0."""
    mass_LK = weights_LK.cumsum(dim=-1, dtype=torch.float64)
    target_L1 = uniform_L[:, None] * mass_LK[:, -1:]
    place_L = torch.searchsorted(mass_LK, target_L1, right=True)[:, 0]
    last_L = (mass_LK < mass_LK[:, -1:]).sum(dim=-1)  # where rounding leaves the target at the very end
    return torch.minimum(place_L, last_L)


def _logprobs(raw_LV: Tensor, chosen: list[int], counts: list[int]) -> list[CoreLogprob]:
    logprobs_LV = raw_LV.log_softmax(dim=-1)
    picked = logprobs_LV.gather(1, torch.tensor(chosen, device=raw_LV.device)[:, None])[:, 0].tolist()
    values, ids = logprobs_LV.topk(min(max(counts), raw_LV.shape[1]), dim=-1)
    values_list, ids_list = values.tolist(), ids.tolist()
    return [
        CoreLogprob(logprob, row_ids[:count], row_values[:count])
        for logprob, count, row_ids, row_values in zip(picked, counts, ids_list, values_list, strict=True)
    ]
