"""What is done to logits before a token is drawn: bias, bans and penalties, for all rows that want any at once.

Tokens of the past are known on the host, but for the one that the running step samples, which is on the device only.

L rows, V vocabulary, J rows with penalties, P of them with a pending token.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from moiety_engine.sequence import Sequence
from moiety_engine.staging import Upload


def is_adjusted(row: Sequence) -> bool:
    return _has_bias_or_ban(row) or _has_penalty(row)


def adjust(logits_LV: Tensor, rows: Rows[Sequence], sampled_L: Tensor | None, upload: Upload) -> None:
    """In place, and in this order: logit bias and the ban of stop tokens below min_tokens, then repetition, presence
    and frequency penalties. `sampled_L`: what the running step samples."""
    _bias_and_ban(logits_LV, rows, upload)
    picked = [i for i, row in enumerate(rows) if _has_penalty(row)]
    if picked:
        _penalise(logits_LV, picked, [rows[i] for i in picked], sampled_L, upload)


def _has_bias_or_ban(row: Sequence) -> bool:
    return bool(row.submit.sampling.logit_bias) or row.num_output < row.submit.min_tokens


def _has_penalty(row: Sequence) -> bool:
    sampling = row.submit.sampling
    return bool(sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty)


def _bias_and_ban(logits_LV: Tensor, rows: Rows[Sequence], upload: Upload) -> None:
    vocabulary = logits_LV.shape[1]
    biased: list[int] = []
    amounts: list[float] = []
    banned: list[int] = []
    for i, row in enumerate(rows):
        bias = row.submit.sampling.logit_bias
        if bias:
            biased += [i * vocabulary + token for token in bias]
            amounts += bias.values()
        if row.num_output < row.submit.min_tokens:
            banned += [i * vocabulary + token for token in row.submit.stop_token_ids]
    flat = logits_LV.view(-1)
    if biased:
        flat.index_add_(0, upload(np.array(biased)), upload(np.array(amounts, dtype=np.float32)))
    if banned:
        flat.index_fill_(0, upload(np.array(banned)), -torch.inf)


def _penalise(
    logits_LV: Tensor, picked: list[int], rows: list[Sequence], sampled_L: Tensor | None, upload: Upload
) -> None:
    place_J = upload(np.array(picked))
    x_JV = logits_LV.index_select(0, place_J)
    in_prompt_JV = _occurrences(x_JV, [row.tokens[: row.num_prompt] for row in rows], upload)
    in_output_JV = _occurrences(x_JV, [row.tokens[row.num_prompt : row.num_known] for row in rows], upload)
    pending = [j for j, row in enumerate(rows) if row.pending]
    if pending:
        assert sampled_L is not None, "a token is pending, and no step runs"
        token_P = sampled_L.index_select(0, upload(np.array([rows[j].pending_row for j in pending])))
        at_P = upload(np.array(pending) * x_JV.shape[1]) + token_P
        in_output_JV.view(-1).index_add_(0, at_P, torch.ones_like(at_P, dtype=torch.float32))
    settings = [row.submit.sampling for row in rows]
    repetition_J1, presence_J1, frequency_J1 = (
        upload(np.array(values, dtype=np.float32)[:, None])
        for values in (
            [s.repetition_penalty for s in settings],
            [s.presence_penalty for s in settings],
            [s.frequency_penalty for s in settings],
        )
    )
    seen_JV = (in_prompt_JV + in_output_JV) > 0
    x_JV = torch.where(seen_JV, torch.where(x_JV > 0, x_JV / repetition_J1, x_JV * repetition_J1), x_JV)
    x_JV = x_JV - ((in_output_JV > 0) * presence_J1 + in_output_JV * frequency_J1)
    logits_LV.index_copy_(0, place_J, x_JV)


def _occurrences(x_JV: Tensor, tokens: list[list[int]], upload: Upload) -> Tensor:
    """How often each token of the vocabulary occurs in each row's tokens, float32."""
    counts_JV = torch.zeros_like(x_JV)
    lengths = [len(row) for row in tokens]
    flat = np.fromiter(chain.from_iterable(tokens), np.int64, sum(lengths))
    flat += np.repeat(np.arange(len(tokens)) * x_JV.shape[1], lengths)
    counts_JV.view(-1).index_add_(0, upload(flat), torch.ones(len(flat), device=x_JV.device))  # whole numbers: exact
    return counts_JV
