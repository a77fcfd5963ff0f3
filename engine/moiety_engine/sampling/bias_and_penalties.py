"""Logit bias, banned and forced tokens, and the inputs of penalties, applied to all rows that need them at once.

Past tokens are known on the host, except the token that the running step samples, which is on the device only.

L rows, V vocabulary, J rows with penalties.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from moiety_engine.sampling.rows import Row
from moiety_engine.sampling.thought_budget import limits_thoughts, thought_limit
from moiety_engine.staging import Upload
from moiety_kernels.sample import IN_PROMPT, Penalties


def has_bias_or_ban(row: Row) -> bool:
    return bool(row.request.submit.sampling.logit_bias) or _may_not_stop(row) or limits_thoughts(row)


def _may_not_stop(row: Row) -> bool:
    """Return whether stop tokens are banned because the row is below min_tokens.

    For a row with a grammar the grammar's mask does this, since the grammar may allow no other token.
    """
    return row.request.grammar is None and row.num_output < row.request.submit.min_tokens


def has_penalty(row: Row) -> bool:
    sampling = row.request.submit.sampling
    return bool(sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty)


def bias_and_ban(logits_LV: Tensor, rows: Rows[Row], upload: Upload) -> None:
    """Apply logit bias, ban stop tokens below min_tokens, and keep thought budgets, in place."""
    vocabulary = logits_LV.shape[1]
    biased: list[int] = []
    amounts: list[float] = []
    banned: list[int] = []
    forced: dict[int, int] = {}  # row: its only allowed token
    for i, row in enumerate(rows):
        bias = row.request.submit.sampling.logit_bias
        if bias:
            biased += [i * vocabulary + token for token in bias]
            amounts += bias.values()
        if _may_not_stop(row):
            banned += [i * vocabulary + token for token in row.request.submit.stop_token_ids]
        if limits_thoughts(row):
            limit = thought_limit(row)
            banned += [i * vocabulary + token for token in limit.banned]
            if limit.forced is not None:
                forced[i] = limit.forced
    flat = logits_LV.view(-1)
    if biased:
        flat.index_add_(0, upload(np.array(biased)), upload(np.array(amounts, dtype=np.float32)))
    if banned:
        flat.index_fill_(0, upload(np.array(banned)), -torch.inf)
    if forced:
        logits_LV.index_fill_(0, upload(np.array(list(forced))), -torch.inf)
        flat.index_fill_(0, upload(np.array([i * vocabulary + token for i, token in forced.items()])), 0.0)


def penalties(
    rows: Rows[Row], place_L: np.ndarray, vocab_size: int, sampled_L: Tensor | None, upload: Upload
) -> Penalties:
    """Return the penalties of `rows`, in their order.

    `place_L`, int32: index into `rows` of each row of a launch, -1 for rows without penalties. `sampled_L`: tokens that
    the running step samples.
    """
    in_prompt = upload(_places([row.request.submit.prompt_ids for row in rows], vocab_size))
    in_output = upload(_places([row.known_output for row in rows], vocab_size))
    seen_JV = torch.zeros(len(rows), vocab_size, dtype=torch.int32, device=in_prompt.device)
    seen_JV.view(-1).index_fill_(0, in_prompt, IN_PROMPT)
    seen_JV.view(-1).index_add_(0, in_output, torch.ones_like(in_output, dtype=torch.int32))
    pending = [j for j, row in enumerate(rows) if row.pending]
    if pending:
        assert sampled_L is not None, "a token is pending but no step is running"
        token = sampled_L.index_select(0, upload(np.array([rows[j].pending_row for j in pending])))
        at = upload(np.array(pending) * vocab_size) + token
        seen_JV.view(-1).index_add_(0, at, torch.ones_like(at, dtype=torch.int32))
    settings = [row.request.submit.sampling for row in rows]
    repetition_J, presence_J, frequency_J = (
        upload(np.array(values, dtype=np.float32))
        for values in (
            [s.repetition_penalty for s in settings],
            [s.presence_penalty for s in settings],
            [s.frequency_penalty for s in settings],
        )
    )
    return Penalties(upload(place_L), seen_JV, repetition_J, presence_J, frequency_J)


def _places(tokens: list[list[int]], vocab_size: int) -> np.ndarray:
    """Return the flat indices of the rows' tokens in a [rows, vocabulary] table."""
    lengths = [len(row) for row in tokens]
    flat = np.fromiter(chain.from_iterable(tokens), np.int64, sum(lengths))
    return flat + np.repeat(np.arange(len(tokens)) * vocab_size, lengths)
