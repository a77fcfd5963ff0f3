"""A layer of experts with its inputs, and comparisons of each grouped product with its definition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moiety_kernels.grouped_gemm import reference, tile_cost_model
from moiety_kernels.moe import SILU, Activation
from moiety_kernels.quantization import INT4, MXFP4, dequantize, quantize
from moiety_kernels.quantization.weight import GPU_PACK
from moiety_kernels.route import group

CLIPPED = Activation("clipped", 0.5, 1.702)


@dataclass
class Case:
    """Rows with one expert each, `counts` of them with each expert, in random order."""

    counts: tuple[int, ...]
    width: int = 72
    hidden: int = 40
    dtype: torch.dtype = torch.float32
    activation: Activation = SILU
    biases: bool = False
    narrow: str = ""  # "int8" and "fp8 rows" with a scale a row, "fp8" with a scale a block
    device: str = "cpu"

    def __post_init__(self) -> None:
        experts, width, hidden = len(self.counts), self.width, self.hidden
        chosen = torch.repeat_interleave(torch.arange(experts), torch.tensor(self.counts))
        self.expert = chosen[torch.randperm(len(chosen))].int()[:, None].to(self.device)
        padded = self.normal(len(chosen), width + 5)
        padded[:, width:] = float("nan")
        self.x, self.inner = padded[:, :width], self.normal(len(chosen), hidden)
        ups = self.activation.num_inputs * hidden
        self.gate_up = self.normal(experts, ups, width, scale=width**-0.5)
        self.down = self.normal(experts, width, hidden, scale=hidden**-0.5)
        self.gate_up_bias = torch.randn(experts, ups, device=self.device) if self.biases else None
        self.down_bias = torch.randn(experts, width, device=self.device) if self.biases else None
        self.gate_up_scale: Tensor | None = None
        self.down_scale: Tensor | None = None
        if self.narrow == "int8":
            self.gate_up, self.down = self.whole(ups, width), self.whole(width, hidden)
            self.gate_up_scale, self.down_scale = self.scales(ups), self.scales(width)
        elif self.narrow == "fp8 rows":
            self.gate_up, self.down = (one.mul(100).to(torch.float8_e4m3fn) for one in (self.gate_up, self.down))
            self.gate_up_scale, self.down_scale = self.scales(ups), self.scales(width)
        elif self.narrow == "fp8":
            across, high = -(-width // 128), -(-hidden // 128)

            def of_blocks(rows: int, *sizes: int) -> Tensor:
                return self.scales(*sizes).repeat_interleave(128, 1)[:, :rows]

            self.gate_up, self.down = (one.mul(100).to(torch.float8_e4m3fn) for one in (self.gate_up, self.down))
            parts = [of_blocks(hidden, high, across) for _ in range(self.activation.num_inputs)]
            self.gate_up_scale = torch.cat(parts, dim=1)
            self.down_scale = of_blocks(width, across, high).contiguous()
        self.weight = torch.rand(len(chosen), 1, device=self.device)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(self.dtype)

    def whole(self, *shape: int) -> Tensor:
        return torch.randint(-127, 128, (len(self.counts), *shape), dtype=torch.int8, device=self.device)

    def scales(self, *shape: int) -> Tensor:
        return (torch.rand(len(self.counts), *shape, device=self.device) + 0.5) / 1000

    @property
    def tolerance(self) -> dict[str, float]:
        value = 3e-3 if self.dtype is torch.float16 else 2e-5
        return {"rtol": value, "atol": value}


def assert_up_agrees(kernels: Any, config: tile_cost_model.TileConfig, case: Case) -> None:
    groups = group(case.expert, len(case.counts), config.BM)
    inputs = case.x, groups, 1, case.gate_up, case.gate_up_scale, case.gate_up_bias, case.activation
    torch.testing.assert_close(kernels.up(*inputs, config), reference.up(*inputs), **case.tolerance)


def assert_down_agrees(kernels: Any, config: tile_cost_model.TileConfig, case: Case) -> None:
    groups = group(case.expert, len(case.counts), config.BM)
    inputs = case.inner, groups, case.weight, case.down, case.down_scale, case.down_bias
    torch.testing.assert_close(kernels.down(*inputs, config), reference.down(*inputs), **case.tolerance)


def assert_rounded_alike(kernels: Any, case: Case) -> tuple[Tensor, Tensor]:
    """Rows and scales agree with the definition to the last bit."""
    values, scale = kernels.round_rows(case.x)
    for ours, theirs in zip((values.float(), scale), reference.rounded(case.x, 128), strict=True):
        assert torch.equal(ours, theirs.float())
    return values, scale


def assert_eight_bits_agree(ups: Any, downs: Any, config: tile_cost_model.TileConfig, case: Case) -> None:
    """Both products of rounded rows are those of what they stand for; the first one's result is rounded once more,
    which a last bit of its sums may turn by a step of float8."""
    groups = group(case.expert, len(case.counts), config.BM)
    x, x_scale = reference.rounded(case.x, 128)
    gate_up = case.gate_up, case.gate_up_scale, case.gate_up_bias, case.activation
    inner, inner_scale = ups.up_rounded(x, x_scale, groups, 1, *gate_up, config)
    wide = reference.up(reference.unrounded(x, x_scale, 128), groups, 1, *gate_up)
    theirs, their_scale = reference.rounded(wide, config.up.BN)
    torch.testing.assert_close(inner_scale, their_scale, rtol=1e-4, atol=1e-7)
    assert (inner.float() != theirs.float()).float().mean() < 0.02
    back = reference.unrounded(inner, inner_scale, config.up.BN)
    largest = (inner_scale * reference.LARGEST).repeat_interleave(config.up.BN, 1)[:, : back.shape[1]]
    assert ((back - wide).abs() <= wide.abs() / 15 + largest / 2**14).all()
    second = case.weight, case.down, case.down_scale, case.down_bias
    ours = downs.down(inner, groups, *second, config, inner_scale, torch.float32)
    torch.testing.assert_close(ours, reference.down(back, groups, *second), rtol=1e-4, atol=1e-4)


def assert_rows_agree(kernels: Any, case: Case) -> None:
    groups, block = group(case.expert, len(case.counts), 1), tile_cost_model.ROWS.up
    inner = kernels.up_rows(
        case.x, case.expert, case.gate_up, case.gate_up_scale, case.gate_up_bias, case.activation, block
    )
    expected = torch.empty_like(inner)
    expected[groups.order_R.long()] = reference.up(
        case.x, groups, 1, case.gate_up, case.gate_up_scale, case.gate_up_bias, case.activation
    )
    torch.testing.assert_close(inner, expected, **case.tolerance)
    ours = kernels.down_rows(
        inner, case.expert, case.weight, case.down, case.down_scale, case.down_bias, tile_cost_model.ROWS.down
    )
    in_order = inner[groups.order_R.long()]
    theirs = reference.down(in_order, groups, case.weight, case.down, case.down_scale, case.down_bias)
    torch.testing.assert_close(ours, theirs, **case.tolerance)


def assert_sums_agree(kernels: Any, device: str) -> None:
    weighted = torch.randn(15, 1100, device=device)
    expert = torch.zeros(len(weighted) // 5, 5, dtype=torch.int32, device=device)
    torch.testing.assert_close(kernels.combine(weighted, expert), reference.combine(weighted, 5), rtol=1e-6, atol=1e-6)


FOUR_BITS = {"int4": replace(INT4, pack=GPU_PACK), "mxfp4": replace(MXFP4, pack=GPU_PACK)}


def assert_four_bits_agree(ups: Any, downs: Any, name: str, config: tile_cost_model.TileConfig, case: Case) -> None:
    """The products are those of the weights that the four bits stand for."""
    config = replace(config, four=name)
    gate_up, lower = quantize(case.gate_up, FOUR_BITS[name]), quantize(case.down, FOUR_BITS[name])
    groups = group(case.expert, len(case.counts), config.BM)
    ours = ups.up(case.x, groups, 1, gate_up.values_NK, gate_up.scales_NG, case.gate_up_bias, case.activation, config)
    theirs = reference.up(case.x, groups, 1, dequantize(gate_up), None, case.gate_up_bias, case.activation)
    torch.testing.assert_close(ours, theirs, **case.tolerance)
    ours = downs.down(case.inner, groups, case.weight, lower.values_NK, lower.scales_NG, case.down_bias, config)
    theirs = reference.down(case.inner, groups, case.weight, dequantize(lower), None, case.down_bias)
    torch.testing.assert_close(ours, theirs, **case.tolerance)
