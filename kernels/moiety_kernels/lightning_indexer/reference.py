"""Definition of the lightning indexer (DeepSeek-V3.2-Exp, 2025), which selects the tokens that a query attends to.

T tokens, S sequences, B blocks per row, H index queries per token, I width of an index key, R rotated pairs, N blocks,
P slots per block, K most tokens that a query selects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.latent_input.reference import store_rows
from moiety_kernels.layer_norm.reference import layer_norm
from moiety_kernels.rope.reference import rope

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.lightning_indexer.norm import IndexKeyNorm
    from moiety_kernels.paged_attention.inputs import AttentionMetadata
    from moiety_kernels.rope.inputs import RotaryInputs


def store_index_keys(
    key_TI: Tensor, norm: IndexKeyNorm, rotary: RotaryInputs, keys_NPI: Tensor, slots_T: Tensor
) -> None:
    """Normalise the keys, rotate their first entries and store them in their slots."""
    normed_TI = layer_norm(key_TI, *norm)
    rotated_TI = rope(normed_TI.unsqueeze(1), *rotary).squeeze(1)
    store_rows(rotated_TI.to(keys_NPI.dtype), keys_NPI.flatten(0, 1), slots_T)


def select_tokens(
    q_THI: Tensor, weight_TH: Tensor, keys_NPI: Tensor, metadata: AttentionMetadata, width: int
) -> tuple[Tensor, Tensor]:
    """Return (slot_TK, count_T), both int32, with K = `width`: the slots of the tokens with the largest scores.

    The score of a token with index key k is Σ_h weight[h] · max(q_h · k, 0). A query sees the tokens up to its own. Of
    equal scores the earlier token is selected; a query that sees at most K tokens selects all. Slots are in the order
    of positions; after a row's count they are 0.
    """
    num_tokens, places = len(q_THI), keys_NPI.shape[1]
    slot_TK = torch.zeros(num_tokens, width, dtype=torch.int32, device=q_THI.device)
    count_T = torch.zeros(num_tokens, dtype=torch.int32, device=q_THI.device)
    starts = metadata.query_start_S1.tolist()
    for s, context in enumerate(metadata.context_len_S.tolist()):
        begin, end = starts[s], starts[s + 1]
        if begin == end:
            continue
        at_C = torch.arange(context, device=q_THI.device)
        slot_C = metadata.block_table_SB[s].long()[at_C // places] * places + at_C % places
        keys_CI = keys_NPI.flatten(0, 1)[slot_C].float()
        score_QHC = torch.einsum("qhi,ci->qhc", q_THI[begin:end].float(), keys_CI).relu()
        score_QC = torch.einsum("qh,qhc->qc", weight_TH[begin:end].float(), score_QHC) + 0.0  # no negative zero
        query_at = torch.arange(context - (end - begin), context, device=q_THI.device)[:, None]
        score_QC = score_QC.masked_fill(at_C > query_at, float("-inf"))
        best_QK = score_QC.sort(dim=1, descending=True, stable=True).indices[:, :width]
        for number, best_K in enumerate(best_QK):
            seen = context - (end - begin) + number + 1
            chosen = best_K[: min(seen, width)].sort().values
            slot_TK[begin + number, : len(chosen)] = slot_C[chosen].int()
            count_T[begin + number] = len(chosen)
    return slot_TK, count_T
