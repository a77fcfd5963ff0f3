"""Token rules of requests: the only tokens that are allowed, and runs of tokens that must not occur.

They are applied after the masks of grammars. A rule that leaves a row no token is not applied to that token, so an
output keeps its grammar first, then its allowed tokens, then its banned runs.

L rows, J rows with rules, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from moiety_engine.sampling.rows import Row
from moiety_engine.sequence import PENDING
from moiety_engine.staging import Upload
from moiety_wire.messages import TokenRules


def has_token_rules(row: Row) -> bool:
    return row.request.submit.sampling.token_rules is not None


def apply_token_rules(logits_LV: Tensor, rows: Rows[Row], sampled_L: Tensor | None, upload: Upload) -> None:
    """Apply the token rules of all rows that have some, in place.

    `sampled_L`: tokens that the running step samples, on which banned runs may depend.
    """
    places = [i for i, row in enumerate(rows) if has_token_rules(row)]
    if not places:
        return
    ruled = [rows[i] for i in places]
    rows_J = upload(np.array(places))
    logits_JV = logits_LV.index_select(0, rows_J)
    logits_JV = _keep_allowed(logits_JV, ruled, upload)
    logits_JV = _ban_runs(logits_JV, ruled, sampled_L, upload)
    logits_LV.index_copy_(0, rows_J, logits_JV)


def _keep_allowed(logits_JV: Tensor, rows: Rows[Row], upload: Upload) -> Tensor:
    """Return the logits with all but the allowed tokens banned, in the rows that have allowed tokens."""
    vocab_size = logits_JV.shape[1]
    allowed = [_rules_of(row).allowed_ids for row in rows]
    if not any(allowed):
        return logits_JV
    at = upload(np.array([j * vocab_size + one for j, ids in enumerate(allowed) for one in ids]))
    kept_JV = torch.full_like(logits_JV, -torch.inf)
    kept_JV.view(-1).index_copy_(0, at, logits_JV.view(-1).index_select(0, at))
    return _unless_empty(kept_JV, logits_JV)  # a row without allowed tokens is empty


def _ban_runs(logits_JV: Tensor, rows: Rows[Row], sampled_L: Tensor | None, upload: Upload) -> Tensor:
    """Return the logits with the tokens banned that would complete a banned run."""
    vocab_size = logits_JV.shape[1]
    banned: list[int] = []
    on_pending: list[tuple[int, int, int]] = []  # (banned place, row of the running step's samples, its token)
    for j, row in enumerate(rows):
        runs = _rules_of(row).banned_runs
        recent = row.recent_output(max(map(len, runs), default=1) - 1)
        for *before, last in runs:
            if len(recent) < len(before):
                continue
            pairs = zip(before, recent[len(recent) - len(before) :], strict=True)
            missing = [(wanted, found) for wanted, found in pairs if wanted != found]
            if not missing:
                banned.append(j * vocab_size + last)
            elif len(missing) == 1 and missing[0][1] == PENDING:
                on_pending.append((j * vocab_size + last, row.pending_row, missing[0][0]))
    if not banned and not on_pending:
        return logits_JV
    left_JV = logits_JV.clone()
    if banned:
        left_JV.view(-1).index_fill_(0, upload(np.array(banned)), -torch.inf)
    if on_pending:
        assert sampled_L is not None, "a token is pending but no step is running"
        at, samples, tokens = (upload(np.array(part)) for part in zip(*on_pending, strict=True))
        is_completed = sampled_L.index_select(0, samples) == tokens
        amounts = torch.where(is_completed, -torch.inf, 0.0).to(left_JV.dtype)
        left_JV.view(-1).index_add_(0, at, amounts)  # a place may occur twice
    return _unless_empty(left_JV, logits_JV)


def _unless_empty(ruled_JV: Tensor, before_JV: Tensor) -> Tensor:
    """Return the rows after a rule, or before it where it leaves no token."""
    return torch.where(ruled_JV.amax(dim=-1, keepdim=True) > -torch.inf, ruled_JV, before_JV)


def _rules_of(row: Row) -> TokenRules:
    rules = row.request.submit.sampling.token_rules
    assert rules is not None, "only rows with rules are passed"
    return rules
