"""Token masks of structured outputs, applied to all rows with a grammar at once.

J rows with a grammar, L rows, V vocabulary, W words of 32 tokens each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moiety_engine.staging import Upload


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Bit mask of allowed tokens, lowest bit of a word first.

    For a CPU the mask is expanded to `banned_JV` before the step needs it.
    """

    rows: list[int]  # of the logits, ascending
    words_JW: np.ndarray  # int32
    banned_JV: np.ndarray | None = None  # bool


def write_out(words_JW: np.ndarray, banned_JV: np.ndarray) -> None:
    """Expand the bit masks to bools of banned tokens; tokens beyond the masks' width are banned."""
    bits = np.unpackbits(words_JW.view(np.uint8), axis=1, bitorder="little")
    width = min(banned_JV.shape[1], bits.shape[1])
    np.equal(bits[:, :width], 0, out=banned_JV[:, :width])
    banned_JV[:, width:] = True


def ban_others(logits_LV: Tensor, allowed: TokenMasks, upload: Upload) -> None:
    """Ban all tokens that are not allowed, in place."""
    vocab_size = logits_LV.shape[1]
    if allowed.banned_JV is not None:
        banned_JV = torch.from_numpy(allowed.banned_JV)
    else:
        banned_JV = _written_out(upload(allowed.words_JW), vocab_size)
    if len(allowed.rows) == logits_LV.shape[0]:
        logits_LV.masked_fill_(banned_JV, -torch.inf)
        return
    rows_J = upload(np.array(allowed.rows))
    logits_LV.index_copy_(0, rows_J, logits_LV.index_select(0, rows_J).masked_fill(banned_JV, -torch.inf))


def _written_out(words_JW: Tensor, vocab_size: int) -> Tensor:
    """Expand the bit masks on a device, like `write_out`."""
    places = torch.arange(32, dtype=torch.int32, device=words_JW.device)
    banned_JV = ((words_JW[:, :, None] >> places) & 1 == 0).view(len(words_JW), -1)
    missing = vocab_size - banned_JV.shape[1]
    if missing > 0:
        return torch.nn.functional.pad(banned_JV, (0, missing), value=True)
    return banned_JV[:, :vocab_size]
