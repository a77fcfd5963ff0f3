"""Checks of the CPU kernels for DeepSeek-V4, compressed attention and hyper-connections, against their references."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moiety_kernels.compressed_attention import reference as compressed_reference
from moiety_kernels.hyper_connections import reference as hyper_reference

from . import compressed


def assert_close(ours: Tensor, theirs: Tensor, ratio: float = 1e-5) -> None:
    """Assert that values agree; NaN never does."""
    assert (ours.float() - theirs.float()).abs().max() <= ratio * theirs.float().abs().max().clamp(min=0.1)


def connects_streams(kernel: ModuleType, _: Any) -> None:
    logits, scale, base = 3 * torch.randn(30, 24), torch.rand(3) + 0.5, torch.randn(24)
    mixtures = kernel.mixture_weights(logits, scale, base, 4, 3, 1e-6)
    for ours, theirs in zip(mixtures, hyper_reference.mixture_weights(logits, scale, base, 4, 3, 1e-6), strict=True):
        assert_close(ours, theirs)
    streams, output = torch.randn(30, 4, 48), torch.randn(30, 48)
    pre, post, comb = hyper_reference.mixture_weights(logits, scale, base, 4, 3, 1e-6)
    assert post is not None and comb is not None
    assert_close(kernel.collapse_streams(streams, pre), hyper_reference.collapse_streams(streams, pre))
    expanded = hyper_reference.expand_streams(streams, output, post, comb)
    assert_close(kernel.expand_streams(streams, output, post, comb), expanded)


def compresses(kernel: ModuleType, _: Any) -> None:
    of = compressed.runs()
    tokens = len(of.run_T)
    for overlaps in (True, False):
        columns, size = (64, 8) if overlaps else (32, 4)
        args = torch.randn(tokens, 2 * columns), torch.randn(4, columns), compressed.history(size, 2 * columns), of
        closing = compressed.closing(of, 4)
        expected = compressed_reference.pool_windows(*args, closing, overlaps=overlaps)
        assert_close(kernel.pool_windows(*args, closing, overlaps=overlaps), expected)
    q, row, sinks = torch.randn(tokens, 3, 32), torch.randn(tokens, 32), torch.randn(3)
    for dtype in (torch.float32, torch.bfloat16):
        seen = q, row, compressed.history(6, 32), of, compressed.entries(of, 32, dtype), 0.2, sinks
        assert_close(kernel.compressed_attention(*seen), compressed_reference.compressed_attention(*seen))
