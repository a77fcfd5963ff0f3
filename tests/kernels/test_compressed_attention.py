"""Pooled entries and attention to them are DeepSeek-V4's, and on a CPU those of the definition, however cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moiety_kernels.checks import KernelInputError
from moiety_kernels.compressed_attention import (
    Entries,
    TokenRuns,
    compressed_attention,
    pool_windows,
    reference,
    update_history,
)

from .compressed import closing, entries, history, runs

SCALE = 0.2

pytestmark = pytest.mark.usefixtures("several_threads")


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(0)


def one_run(begin: int, count: int) -> TokenRuns:
    return TokenRuns(
        torch.zeros(count, dtype=torch.int32),
        torch.arange(begin, begin + count),
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([0]),
    )


@pytest.mark.parametrize(("rate", "width", "overlaps"), [(4, 48, True), (8, 32, False), (3, 20, True)])
def test_on_a_cpu_entries_are_the_references(rate: int, width: int, overlaps: bool) -> None:
    of, columns = runs(), width * (2 if overlaps else 1)
    rows, bias = torch.randn(len(of.run_T), 2 * columns) * 2, torch.randn(rate, columns)
    before, tokens = history(rate * (2 if overlaps else 1), 2 * columns), closing(of, rate)
    assert len(tokens) > 3
    ours = pool_windows(rows, bias, before, of, tokens, overlaps=overlaps)
    torch.testing.assert_close(
        ours, reference.pool_windows(rows, bias, before, of, tokens, overlaps=overlaps), rtol=1e-5, atol=1e-6
    )


def layers() -> Any:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4

    return modeling_deepseek_v4


@pytest.mark.parametrize("overlaps", [True, False])
def test_pooling_is_deepseek_v4s(overlaps: bool) -> None:
    from transformers import DeepseekV4Config

    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6}
    config = DeepseekV4Config(
        hidden_size=32, head_dim=16, num_hidden_layers=2, compress_rates=rates, index_head_dim=16, q_lora_rank=8
    )
    kind = layers().DeepseekV4CSACompressor if overlaps else layers().DeepseekV4HCACompressor
    theirs, x, count = kind(config), torch.randn(30, 32), 30
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
        for name in {"kv_norm", "rotary_emb", "indexer"} & dict(theirs.named_children()).keys():
            delattr(theirs, name)  # entries are compared as they are pooled
        theirs.kv_norm = torch.nn.Identity()
        theirs.rotary_emb = lambda rows, **_: (torch.ones(1, rows.shape[1], 1), torch.zeros(1, rows.shape[1], 1))
        theirs.indexer = lambda *_: torch.zeros(1, count, 1, dtype=torch.int64)
        expected = theirs(x[None], None, torch.arange(count)[None], None, 0)[0][0, 0]
        rows, of, rate = (
            torch.cat((theirs.kv_proj(x), theirs.gate_proj(x)), dim=1),
            one_run(0, count),
            4 if overlaps else 6,
        )
        before = torch.full((1, rate * (2 if overlaps else 1), rows.shape[1]), float("nan"))
        ours = pool_windows(rows, theirs.position_bias, before, of, closing(of, rate), overlaps=overlaps)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width", "window"), [(3, 32, 8), (64, 48, 5)])
def test_on_a_cpu_attention_is_the_references(heads: int, width: int, window: int, dtype: torch.dtype) -> None:
    of = runs()
    q, row, sinks = torch.randn(len(of.run_T), heads, width), torch.randn(len(of.run_T), width), torch.randn(heads)
    before = history(window, width)
    for seen in (entries(of, width, dtype), None):
        args = q, row, before, of, seen, SCALE, sinks
        torch.testing.assert_close(
            compressed_attention(*args), reference.compressed_attention(*args), rtol=1e-4, atol=1e-5
        )


def test_the_definition_of_attention_is_deepseek_v4s() -> None:
    count, heads, width, window = 20, 4, 16, 6
    q, row, sinks, of = (
        torch.randn(count, heads, width),
        torch.randn(count, width),
        torch.randn(heads),
        one_run(0, count),
    )
    pool = torch.randn(5, 1, width)
    num_entries = ((of.position_T + 1) // 4).int()
    seen = Entries(pool, torch.arange(5, dtype=torch.int32).expand(count, 5).contiguous(), num_entries)
    before = torch.full((1, window, width), float("nan"))
    ours = reference.compressed_attention(q, row, before, of, seen, SCALE, sinks)
    apart = of.position_T[:, None] - of.position_T
    hidden = torch.cat(((apart < 0) | (apart >= window), torch.arange(5) >= num_entries[:, None]), dim=1)
    mask = torch.zeros(count, count + 5).masked_fill(hidden, -torch.inf)
    keys = torch.cat((row, pool[:, 0]))[None, None]
    module = SimpleNamespace(num_key_value_groups=heads, sinks=sinks, training=False)
    theirs, _ = layers().eager_attention_forward(module, q.transpose(0, 1)[None], keys, keys, mask[None, None], SCALE)
    torch.testing.assert_close(ours, theirs[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_the_bits_do_not_depend_on_how_a_sequence_is_cut(chunk: int) -> None:
    count, width, window, rate = 50, 32, 7, 4
    rows, bias = torch.randn(count, 4 * width), torch.randn(rate, 2 * width)
    q, row, sinks = torch.randn(count, 5, width), torch.randn(count, width), torch.randn(5)

    def computed(at_once: int) -> tuple[Tensor, Tensor]:
        pooled, attended = [], []
        of_window, of_pool = (
            torch.full((1, window, width), float("nan")),
            torch.full((1, 2 * rate, 4 * width), float("nan")),
        )
        for begin in range(0, count, at_once):
            some = slice(begin, min(count, begin + at_once))
            of = one_run(begin, some.stop - begin)
            pooled.append(pool_windows(rows[some], bias, of_pool, of, closing(of, rate), overlaps=True))
            attended.append(compressed_attention(q[some], row[some], of_window, of, None, SCALE, sinks))
            update_history(rows[some], of_pool, of)
            update_history(row[some], of_window, of)
        return torch.cat(pooled), torch.cat(attended)

    for whole, cut in zip(computed(count), computed(chunk), strict=True):
        assert torch.equal(whole, cut)


def test_the_newest_rows_of_a_run_replace_the_oldest_and_other_rings_stay() -> None:
    of, size = runs(), 8
    rows, ring = torch.randn(len(of.run_T), 16), history(size, 16)
    expected = ring.clone()
    for t, (run, position) in enumerate(zip(of.run_T.tolist(), of.position_T.tolist(), strict=True)):
        expected[of.slot_R[run], position % size] = rows[t]
    update_history(rows, ring, of)
    assert torch.equal(ring.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.isnan(ring[4]).all()


def test_a_history_of_another_length_is_refused() -> None:
    of = runs()
    with pytest.raises(KernelInputError, match="history has shape"):
        pool_windows(
            torch.randn(len(of.run_T), 64), torch.randn(4, 32), history(4, 64), of, closing(of, 4), overlaps=True
        )
