"""Definition of attention to a window and to compressed entries (DeepSeek-V4, 2026), and of the pooling of entries.

T tokens, H heads, d width of a row and of an entry, C columns, E entries, K entries of a query, N slots, w rows of a
history, W positions of a window, m tokens of an entry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.compressed_attention.runs import Entries, TokenRuns


def pool_windows(
    rows_TC: Tensor, bias_mC: Tensor, history_NwC: Tensor, runs: TokenRuns, token_E: Tensor, *, overlaps: bool
) -> Tensor:
    """Return entry_Ed, computed in float32, in rows' dtype."""
    rate, columns = bias_mC.shape
    span, width = history_NwC.shape[1], columns // (2 if overlaps else 1)
    entry_Ed = rows_TC.new_empty(len(token_E), width)
    for number, t in enumerate(token_E.tolist()):
        rows_SC, first = _last_rows(rows_TC, history_NwC, runs, t, span)
        place_S = torch.arange(first, first + len(rows_SC), device=rows_TC.device) % rate
        values_SC, gates_SC = torch.split(rows_SC.float(), columns, dim=1)
        gates_SC = gates_SC + bias_mC[place_S]
        if overlaps:  # the second series of the last m tokens, and the first series of those before
            values_SC, gates_SC = (
                torch.cat((both[:-rate, :width], both[-rate:, width:])) for both in (values_SC, gates_SC)
            )
        entry_Ed[number] = (values_SC * gates_SC.softmax(dim=0)).sum(dim=0).to(rows_TC.dtype)
    return entry_Ed


def compressed_attention(
    q_THd: Tensor,
    row_Td: Tensor,
    history_NWd: Tensor,
    runs: TokenRuns,
    entries: Entries | None,
    scale: float,
    sinks_H: Tensor,
) -> Tensor:
    """Return out_THd, computed in float32, in the queries' dtype."""
    out_THd = torch.empty_like(q_THd)
    counts = [0] * len(q_THd) if entries is None else entries.count_T.tolist()
    for t, count in enumerate(counts):
        seen_Kd = _last_rows(row_Td, history_NWd, runs, t, history_NWd.shape[1])[0].float()
        if entries is not None:
            entries_Kd = entries.pool_NEd.flatten(0, 1)[entries.slot_TK[t, :count].long()]
            seen_Kd = torch.cat((seen_Kd, entries_Kd.float()))
        scores_HK = torch.cat((q_THd[t].float() @ seen_Kd.T * scale, sinks_H[:, None]), dim=1)
        out_THd[t] = (scores_HK.softmax(dim=1)[:, :-1] @ seen_Kd).to(q_THd.dtype)
    return out_THd


def update_history(rows_TC: Tensor, history_NwC: Tensor, runs: TokenRuns) -> None:
    """Store the last w rows of each run."""
    size, run_T = history_NwC.shape[1], runs.run_T.long()
    token_T = torch.arange(len(rows_TC), device=rows_TC.device)
    kept_K = (token_T >= runs.run_start_R1[run_T + 1] - size).nonzero().squeeze(1)
    place_K = runs.slot_R[run_T[kept_K]] * size + runs.position_T[kept_K] % size
    history_NwC.flatten(0, 1).index_copy_(0, place_K, rows_TC[kept_K].to(history_NwC.dtype))


def _last_rows(rows_TC: Tensor, history_NwC: Tensor, runs: TokenRuns, t: int, most: int) -> tuple[Tensor, int]:
    """Return the rows of the last `most` positions up to token t's, and the first of these positions."""
    run, position = int(runs.run_T[t]), int(runs.position_T[t])
    begin, slot = int(runs.run_start_R1[run]), int(runs.slot_R[run])
    first, size = max(0, position - most + 1), history_NwC.shape[1]
    of_run = max(first, position - (t - begin))  # first position whose row is one of the step
    before_KC = history_NwC[slot, torch.arange(first, of_run, device=rows_TC.device) % size]
    return torch.cat((before_KC.to(rows_TC.dtype), rows_TC[t - (position - of_run) : t + 1])), first
