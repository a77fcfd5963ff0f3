"""Sampler: draws the next token of every row of a step, on the device and without waiting for it.

Legend: L rows, V vocabulary, K columns. Order of operations per row: `bias_and_penalties`, the grammar's mask, and
token rules → temperature → top-k → top-p → min-p → draw. Reported log-probabilities are those of the model itself
(log-softmax of the unmodified logits), like those of OpenAI.

The draw inverts the cumulative distribution at one uniform number that depends on seed and position only.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from moiety_engine.messages import CoreLogprob
from moiety_engine.sampling.bias_and_penalties import bias_and_ban, has_bias_or_ban, has_penalty, penalties
from moiety_engine.sampling.finite import finite_rows, finite_rows_on_device
from moiety_engine.sampling.randomness import uniforms
from moiety_engine.sampling.rows import Row
from moiety_engine.sampling.token_masks import TokenMasks, ban_others
from moiety_engine.sampling.token_rules import apply_token_rules, has_token_rules
from moiety_engine.staging import Staging, Upload
from moiety_kernels.sample import Draws, Penalties, penalised
from moiety_kernels.sample import sample as draw_on_device
from moiety_wire.messages import Sampling

_NO_ROWS: frozenset[int] = frozenset()
is_greedy = attrgetter("request.is_greedy")  # of a row
_PRESELECT = 1024  # top-p seldom needs more tokens than this; if it does, the whole row is sorted
_ALIGNED = 4  # values of float32 that fill 16 bytes
_MAX_TOP_K = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the rows that request them: of the chosen token, and of the likeliest tokens."""

    chosen_L: Tensor
    value_LK: Tensor
    id_LK: Tensor

    def download(self, staging: Staging) -> Logprobs:
        """Return a copy in host memory, valid once a mark that is set after this call has passed."""
        return Logprobs(*(staging.download(part) for part in (self.chosen_L, self.value_LK, self.id_LK)))


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token per row, on the device or, after `download`, in host memory.

    The token of a row whose logits are not finite has no meaning.
    """

    token_L: Tensor  # int64
    finite_L: Tensor  # bool
    logprobs: Logprobs | None
    counts: list[int | None]  # likeliest tokens that each row requests; None for no log-probabilities

    def download(self, staging: Staging) -> Drawn:
        """Return a copy in host memory, valid once a mark that is set after this call has passed."""
        found = None if self.logprobs is None else self.logprobs.download(staging)
        return Drawn(staging.download(self.token_L), staging.download(self.finite_L), found, self.counts)

    def non_finite_rows(self) -> frozenset[int]:
        """Return the rows whose logits are not finite. Must be in host memory."""
        return frozenset(np.flatnonzero(~self.finite_L.numpy()).tolist())

    def unpack(self) -> tuple[list[int], list[CoreLogprob | None]]:
        """Return the tokens and log-probabilities of the rows in the form of messages. Must be in host memory."""
        token_ids: list[int] = self.token_L.tolist()
        logprobs: list[CoreLogprob | None] = [None] * len(token_ids)
        if self.logprobs is not None:
            chosen, values, ids = (
                part.tolist() for part in (self.logprobs.chosen_L, self.logprobs.value_LK, self.logprobs.id_LK)
            )
            wanting = [i for i, count in enumerate(self.counts) if count is not None]
            for place, i in enumerate(wanting):
                count = self.counts[i]
                logprobs[i] = CoreLogprob(chosen[place], ids[place][:count], values[place][:count])
        return token_ids, logprobs


@dataclass(frozen=True, slots=True)
class Best:
    """Tokens of the largest logits, in host memory. A substitute for a `Drawn` without log-probabilities."""

    token_ids: list[int]
    finite_L: np.ndarray  # bool, like that of Drawn

    @classmethod
    def of(cls, logits: np.ndarray) -> Best:
        """Return the first of each row's largest logits, or the first NaN. `logits`: [L, V], float32."""
        return cls(logits.argmax(axis=1).tolist(), finite_rows(logits))

    def non_finite_rows(self) -> frozenset[int]:
        """Return the rows whose logits are not finite."""
        finite: list[bool] = self.finite_L.tolist()
        return _NO_ROWS if all(finite) else frozenset([row for row, is_finite in enumerate(finite) if not is_finite])

    @property
    def token_L(self) -> Tensor:  # noqa: N802 - the name of a tensor, like that of Drawn
        return torch.tensor(self.token_ids)

    def unpack(self) -> tuple[list[int], list[CoreLogprob | None]]:
        return self.token_ids, [None] * len(self.token_ids)


