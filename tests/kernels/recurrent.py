"""Sequences of recurrent layers: some begin, some continue, one has no tokens, and slots are in no order."""

from __future__ import annotations

import torch
from torch import Tensor

from moiety_kernels.recurrent.inputs import RecurrentHeads, RecurrentSequences
from moiety_kernels.selective_scan.inputs import ScanInputs

QUERIES = [1, 1, 7, 150, 0, 3]
CONTINUES = [1, 0, 1, 0, 1, 1]
NUM_DECODE = 2
TOKENS = sum(QUERIES)


def sequences(device: str = "cpu") -> RecurrentSequences:
    starts = [0, *torch.tensor(QUERIES).cumsum(0).tolist()]
    return RecurrentSequences(
        torch.tensor([3, 0, 6, 1, 2, 4], device=device),
        torch.tensor(CONTINUES, dtype=torch.int32, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        max_query=max(QUERIES),
        num_decode=NUM_DECODE,
    )


def states(*shape: int, device: str = "cpu") -> Tensor:
    """Seven slots, NaN where no sequence has a state."""
    kept = torch.full((7, *shape), float("nan"))
    for slot, continues in zip(sequences().slot_S.tolist(), CONTINUES, strict=True):
        if continues:
            kept[slot] = torch.randn(*shape)
    return kept.to(device)


def delta_inputs(
    width: int, value_width: int, gates: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[RecurrentHeads, Tensor, Tensor]:
    """Queries, keys and values of two and four heads as parts of one row, gates and strengths."""
    q, k, v = (
        torch.randn(TOKENS, 4 * width + 4 * value_width + 16)
        .to(device, dtype)[:, 16:]
        .split([2 * width, 2 * width, 4 * value_width], dim=1)
    )
    log_decay, beta = -torch.rand(TOKENS, 4, gates, device=device) * 0.3, torch.rand(TOKENS, 4, device=device)
    heads = RecurrentHeads(q.view(-1, 2, width), k.view(-1, 2, width), v.view(-1, 4, value_width))
    return heads, log_decay, beta


def scan_inputs(channels: int, rows: int, dtype: torch.dtype, device: str = "cpu") -> ScanInputs:
    """Inputs of a selective scan, those of tokens as parts of one row, then rates, biases of steps and skips."""
    widths = [channels, channels, channels, rows, rows]
    of_tokens = torch.randn(TOKENS, sum(widths) + 16).to(device, dtype)[:, 16:].split(widths, dim=1)
    rate, bias, skip = -4 * torch.rand(rows, channels), torch.randn(channels), torch.randn(channels)
    bias[:2] = torch.tensor([30.0, -30.0])  # steps that are the input itself, and nearly nothing
    return ScanInputs(*of_tokens, rate.to(device), bias.to(device), skip.to(device))
