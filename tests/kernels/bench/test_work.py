"""What a layer must do at least: by hand, and as the project's floors for one H200 have it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moiety_kernels.bench import work
from moiety_kernels.bench.clocks import CallFailed
from moiety_kernels.bench.others import OPERATIONS
from moiety_kernels.bench.routings import draw_logits, popularity, spec_of
from moiety_kernels.bench.run import checked_difference
from moiety_kernels.bench.shapes import RECURRENCES, ROUTINGS, SHAPES, LayerShape, RecurrenceShape
from moiety_kernels.bench.work import Speeds, expected_active, floor_s
from moiety_kernels.gpu.targets import H200
from moiety_kernels.route.reference import route

ON_H200 = Speeds(H200.memory_bytes_per_s, H200.flops_bf16)
TINY = LayerShape("tiny", 4, 2, width=8, hidden=16, heads=4, kv_heads=2, head_width=8, vocabulary=32)
RECURRENT = replace(
    TINY,
    recurrences={
        "gated_delta": RecurrenceShape(1, 2, width=3, value_width=5),
        "kimi_delta": RecurrenceShape(2, 2, width=3, value_width=3, gates=3),
        "mamba2": RecurrenceShape(1, 2, width=3, value_width=5),
        "lightning_attention": RecurrenceShape(2, 2, width=3, value_width=3),
    },
)
FLOORS_US = {
    "Mixtral-8x7B": (164, 658, 913, 14614),
    "OLMoE": (23, 189, 211, 2088),
    "Qwen3-30B-A3B": (18, 278, 302, 1566),
    "Qwen3-235B": (70, 1108, 1167, 6263),
    "DeepSeek-V3": (164, 4561, 5314, 14614),
    "gpt-oss-20b": (46, 372, 392, 4128),
}


@pytest.mark.parametrize("name", FLOORS_US)
def test_floors_are_those_that_targets_were_set_by(name: str) -> None:
    shape = SHAPES[name]
    found = []
    for tokens in (1, 64, 1024, 16384):
        active = expected_active(shape.num_experts, shape.top_k, tokens)
        found.append(1e6 * floor_s(work.moe_layer(shape, tokens, active), ON_H200))
    assert found == pytest.approx(FLOORS_US[name], abs=0.5)


def test_an_expert_layer_by_hand() -> None:
    least = work.moe_layer(TINY, tokens=3, active=4)
    assert least.flops == 6 * (3 * 8 * 16 * 2)  # six rows, three matrices of 8 × 16, a multiplication and an addition
    assert least.bytes == 2 * (4 * 3 * 8 * 16) + 2 * 6 * (8 + 16 + 16 + 8)
    assert work.is_bound_by_memory(least, ON_H200)


def test_attention_by_hand() -> None:
    decode = work.attention_decode(TINY, sequences=2, context=5)
    assert decode.flops == 2 * (2 * 2 * 4 * 5 * 8)  # scores and values of 2 sequences, 4 heads, 5 positions
    assert decode.bytes == 2 * (2 * 2 * 2 * 5 * 8) + 2 * (2 * 2 * 4 * 8)
    prefill = work.attention_prefill(TINY, tokens=3)
    assert prefill.flops == 2 * 2 * 4 * 8 * (1 + 2 + 3)
    assert prefill.bytes == 2 * (2 * 3 * 4 * 8 + 2 * 3 * 2 * 8)


def test_recurrences_by_hand() -> None:
    """Of 7 tokens in 2 sequences: 2 value heads, whose states have 3 rows of 5 or of 3."""
    delta = work.recurrence("gated_delta", RECURRENT, tokens=7, states=2)
    assert delta.flops == 3 * 2 * 7 * (2 * 3 * 5)  # recall, correct and read
    rows = 7 * (3 + 3 + 2 * 5 + 2 * 5)  # one key head's query and key, values and outputs
    assert delta.bytes == 2 * rows + 4 * 7 * 2 * (1 + 1) + 2 * 4 * 2 * (2 * 3 * 5)
    kimi = work.recurrence("kimi_delta", RECURRENT, tokens=7, states=2)
    assert kimi.bytes == 2 * 7 * 4 * (2 * 3) + 4 * 7 * 2 * (3 + 1) + 2 * 4 * 2 * (2 * 3 * 3)
    mamba = work.recurrence("mamba2", RECURRENT, tokens=7, states=2)
    assert mamba.flops == 2 * 2 * 7 * (2 * 3 * 5)  # write and read
    assert mamba.bytes == 2 * rows + 4 * 7 * 2 + 2 * 4 * 2 * (2 * 3 * 5)
    lightning = work.recurrence("lightning_attention", RECURRENT, tokens=7, states=2, dtype="float32")
    assert lightning.bytes == 4 * 7 * 4 * (2 * 3) + 4 * 7 * 2 + 2 * 4 * 2 * (2 * 3 * 3)


@pytest.mark.parametrize("kind", RECURRENCES)
def test_each_recurrence_is_measured_with_the_widths_of_a_model(kind: str) -> None:
    """And with those of the small layer, whose calls run here."""
    with_it = [name for name, shape in SHAPES.items() if kind in shape.recurrences]
    assert len(with_it) == 2 and "moiety-demo" in with_it
    shape, cpu = SHAPES["moiety-demo"], torch.device("cpu")
    for part, tokens in (("decode", 3), ("prefill", 256)):
        operation = OPERATIONS[f"{kind}_{part}"]
        assert operation.tokens(shape, tokens) and not operation.tokens(TINY, tokens)
        point = operation.make(shape, tokens, cpu)
        assert torch.as_tensor(point.ours()).isfinite().all()
        assert point.work.bytes < operation.bytes(shape, tokens) < 20 * point.work.bytes


def test_rows_and_scores_by_hand() -> None:
    assert work.rms_norm(TINY, 3, add=False).bytes == 2 * (2 * 3 * 8) + 4 * 8
    assert work.rms_norm(TINY, 3, add=True).bytes == 2 * (4 * 3 * 8) + 4 * 8
    assert work.linear(3, 5, 7).bytes == 2 * (5 * 7 + 3 * 7 + 3 * 5)
    assert work.linear(3, 5, 7).flops == 2 * (3 * 5 * 7)
    assert work.sample(TINY, 3).bytes == 4 * (3 * 32)
    assert work.moe_layer(TINY, 3, 2).bytes - work.moe_layer(TINY, 3, 2, dtype="float8").bytes == (
        2 * 3 * TINY.width * TINY.hidden
    )
    assert work.route(TINY, 3).bytes == 4 * (3 * 4) + (4 + 4) * (3 * 2)


def test_the_larger_of_both_times_is_the_floor() -> None:
    speeds = Speeds(memory_bytes_per_s=10.0, flops_per_s=100.0)
    assert floor_s(work.Work(flops=100.0, bytes=20.0), speeds) == 2.0
    assert floor_s(work.Work(flops=300.0, bytes=20.0), speeds) == 3.0
    assert floor_s(work.Work(flops=300.0, bytes=10.0), work.in_float8(speeds)) == 1.5


@pytest.mark.parametrize("routing", ROUTINGS)
def test_drawn_scores_send_each_expert_its_share(routing: str) -> None:
    """With one expert a token the share is the popularity itself; with more, a token's experts differ."""
    generator = torch.Generator().manual_seed(1)
    logits_TE = draw_logits(routing, 20_000, 16, generator)
    counts_E = torch.bincount(logits_TE.argmax(dim=1), minlength=16).sort(descending=True).values
    assert torch.allclose(counts_E.double() / 20_000, popularity(routing, 16), atol=0.015)
    _, expert_TK = route(logits_TE[:100], spec_of(SHAPES["moiety-demo"]))
    assert all(len(set(row)) == 2 for row in expert_TK.tolist())
    assert torch.equal(logits_TE, draw_logits(routing, 20_000, 16, torch.Generator().manual_seed(1)))


def test_a_wrong_result_has_no_time() -> None:
    right = torch.randn(16, 16)
    assert checked_difference(right * 1.01, right, 0.03) == pytest.approx(0.01, abs=1e-4)
    for wrong in (right * 1.1, torch.zeros(16, 16), torch.full((16, 16), torch.nan)):
        with pytest.raises(CallFailed, match="differs from torch's"):
            checked_difference(wrong, right, 0.03)


def test_a_skewed_draw_has_a_long_tail() -> None:
    share_E = popularity("zipf", 128)
    assert share_E[0] / share_E[9] == pytest.approx(10**1.2)
    assert share_E.sum() == pytest.approx(1.0)