class Sampler:
    """Sampler of one model. Its only state is the vocabulary size and the staging buffers to the device."""

    def __init__(self, vocab_size: int, device: torch.device, staging: Staging | None = None) -> None:
        self._vocab_size = vocab_size
        self._on_cpu = device.type == "cpu"
        self._staging = staging or Staging(device)

    def sample(
        self,
        logits_LV: Tensor,
        rows: Rows[Row],
        sampled_L: Tensor | None = None,
        allowed: TokenMasks | None = None,
    ) -> Drawn:
        """Draw one token per row.

        `logits_LV`: float32; row i belongs to rows[i]; it may be overwritten. `sampled_L`: tokens that the running step
        samples. `allowed`: token masks of the rows with a grammar.
        """
        finite_L = finite_rows_on_device(logits_LV)  # before any token is banned with -inf
        if all(map(is_greedy, rows)):  # most steps
            token_L = _best(logits_LV) if self._on_cpu else logits_LV.argmax(dim=-1)
            return Drawn(token_L, finite_L, None, [None] * len(rows))
        counts = [row.request.submit.sampling.num_logprobs for row in rows]
        wanting = [i for i, count in enumerate(counts) if count is not None]
        raw_LV = self._pick(logits_LV, wanting).clone() if wanting else None
        upload = self._staging.upload
        if any(map(has_bias_or_ban, rows)):
            bias_and_ban(logits_LV, rows, upload)
        if allowed is not None:
            ban_others(logits_LV, allowed, upload)
        apply_token_rules(logits_LV, rows, sampled_L, upload)
        penalised_rows = [i for i, row in enumerate(rows) if has_penalty(row)]
        if self._on_cpu:
            self._penalise(logits_LV, rows, penalised_rows, sampled_L)
            token_L = _best(logits_LV)
            self._draw(logits_LV, rows, token_L)
        elif penalised_rows or any(row.request.submit.sampling.temperature > 0 for row in rows):
            lowered = penalties_of(rows, penalised_rows, self._vocab_size, sampled_L, upload)
            token_L = draw_on_device(logits_LV, draws(rows, upload), lowered)
        else:
            token_L = logits_LV.argmax(dim=-1)
        logprobs = None
        if raw_LV is not None:
            logprobs = logprobs_of(raw_LV, self._pick(token_L, wanting), max(count or 0 for count in counts))
        return Drawn(token_L, finite_L, logprobs, counts)

    def _penalise(self, logits_LV: Tensor, rows: Rows[Row], picked: list[int], sampled_L: Tensor | None) -> None:
        """Apply penalties to the picked rows in place."""
        if picked:
            every, upload = np.arange(len(picked), dtype=np.int32), self._staging.upload
            lowered = penalties([rows[i] for i in picked], every, self._vocab_size, sampled_L, upload)
            logits_LV.index_copy_(0, upload(np.array(picked)), penalised(self._pick(logits_LV, picked), lowered))

    def _draw(self, logits_LV: Tensor, rows: Rows[Row], token_L: Tensor) -> None:
        """Draw the tokens of the rows with a temperature into token_L, on a CPU.

        Rows with the same kind of filter are drawn together.
        """
        plain: list[int] = []
        few: list[int] = []
        many: list[int] = []  # rows whose filter may leave more than is preselected
        for i, row in enumerate(rows):
            sampling = row.request.submit.sampling
            if sampling.temperature > 0:
                if 0 < sampling.top_k <= _PRESELECT:
                    few.append(i)
                else:
                    (many if sampling.top_p < 1 or sampling.min_p or sampling.top_k else plain).append(i)
        for picked, draw in ((plain, self._draw_plain), (few, self._draw_few), (many, self._draw_many)):
            if picked:
                settings = [rows[i].request.submit.sampling for i in picked]
                temperatures = np.array([max(s.temperature, 1e-5) for s in settings], dtype=np.float32)
                scaled_LV = self._pick(logits_LV, picked) / self._staging.upload(temperatures[:, None])
                drawn_L = draw(scaled_LV.softmax(dim=-1), settings, self._uniforms(picked, rows))
                token_L.index_copy_(0, self._staging.upload(np.array(picked)), drawn_L)

    def _draw_plain(self, probs_LV: Tensor, settings: list[Sampling], uniform_L: Tensor) -> Tensor:
        return _invert(probs_LV, uniform_L)

    def _draw_few(self, probs_LV: Tensor, settings: list[Sampling], uniform_L: Tensor) -> Tensor:
        """Draw for rows whose filter keeps at most `_PRESELECT` tokens."""
        best_LK, ids_LK = probs_LV.topk(min(_PRESELECT, self._vocab_size), dim=-1)
        kept_LK, _ = self._filter(best_LK, settings)
        return ids_LK.gather(1, _invert(kept_LK, uniform_L)[:, None])[:, 0]

    def _draw_many(self, probs_LV: Tensor, settings: list[Sampling], uniform_L: Tensor) -> Tensor:
        """Draw for rows whose filter may keep more than `_PRESELECT` tokens.

        Most rows keep few tokens, so the preselection suffices; only the other rows are sorted.
        """
        best_LK, ids_LK = probs_LV.topk(min(_PRESELECT, self._vocab_size), dim=-1)
        kept_LK, enough_L = self._filter(best_LK, settings)
        token_L = ids_LK.gather(1, _invert(kept_LK, uniform_L)[:, None])[:, 0]
        if not bool(enough_L.all()):  # only these rows, so that no row's draw depends on other rows
            rest = (~enough_L).nonzero()[:, 0]
            token_L[rest] = self._draw_sorted(probs_LV[rest], [settings[i] for i in rest.tolist()], uniform_L[rest])
        return token_L

    def _draw_sorted(self, probs_LV: Tensor, settings: list[Sampling], uniform_L: Tensor) -> Tensor:
        best_LV, ids_LV = probs_LV.sort(dim=-1, descending=True, stable=True)
        kept_LV, _ = self._filter(best_LV, settings)
        return ids_LV.gather(1, _invert(kept_LV, uniform_L)[:, None])[:, 0]

    def _filter(self, best_LK: Tensor, settings: list[Sampling]) -> tuple[Tensor, Tensor]:
        upload, vocabulary = self._staging.upload, self._vocab_size
        return _filter(
            best_LK,
            upload(np.array([min(s.top_k or vocabulary, vocabulary) for s in settings])),
            upload(np.array([s.top_p for s in settings], dtype=np.float64)),
            upload(np.array([s.min_p for s in settings], dtype=np.float32)),
            vocabulary,
        )

    def _pick(self, values: Tensor, picked: list[int]) -> Tensor:
        """Return the picked rows of a tensor; the tensor itself if all rows are picked."""
        if len(picked) == values.shape[0]:
            return values
        return values.index_select(0, self._staging.upload(np.array(picked)))

    def _uniforms(self, picked: list[int], rows: Rows[Row]) -> Tensor:
        return self._staging.upload(
            uniforms([rows[i].request.seed for i in picked], [rows[i].num_output for i in picked])
        )


