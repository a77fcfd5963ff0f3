"""Attention on CPUs that multiply pairs of bfloat16: as exact as its rounding, and each row is independent of the
others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moiety_kernels.cpu import paths
from moiety_kernels.kv_store.caches import LayerCache
from moiety_kernels.paged_attention import cpu_pairs, paged_attention
from moiety_kernels.paged_attention.inputs import AttentionMetadata, AttentionParameters
from moiety_kernels.paged_attention.reference import paged_attention as reference

HALF_A_STEP = 2.0**-8  # of bfloat16, relative
SUMMING = 1e-4  # what float32 sums and powers may add to it


@pytest.fixture(autouse=True)
def in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not paths.is_usable(paths.PAIRS):
        pytest.skip("this processor does not multiply in pairs: test_emulated.py runs this with that emulated")
    monkeypatch.setattr(paths, "is_usable", lambda path: path is not paths.TILES)
    torch.manual_seed(0)


Inputs = tuple[Tensor, LayerCache, AttentionMetadata]


def attend(inputs: Inputs, scale: float, *, rounds: bool = True, **options: Any) -> Tensor:
    return paged_attention(*inputs, AttentionParameters(scale, **options, rounds=rounds))


def rounded(inputs: Inputs) -> Inputs:
    """Queries, keys and values as the nearest bfloat16, in float32."""
    q, cache, metadata = inputs
    q, k, v = (one.bfloat16().float() for one in (q, cache.k_NGPd, cache.v_NGPd))
    return q, LayerCache(k, v), metadata


def is_rounding_of_weights(ours: Tensor, inputs: Inputs, parameters: AttentionParameters) -> bool:
    """Whether what differs is at most what rounding each weight to bfloat16 can make of rounded keys and values."""
    q, cache, metadata = rounded(inputs)
    positive = LayerCache(cache.k_NGPd, cache.v_NGPd.abs())
    expected, bound = (reference(q, one, metadata, parameters) for one in (cache, positive))
    return bool(((ours - expected).abs() <= (HALF_A_STEP + SUMMING) * bound).all())


@pytest.mark.parametrize("window", [None, 1, 37])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(4, 4, 32), (16, 4, 64), (7, 1, 96), (6, 2, 160), (4, 1, 256)]
)
@pytest.mark.parametrize("places", [16, 5])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_nothing_is_lost_but_by_rounding(
    paged: Any, heads: int, kv_heads: int, width: int, places: int, window: int | None, with_sinks: bool, kept: Any
) -> None:
    inputs = paged([1, 1, 7, 130, 40, 3], [1, 300, 7, 150, 290, 129], heads, kv_heads, width, places)
    sinks = 3 * torch.randn(heads) if with_sinks else None
    q, cache, metadata = inputs
    in_cache = q, LayerCache(cache.k_NGPd.to(kept), cache.v_NGPd.to(kept)), metadata
    ours = attend(in_cache, width**-0.5, window=window, sinks_H=sinks)
    assert is_rounding_of_weights(ours, inputs, AttentionParameters(width**-0.5, window, sinks))
    assert not torch.equal(ours, attend(in_cache, width**-0.5, window=window, sinks_H=sinks, rounds=False))


def test_rounding_is_not_done_unasked_nor_beside_tiles(paged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = paged([40], [290], 4, 2, 64, 16)
    exact = attend(inputs, 0.125, rounds=False)
    assert (exact - reference(*inputs, AttentionParameters(0.125))).abs().max() < 2e-5
    monkeypatch.setattr(paths, "is_usable", lambda path: True)
    assert torch.equal(attend(inputs, 0.125), exact)


def test_a_cache_of_bfloat16_gives_the_bits_of_one_of_float32(paged: Any) -> None:
    q, cache, metadata = paged([1, 130], [300, 290], 8, 2, 64, 16)
    narrow = LayerCache(cache.k_NGPd.bfloat16(), cache.v_NGPd.bfloat16())
    assert torch.equal(attend((q, cache, metadata), 0.125), attend((q, narrow, metadata), 0.125))


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("cuts", [[1, 299], [299, 1], [100, 200], [128, 128, 44], [7] * 42 + [6], [1] * 300])
def test_a_rows_bits_do_not_depend_on_how_its_prompt_is_cut(paged: Any, cuts: list[int], window: int | None) -> None:
    q, cache, metadata = inputs = paged([300], [300], 6, 2, 64, 16)
    whole, done, parts = attend(inputs, 0.125, window=window), 0, []
    for count in cuts:
        start, context = (torch.tensor(one, dtype=torch.int32) for one in ([0, count], [done + count]))
        chunk = AttentionMetadata(start, context, metadata.block_table_SB, count, done + count)
        parts.append(attend((q[done : done + count], cache, chunk), 0.125, window=window))
        done += count
    assert torch.equal(torch.cat(parts), whole)


def test_a_rows_bits_do_not_depend_on_how_many_a_task_takes(paged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = paged([1, 70, 200], [300, 290, 200], 8, 2, 64, 16)
    together = attend(inputs, 0.125)
    for most in (8, 36, 256):
        monkeypatch.setattr(cpu_pairs, "rows_at_once", lambda *_, most=most: most)
        assert torch.equal(attend(inputs, 0.125), together)


@pytest.mark.parametrize("factor", [300, 1e4])
def test_large_scores_are_survived(paged: Any, factor: float) -> None:
    q, *rest = paged([3], [200], 4, 2, 32, 16)
    inputs = factor * q, *rest
    assert (attend(inputs, 1.0) - reference(*rounded(inputs), AttentionParameters(1.0))).abs().max() < 0.02


def test_nan_stays_nan_in_attention_by_pairs(paged: Any) -> None:
    inputs = paged([20], [90], 4, 2, 32, 16)
    inputs[0][7, 3, 5] = float("nan")
    ours = attend(inputs, 1.0)
    assert ours[7, 3].isnan().all()
    assert ours.isnan().sum() == 32


def test_heads_of_widths_that_are_not_packed_are_attended_with_floats(paged: Any) -> None:
    inputs = paged([40], [290], 4, 2, 48, 16)
    assert not cpu_pairs.takes(48, 48, 2)
    assert torch.equal(attend(inputs, 0.125), attend(inputs, 0.125, rounds=False))
