"""Log-probabilities of the tokens of prompts: what the model would have said of what is there.

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

ROWS_AT_ONCE = 128  # whose logits are there at the same time


@dataclass(frozen=True, slots=True)
class Scores:
    """In host memory once the step's mark has been passed."""

    parts: list[Scored]
    pieces: list[Logprobs]

    def unpack(self) -> list[tuple[int, CoreScores]]:
        """By the requests' keys."""
        rows = [
            row
            for piece in self.pieces
            for row in zip(piece.chosen_L.tolist(), piece.id_LK.tolist(), piece.value_LK.tolist(), strict=True)
        ]
        found, begin = [], 0
        for part in self.parts:
            end = begin + len(part.token_ids)
            logprobs = [
                CoreLogprob(chosen, ids[: part.count], values[: part.count]) for chosen, ids, values in rows[begin:end]
            ]
            found.append((part.key, CoreScores(part.position, logprobs)))
            begin = end
        return found


def score(model: Transformer, hidden_LD: Tensor, parts: list[Scored], staging: Staging) -> Scores:
    """Queue it, some rows at a time."""
    token_L = staging.upload(np.array([token_id for part in parts for token_id in part.token_ids], dtype=np.int64))
    count = max(part.count for part in parts)
    pieces = [
        logprobs_of(model.logits(rows_LD), picked_L, count).download(staging)
        for rows_LD, picked_L in zip(in_turns(hidden_LD), in_turns(token_L), strict=True)
    ]
    return Scores(parts, pieces)


def are_finite(scores: CoreScores) -> bool:
    """Return whether every log-probability is a number that can be told."""
    told = (value for one in scores.logprobs for value in (one.logprob, *one.top_logprobs))
    return all(map(math.isfinite, told))


def in_turns(rows: Tensor) -> list[Tensor]:
    """The rows that every rank takes at the same time."""
    return [rows[begin : begin + ROWS_AT_ONCE] for begin in range(0, len(rows), ROWS_AT_ONCE)]
