"""Attention to a sliding window and to compressed entries, one for several tokens, and the pooling of these entries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require, require_shape
from moiety_kernels.compressed_attention import reference
from moiety_kernels.compressed_attention.runs import Entries, TokenRuns
from moiety_kernels.lazy_imports import lazy_import

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Entries", "TokenRuns", "compressed_attention", "pool_windows", "update_history"]

_cpu = lazy_import(__name__, "cpu")


def pool_windows(
    rows_TC: Tensor, bias_mC: Tensor, history_NwC: Tensor, runs: TokenRuns, token_E: Tensor, *, overlaps: bool
) -> Tensor:
    """Return entry_Ed, the pooled entries of the windows that end with the tokens `token_E` (int64), in rows' dtype.

    A row has a token's values, then its gates: each one series of width d, or, if the windows overlap, two. `bias_mC`,
    float32, is added to the gates of the token at each place of a window of m tokens. `history_NwC` has the rows of
    earlier positions, with w = m, or 2m if the windows overlap.
    """
    rate, columns = bias_mC.shape
    require_shape("rows", rows_TC, (-1, 2 * columns))
    require_shape("history", history_NwC, (-1, rate * (2 if overlaps else 1), 2 * columns))
    require(columns % (2 if overlaps else 1) == 0, "two series have one width")
    require(bias_mC.dtype is torch.float32 and token_E.dtype is torch.int64, "biases are float32, tokens int64")
    runs.check(rows_TC.shape[0])
    if rows_TC.is_cpu and len(token_E) and _cpu().fits(rows_TC, bias_mC, history_NwC):
        fast: Tensor = _cpu().pool_windows(rows_TC, bias_mC, history_NwC, runs, token_E, overlaps=overlaps)
        return fast
    return reference.pool_windows(rows_TC, bias_mC, history_NwC, runs, token_E, overlaps=overlaps)


def compressed_attention(
    q_THd: Tensor,
    row_Td: Tensor,
    history_NWd: Tensor,
    runs: TokenRuns,
    entries: Entries | None,
    scale: float,
    sinks_H: Tensor,
) -> Tensor:
    """Return out_THd: each query's attention to the rows of the last W positions, its own included, and to its entries.

    `row_Td` has the rows of the queries' positions, `history_NWd` those before the step. `entries`: None if there are
    none. `sinks_H`, float32: a score per head that takes its share of the softmax and adds nothing.
    """
    tokens, heads, width = q_THd.shape
    require_shape("row", row_Td, (tokens, width))
    require_shape("history", history_NWd, (-1, -1, width))
    require_shape("sinks", sinks_H, (heads,))
    require(scale > 0, "scale must be positive")
    require(sinks_H.dtype is torch.float32, "sinks must be float32")
    runs.check(tokens)
    if entries is not None:
        entries.check(tokens, width)
    if q_THd.is_cpu and _cpu().fits_attention(q_THd, row_Td, history_NWd, entries):
        fast: Tensor = _cpu().compressed_attention(q_THd, row_Td, history_NWd, runs, entries, scale, sinks_H)
        return fast
    return reference.compressed_attention(q_THd, row_Td, history_NWd, runs, entries, scale, sinks_H)


def update_history(rows_TC: Tensor, history_NwC: Tensor, runs: TokenRuns) -> None:
    """Store the last w rows of each run in its ring: the row of position p at p mod w."""
    require_shape("history", history_NwC, (-1, -1, rows_TC.shape[1]))
    runs.check(rows_TC.shape[0])
    reference.update_history(rows_TC, history_NwC, runs)
