"""A few tokens' products with weights of four bits agree with those of the weights that the bits stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.mutants import Edit, FailingMutant, mutants_by

from moiety_kernels.gpu.targets import H200
from moiety_kernels.grouped_gemm import kernel, reference, tile_cost_model
from moiety_kernels.grouped_gemm.kernels import four_rows, rows
from moiety_kernels.moe import RELU2, Activation
from moiety_kernels.quantization import INT4, MXFP4, dequantize, quantize
from moiety_kernels.quantization.weight import GPU_PACK
from moiety_kernels.route import group

CLIPPED = Activation("clipped", 0.5, 1.702)
FOUR_BITS = {"int4": replace(INT4, pack=GPU_PACK), "mxfp4": replace(MXFP4, pack=GPU_PACK)}
TOLERANCE: dict[str, Any] = {"rtol": 3e-3, "atol": 3e-3}
EXPERTS = 4
ROUTINGS: dict[str, Any] = {
    "spread": [[0, 2], [3, 1]],
    "one expert": [[2, 2]],
    "skewed, some elsewhere": [[3, -1], [3, 1], [-1, -1]],
}


def assert_up_agrees(
    name: str, width: int, columns: int, routing: list[list[int]], device: str, activation: Activation = CLIPPED
) -> None:
    """The first product of tokens that go to experts as `routing` says, one list a token. Rows are followed by NaN."""
    expert = torch.tensor(routing, dtype=torch.int32, device=device)
    tokens, top_k = expert.shape
    padded = torch.full((tokens, width + 5), float("nan"), dtype=torch.float16, device=device)
    padded[:, :width] = torch.randn(tokens, width)
    ups = activation.num_inputs * columns
    weight = quantize(torch.randn(EXPERTS, ups, width, device=device) * width**-0.5, FOUR_BITS[name])
    x, bias = padded[:, :width], torch.randn(EXPERTS, ups, device=device)
    ours = rows.up_rows(
        x, expert, weight.values_NK, weight.scales_NG, bias, activation, tile_cost_model.ROWS_FOUR.up, name
    )
    here = (expert >= 0).flatten()
    groups = group(expert.flatten()[here][:, None], EXPERTS, 1)
    theirs = torch.empty_like(ours[here])
    theirs[groups.order_R.long()] = reference.up(
        x.repeat_interleave(top_k, 0)[here], groups, 1, dequantize(weight), None, bias, activation
    )
    torch.testing.assert_close(ours[here], theirs, **TOLERANCE)


def assert_down_agrees(name: str, columns: int, hidden: int, routing: list[list[int]], device: str) -> None:
    """The second product, and the sum over a token's experts. What is of experts elsewhere is NaN."""
    expert = torch.tensor(routing, dtype=torch.int32, device=device)
    tokens, top_k = expert.shape
    here = (expert >= 0).flatten()
    inner = torch.full((tokens * top_k, hidden), float("nan"), dtype=torch.float16, device=device)
    inner[here] = torch.randn(int(here.sum()), hidden, device=device).half()
    weight = quantize(torch.randn(EXPERTS, columns, hidden, device=device) * hidden**-0.5, FOUR_BITS[name])
    bias, share = torch.randn(EXPERTS, columns, device=device), torch.rand(tokens, top_k, device=device)
    ours = rows.down_rows(
        inner, expert, share, weight.values_NK, weight.scales_NG, bias, tile_cost_model.ROWS_FOUR.down, name
    )
    groups = group(expert.flatten()[here][:, None], EXPERTS, 1)
    in_order, shares = inner[here][groups.order_R.long()].float(), share.flatten()[here][:, None]
    parts = torch.zeros(len(inner), columns, device=device)
    parts[here] = reference.down(in_order, groups, shares, dequantize(weight), None, bias)
    torch.testing.assert_close(ours, parts.view(tokens, top_k, -1).sum(1).to(ours.dtype), **TOLERANCE)


@pytest.mark.parametrize(("name", "inner", "columns"), [("int4", 1088, 12), ("mxfp4", 64, 7), ("mxfp4", 2112, 3)])
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_few_rows_meet_weights_of_four_bits(
    name: str, inner: int, columns: int, routing: list[list[int]], device: str
) -> None:
    """Where a step is more than there is, and where there is more than a step."""
    assert_up_agrees(name, inner, columns, routing, device)
    assert_down_agrees(name, columns, inner, routing, device)


@pytest.mark.parametrize("name", FOUR_BITS)
def test_few_rows_meet_experts_without_gates(name: str, device: str) -> None:
    assert_up_agrees(name, 1088, 12, ROUTINGS["skewed, some elsewhere"], device, RELU2)


