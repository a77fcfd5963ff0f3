"""Log-probabilities of prompt tokens.

L rows, the hidden states before the tokens that are scored; D model width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from moiety_engine.messages import CoreLogprob, CoreScores
from moiety_engine.model.transformer import Transformer
from moiety_engine.runner.inputs import Scored
from moiety_engine.sampling import Logprobs, logprobs_of
from moiety_engine.staging import Staging

ROWS_AT_ONCE = 128  # rows whose logits are in memory at the same time


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of a step; in host memory once the step's mark is passed."""

    parts: list[Scored]
    pieces: list[Logprobs]
    ranks: list[Tensor]  # of the tokens of each piece

    def unpack(self) -> list[tuple[int, CoreScores]]:
        """Return the scores with the keys of their requests."""
        rows = [
            row
            for piece, rank_L in zip(self.pieces, self.ranks, strict=True)
            for row in zip(
                piece.chosen_L.tolist(), piece.id_LK.tolist(), piece.value_LK.tolist(), rank_L.tolist(), strict=True
            )
        ]
        found, begin = [], 0
        for part in self.parts:
            end = begin + len(part.token_ids)
            logprobs = [
                CoreLogprob(chosen, ids[: part.count], values[: part.count], rank)
                for chosen, ids, values, rank in rows[begin:end]
            ]
            found.append((part.key, CoreScores(part.position, logprobs)))
            begin = end
        return found


def score(model: Transformer, hidden_LD: Tensor, parts: list[Scored], staging: Staging) -> Scores:
    """Queue the computation of the scores, `ROWS_AT_ONCE` rows at a time."""
    token_L = staging.upload(np.array([token_id for part in parts for token_id in part.token_ids], dtype=np.int64))
    count = max(part.count for part in parts)
    scores = Scores(parts, [], [])
    for rows_LD, picked_L in zip(in_turns(hidden_LD), in_turns(token_L), strict=True):
        logits_LV = model.logits(rows_LD)
        scores.ranks.append(staging.download(_ranks(logits_LV, picked_L)))
        scores.pieces.append(logprobs_of(logits_LV, picked_L, count).download(staging))
    return scores


def _ranks(logits_LV: Tensor, token_L: Tensor) -> Tensor:
    """Return one more than the number of tokens that are likelier than each row's token."""
    return (logits_LV > logits_LV.gather(1, token_L[:, None])).sum(dim=-1) + 1


def are_finite(scores: CoreScores) -> bool:
    """Return whether all log-probabilities are finite."""
    logprobs = (value for one in scores.logprobs for value in (one.logprob, *one.top_logprobs))
    return all(map(math.isfinite, logprobs))


def in_turns(rows: Tensor) -> list[Tensor]:
    """Return the rows in portions of `ROWS_AT_ONCE`, the same on every rank."""
    return [rows[begin : begin + ROWS_AT_ONCE] for begin in range(0, len(rows), ROWS_AT_ONCE)]