def penalties_of(
    rows: Rows[Row], picked: list[int], vocab_size: int, sampled_L: Tensor | None, upload: Upload
) -> Penalties | None:
    """Return the penalties of the picked rows on the device; None if no row is picked."""
    if not picked:
        return None
    place_L = np.full(len(rows), -1, dtype=np.int32)
    place_L[picked] = np.arange(len(picked), dtype=np.int32)
    return penalties([rows[i] for i in picked], place_L, vocab_size, sampled_L, upload)


def draws(rows: Rows[Row], upload: Upload) -> Draws:
    """Return the sampling parameters and uniform numbers of the rows on the device."""
    settings = [row.request.submit.sampling for row in rows]
    return Draws(
        upload(np.array([setting.temperature for setting in settings], dtype=np.float32)),
        upload(np.array([min(setting.top_k, _MAX_TOP_K) for setting in settings], dtype=np.int32)),
        upload(np.array([setting.top_p for setting in settings], dtype=np.float64)),
        upload(np.array([setting.min_p for setting in settings], dtype=np.float32)),
        upload(uniforms([row.request.seed for row in rows], [row.num_output for row in rows])),
    )


def _filter(
    best_LK: Tensor, top_k_L: Tensor, top_p_L: Tensor, min_p_L: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Set to zero the probabilities, sorted in descending order, that top-k, top-p and min-p exclude.

    Also returns for each row whether the K columns were enough to decide, that is, whether the rest of the vocabulary
    would be excluded anyway.
    """
    num_columns = best_LK.shape[1]
    in_k_LK = torch.arange(num_columns, device=best_LK.device)[None, :] < top_k_L[:, None]
    mass_LK = (best_LK * in_k_LK).cumsum(dim=-1, dtype=torch.float64)
    whole_L = torch.where(top_k_L == vocab_size, 1.0, mass_LK[:, -1])
    before_LK = mass_LK - best_LK * in_k_LK
    in_p_LK = before_LK < (top_p_L * whole_L)[:, None]
    in_p_LK[:, 0] = True  # the best token is always kept, regardless of top_p
    in_min_LK = best_LK >= min_p_L[:, None] * best_LK[:, :1]
    by_k_L = top_k_L <= num_columns
    by_p_L = (top_k_L == vocab_size) & (top_p_L < 1) & ~in_p_LK[:, -1]
    enough_L = by_k_L | by_p_L | ~in_min_LK[:, -1]
    return best_LK * (in_k_LK & in_p_LK & in_min_LK), enough_L


def is_plain(row: Row) -> bool:
    """Return whether the row's token is the largest unmodified logit's, without log-probabilities."""
    if row.request.is_greedy:
        return True
    sampling = row.request.submit.sampling
    if sampling.temperature > 0 or sampling.num_logprobs is not None or row.request.grammar is not None:
        return False
    return not has_bias_or_ban(row) and not has_token_rules(row) and not has_penalty(row)


def _best(logits_LV: Tensor) -> Tensor:
    """Return the first of each row's largest logits, or the first NaN, in host memory.

    Equals `torch.argmax`, which takes ten times as long.
    """
    return torch.from_numpy(logits_LV.numpy().argmax(axis=1))


def _invert(weights_LK: Tensor, uniform_L: Tensor) -> Tensor:
    """Return the first column at which the cumulative weight exceeds uniform × total; never a column of weight 0."""
    mass_LK = weights_LK.cumsum(dim=-1, dtype=torch.float64)
    target_L1 = uniform_L[:, None] * mass_LK[:, -1:]
    place_L = torch.searchsorted(mass_LK, target_L1, right=True)[:, 0]
    last_L = (mass_LK < mass_LK[:, -1:]).sum(dim=-1)  # for a target that rounding moved to the end
    return torch.minimum(place_L, last_L)


def logprobs_of(raw_LV: Tensor, token_L: Tensor, count: int) -> Logprobs:
    """Return the log-probabilities of one token of each row, and of the `count` likeliest tokens."""
    if raw_LV.shape[1] % _ALIGNED:  # a GPU's summation order depends on whether a row starts at a multiple of 16 bytes
        raw_LV = functional.pad(raw_LV, (0, -raw_LV.shape[1] % _ALIGNED), value=-torch.inf)
    logprobs_LV = raw_LV.log_softmax(dim=-1)
    values_LK, ids_LK = logprobs_LV.topk(min(count, raw_LV.shape[1]), dim=-1)
    return Logprobs(logprobs_LV.gather(1, token_L[:, None])[:, 0], values_LK, ids_LK)