@pytest.mark.parametrize("name", FOUR_BITS)
def test_four_bit_values_are_decoded_exactly_at_every_position(name: str, device: str) -> None:
    """Rows with a single one in them pick each number of a pack out of the weights."""
    linear = Activation("clipped", 1e9, 0.0)  # (up + 1) · gate ÷ 2
    weight = quantize(torch.randn(1, 16, 64, device=device), FOUR_BITS[name])
    ones = torch.ones_like(weight.scales_NG)
    gate, upper = dequantize(replace(weight, scales_NG=ones))[0].T.chunk(2, dim=1)
    expert = torch.zeros(64, 1, dtype=torch.int32, device=device)
    x = torch.eye(64, dtype=torch.float16, device=device)
    ours = rows.up_rows(x, expert, weight.values_NK, ones, None, linear, tile_cost_model.ROWS_FOUR.up, name)
    assert len(weight.values_NK.unique()) > 100
    assert torch.equal(ours.float(), (upper + 1.0) * gate * 0.5)


@pytest.mark.parametrize("name", FOUR_BITS)
def test_a_layer_takes_them_where_tokens_are_few_and_its_weights_can_be_read_as_words(name: str, device: str) -> None:
    problem = tile_cost_model.Problem(128, 8, 2048, 768, 1, weights=name, scales="group")
    assert tile_cost_model.choose(problem, H200) == replace(tile_cost_model.ROWS_FOUR, four=name)
    assert tile_cost_model.choose(replace(problem, invariant=True), H200).BM > 1
    x = torch.randn(1, 64, dtype=torch.float16, device=device)
    expert, share = torch.tensor([[1, 0]], dtype=torch.int32, device=device), torch.rand(1, 2, device=device)
    gate_up = quantize(torch.randn(2, 128, 64, device=device) / 8, FOUR_BITS[name])
    lower = quantize(torch.randn(2, 64, 64, device=device) / 8, FOUR_BITS[name])
    scales = gate_up.scales_NG, lower.scales_NG
    config = replace(tile_cost_model.ROWS_FOUR, four=name)
    ours, tiled = (
        kernel.experts(x, share, expert, gate_up.values_NK, lower.values_NK, gate_up_scale=scales[0],
                       down_scale=scales[1], four=name, config=one)
        for one in (config, replace(tile_cost_model.FOUR[0], four=name))
    )  # fmt: skip
    torch.testing.assert_close(ours, tiled, **TOLERANCE)
    shifted = torch.zeros(gate_up.values_NK.numel() + 1, dtype=torch.uint8, device=device)[1:]
    askew = shifted.view_as(gate_up.values_NK)
    assert kernel.unfit(x, expert, gate_up.values_NK, lower.values_NK, *scales) is None
    assert "multiples of 4 bytes" in str(kernel.unfit(x, expert, askew, lower.values_NK, *scales))


@mutants_by(
    "name",
    {
        "int4": {
            "number(above, 16, FOUR)": "number(words, 16, FOUR)",
            "8 * 2.0 ** (80 - 149)": "7 * 2.0 ** (80 - 149)",
            "tl.join(first, third), tl.join(second, fourth)": "tl.join(first, second), tl.join(third, fourth)",
            "high_sums * high_scale": "high_sums * low_scale",
            "(i_chunk // 2 * 2)[:, None]": "i_chunk[:, None]",
            "PACK // 2, mask=m_chunk[:, None], other=0.0).to(tl.float32) * share": (
                "PACK // 2, mask=m_chunk[:, None], other=0.0).to(tl.float32)"
            ),
            "p_gate_scale + hidden.to(tl.int64) * groups": "p_gate_scale",
            "i_byte % 4 // 2 * 16": "i_byte % 4 * 8",
        },
        "mxfp4": {
            "& 0x81C00000": "& 0x01C00000",
            "(65 << (22 - AT))": "(65 << (21 - AT))",
        },
    },
)
def test_a_mutant_of_the_rows_with_four_bits_is_found(
    failing_mutant: FailingMutant, monkeypatch: pytest.MonkeyPatch, name: str, edit: Edit, device: str
) -> None:
    with failing_mutant(four_rows, edit) as mutant:
        monkeypatch.setattr(rows, "up_row_sums", mutant.up_row_sums)
        monkeypatch.setattr(rows, "down_row_sums", mutant.down_row_sums)
        assert_up_agrees(name, 128, 5, [[2, 0]], device)
        assert_down_agrees(name, 5, 128, [[2, 0]], device)
