"""The grouped products agree with their definition, tile by tile, however the rows fall to the experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.kernels.mutants import Edit, FailingMutant, mutants, mutants_by
from torch import Tensor

from moiety_kernels.checks import KernelInputError
from moiety_kernels.gpu.targets import H200
from moiety_kernels.grouped_gemm import kernel, reference, tiles
from moiety_kernels.grouped_gemm.kernels import down, four_bits, rounding, rows, up
from moiety_kernels.moe import GELU_TANH, RELU2, SILU, Activation
from moiety_kernels.moe import experts as moe_experts
from moiety_kernels.moe.reference import experts as experts_reference
from moiety_kernels.quantization import INT4, INT8, MXFP4, dequantize, quantize
from moiety_kernels.quantization.weight import GPU_PACK
from moiety_kernels.route import group

CLIPPED = Activation("clipped", 0.5, 1.702)
LIMITED = Activation("limited_silu", 0.5)
COUNTS: dict[str, Any] = {
    "few, many and none": (0, 1, 7, 65),
    "one expert": (0, 0, 20),
    "skewed": (40, 9, 3, 2, 0, 1, 0, 1),
    "mostly none": (0,) * 60 + (3,) + (0,) * 66 + (2,),
}


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


def assert_up_agrees(kernels: Any, config: tiles.TileConfig, case: Case) -> None:
    groups = group(case.expert, len(case.counts), config.BM)
    inputs = case.x, groups, 1, case.gate_up, case.gate_up_scale, case.gate_up_bias, case.activation
    torch.testing.assert_close(kernels.up(*inputs, config), reference.up(*inputs), **case.tolerance)


def assert_down_agrees(kernels: Any, config: tiles.TileConfig, case: Case) -> None:
    groups = group(case.expert, len(case.counts), config.BM)
    inputs = case.inner, groups, case.weight, case.down, case.down_scale, case.down_bias
    torch.testing.assert_close(kernels.down(*inputs, config), reference.down(*inputs), **case.tolerance)


def assert_rounded_alike(kernels: Any, case: Case) -> tuple[Tensor, Tensor]:
    """Rows and scales agree with the definition to the last bit."""
    values, scale = kernels.round_rows(case.x)
    for ours, theirs in zip((values.float(), scale), reference.rounded(case.x, 128), strict=True):
        assert torch.equal(ours, theirs.float())
    return values, scale


def assert_eight_bits_agree(ups: Any, downs: Any, config: tiles.TileConfig, case: Case) -> None:
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
    groups, block = group(case.expert, len(case.counts), 1), tiles.ROWS.up
    inner = kernels.up_rows(
        case.x, case.expert, case.gate_up, case.gate_up_scale, case.gate_up_bias, case.activation, block
    )
    expected = torch.empty_like(inner)
    expected[groups.order_R.long()] = reference.up(
        case.x, groups, 1, case.gate_up, case.gate_up_scale, case.gate_up_bias, case.activation
    )
    torch.testing.assert_close(inner, expected, **case.tolerance)
    ours = kernels.down_rows(
        inner, case.expert, case.weight, case.down, case.down_scale, case.down_bias, tiles.ROWS.down
    )
    in_order = inner[groups.order_R.long()]
    theirs = reference.down(in_order, groups, case.weight, case.down, case.down_scale, case.down_bias)
    torch.testing.assert_close(ours, theirs, **case.tolerance)


def assert_sums_agree(kernels: Any, device: str) -> None:
    weighted = torch.randn(15, 1100, device=device)
    expert = torch.zeros(len(weighted) // 5, 5, dtype=torch.int32, device=device)
    torch.testing.assert_close(kernels.combine(weighted, expert), reference.combine(weighted, 5), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "counts"),
    [(config, counts) for config in tiles.HOPPER[1:] for counts in COUNTS.values()]
    + [(config, COUNTS["few, many and none"]) for config in (*tiles.PORTABLE[1:], *tiles.SINGLE)],
    ids=lambda value: getattr(value, "name", None),
)
def test_products_agree_however_rows_fall_to_experts(config: Any, counts: Any, device: str) -> None:
    case = Case(counts, device=device)
    assert_up_agrees(up, config, case)
    assert_down_agrees(down, config, case)


@pytest.mark.parametrize("config", [tiles.HOPPER[1], tiles.HOPPER[-1], tiles.PORTABLE[2]], ids=lambda c: c.name)
@pytest.mark.parametrize("activation", [SILU, GELU_TANH, CLIPPED, LIMITED, RELU2], ids=lambda a: a.kind)
def test_biases_and_activations_in_sixteen_bits(config: Any, activation: Activation, device: str) -> None:
    case = Case((3, 0, 18), 136, 72, torch.float16, activation, biases=True, device=device)
    assert_up_agrees(up, config, case)
    assert_down_agrees(down, config, case)


@pytest.mark.parametrize("narrow", ["", "int8", "fp8 rows", "fp8"])
def test_experts_without_gates(narrow: str, device: str) -> None:
    kind: dict[str, Any] = {"activation": RELU2, "biases": True, "narrow": narrow, "device": device}
    config = tiles.NARROW[1] if narrow else tiles.HOPPER[-1]
    assert_up_agrees(up, config, Case((3, 0, 18), 208, 144, torch.float16, **kind))
    assert_rows_agree(rows, Case((0, 2, 1), 141, 77, **kind))
    if narrow.startswith("fp8"):
        assert_eight_bits_agree(up, down, tiles.EIGHT[0], Case((3, 0, 18), 208, 144, **kind))
    elif not narrow:
        case = Case((2, 1, 0), 40, 24, **kind)
        inputs = case.x, case.weight, case.expert, case.gate_up, case.down
        biases = {"gate_up_bias_E2F": case.gate_up_bias, "down_bias_ED": case.down_bias}
        ours, theirs = (
            moe_experts(*inputs, kernel=name, activation=RELU2, **biases) for name in ("triton", "reference")
        )
        torch.testing.assert_close(ours, theirs, **case.tolerance)


@pytest.mark.parametrize("config", [tiles.HOPPER[1], tiles.HOPPER[-2]], ids=lambda config: config.name)
def test_weights_that_the_copy_engine_cannot_fetch_are_read_by_address(config: Any, device: str) -> None:
    case = Case((3, 0, 18), 37, 33, biases=True, device=device)
    assert_up_agrees(up, config, case)
    assert_down_agrees(down, config, case)


@pytest.mark.parametrize("narrow", ["int8", "fp8"])
@pytest.mark.parametrize("config", tiles.NARROW[1:3], ids=lambda config: config.name)
def test_weights_of_eight_bits_are_widened_and_scaled(config: Any, narrow: str, device: str) -> None:
    case = Case((3, 0, 18), 208, 144, torch.float16, biases=True, narrow=narrow, device=device)
    assert_up_agrees(up, config, case)
    assert_down_agrees(down, config, case)


@pytest.mark.parametrize("narrow", ["int8", "fp8 rows"])
def test_few_rows_meet_weights_of_eight_bits_by_scales_of_rows(narrow: str, device: str) -> None:
    assert_rows_agree(rows, Case((0, 2, 1), 72, 40, biases=True, narrow=narrow, device=device))


@pytest.mark.parametrize(
    ("width", "hidden"), [(208, 144), (141, 77), pytest.param(640, 520, marks=pytest.mark.thorough)]
)
def test_few_rows_meet_float8_weights_by_scales_of_blocks(width: int, hidden: int, device: str) -> None:
    assert_rows_agree(rows, Case((0, 2, 1), width, hidden, biases=True, narrow="fp8", device=device))


def test_rows_are_rounded_to_eight_bits_by_scales_of_their_own(device: str) -> None:
    case = Case((3, 0, 4), 1168, device=device)
    case.x[2] *= 1e6
    case.x[3] = 0.0
    assert_rounded_alike(rounding, case)


@pytest.mark.parametrize("narrow", ["fp8 rows", "fp8"])
@pytest.mark.parametrize("config", tiles.EIGHT, ids=lambda config: config.name)
def test_rounded_rows_are_multiplied_with_float8_weights(config: Any, narrow: str, device: str) -> None:
    assert_eight_bits_agree(up, down, config, Case((3, 0, 18, 65), 208, 144, biases=True, narrow=narrow, device=device))


def test_float8_weights_and_rows_that_the_copy_engine_cannot_fetch(device: str) -> None:
    assert_eight_bits_agree(up, down, tiles.EIGHT[-1], Case((3, 0, 18), 141, 77, narrow="fp8", device=device))


def test_a_layer_in_float8_errs_at_most_as_much_again_as_its_weights_do(device: str) -> None:
    """Of random weights and rows: rounding weights to 4 significant bits errs by 2.6 %, rows by as much, inner rows
    again; errors that know nothing of each other add up by their squares."""
    case = Case((40, 0, 30), 256, 128, device=device)
    exact = reference_layer(case)
    error = {}
    for config in (tiles.NARROW[2], tiles.EIGHT[-1]):
        fp8 = Case((40, 0, 30), 256, 128, narrow="fp8", device=device)
        fp8.x, fp8.weight, fp8.expert = case.x, case.weight, case.expert
        for name in ("gate_up", "down"):
            wide, scale = getattr(case, name), torch.full_like(getattr(fp8, f"{name}_scale"), 2.0**-8)
            setattr(fp8, name, (wide / 2.0**-8).to(torch.float8_e4m3fn))
            setattr(fp8, f"{name}_scale", scale)
        ours = kernel.experts(fp8.x, fp8.weight, fp8.expert, fp8.gate_up, fp8.down, gate_up_scale=fp8.gate_up_scale,
                              down_scale=fp8.down_scale, config=config)  # fmt: skip
        error[config.eight] = float((ours - exact).norm() / exact.norm())
    assert 0.02 < error[False] < 0.06
    assert error[False] < error[True] < 1.5 * error[False]


def reference_layer(case: Case) -> Tensor:
    """What a layer of float32 makes of the rows, each with one expert."""
    groups = group(case.expert, len(case.counts), 1)
    inner = reference.up(case.x, groups, 1, case.gate_up)
    return reference.down(inner, groups, case.weight, case.down)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(("width", "hidden"), [(72, 40), (37, 33)])
def test_few_rows_agree(width: int, hidden: int, biases: bool, device: str) -> None:
    assert_rows_agree(
        rows, Case((0, 2, 1), width, hidden, activation=CLIPPED if biases else SILU, biases=biases, device=device)
    )


def test_addresses_go_beyond_32_bits(untouched: Any, device: str) -> None:
    apart = 1 << 30
    far = untouched(3 * apart, torch.float16)  # but for the experts' weights
    case = Case((1, 0, 2), dtype=torch.float16, device=device)
    for name in ("gate_up", "down"):
        near = getattr(case, name)
        setattr(case, name, far.as_strided(near.shape, (apart, near.stride(1), 1), len(name)).copy_(near))
        assert_up_agrees(up, tiles.HOPPER[1], case)
        assert_down_agrees(down, tiles.HOPPER[1], case)
        assert_rows_agree(rows, case)


def test_tokens_parts_are_summed_in_their_order(device: str) -> None:
    assert_sums_agree(down, device)


@pytest.mark.parametrize("config", [tiles.ROWS, tiles.HOPPER[1]], ids=lambda config: config.name)
def test_experts_that_are_elsewhere_add_nothing(config: Any, device: str) -> None:
    case = Case((12, 0, 0), 40, 24, biases=True, device=device)
    expert = torch.randint(-1, 3, (12, 2), dtype=torch.int32, device=device)
    weight = torch.rand(12, 2, device=device)
    biases: dict[str, Any] = {"gate_up_bias_E2F": case.gate_up_bias, "down_bias_ED": case.down_bias}
    ours = kernel.experts(case.x, weight, expert, case.gate_up, case.down, **biases, config=config)
    theirs = experts_reference(case.x, weight, expert, case.gate_up, case.down, **biases)
    assert (expert < 0).any()
    torch.testing.assert_close(ours, theirs, **case.tolerance)


@pytest.mark.parametrize("config", [tiles.ROWS, tiles.HOPPER[1], tiles.HOPPER[4]], ids=lambda config: config.name)
def test_a_layer_agrees(config: Any, device: str) -> None:
    case = Case((2, 1, 0), 40, 24, biases=True, device=device)
    expert = torch.tensor([[2, 0], [0, 1], [1, 2]], dtype=torch.int32, device=device)
    weight, groups = torch.rand(3, 2, device=device), group(expert, 3, 1)
    ours = kernel.experts(case.x, weight, expert, case.gate_up, case.down, gate_up_bias_E2F=case.gate_up_bias,
                          down_bias_ED=case.down_bias, config=config)  # fmt: skip
    inner = reference.up(case.x, groups, 2, case.gate_up, None, case.gate_up_bias)
    theirs = reference.combine(reference.down(inner, groups, weight, case.down, None, case.down_bias), 2)
    torch.testing.assert_close(ours, theirs, **case.tolerance)


def test_experts_asked_of_triton_are_its_own_or_refused(device: str) -> None:
    case = Case((2, 1, 0), 40, 24, device=device)
    inputs = case.x, case.weight, case.expert, case.gate_up, case.down
    ours = moe_experts(*inputs, kernel="triton")
    torch.testing.assert_close(ours, moe_experts(*inputs, kernel="reference"), **case.tolerance)
    alone = moe_experts(*(one[:1] for one in inputs[:3]), *inputs[3:], kernel="triton", invariant=True)
    assert torch.equal(alone, moe_experts(*inputs, kernel="triton", invariant=True)[:1])
    with pytest.raises(KernelInputError, match="invariant results need the Triton kernels"):
        moe_experts(*inputs, kernel="reference", invariant=True)
    with pytest.raises(KernelInputError, match=r"weights are torch\.float16 and activations torch\.float32"):
        moe_experts(*inputs[:3], case.gate_up.half(), case.down.half(), kernel="triton")


def test_weights_kept_in_eight_bits_are_read_by_triton_and_those_packed_for_a_cpu_are_refused(device: str) -> None:
    case = Case((2, 1, 0), 64, 32, device=device)
    up_int8, down_int8 = quantize(case.gate_up, INT8), quantize(case.down, INT8)
    routed = case.x, case.weight, case.expert
    ours = moe_experts(*routed, up_int8, down_int8, kernel="triton")
    torch.testing.assert_close(ours, moe_experts(*routed, up_int8, down_int8, kernel="reference"), **case.tolerance)
    with pytest.raises(KernelInputError, match="its kernels do not read int4 weights"):
        moe_experts(*routed, quantize(case.gate_up, INT4), quantize(case.down, INT4), kernel="triton")


FOUR_BITS = {"int4": replace(INT4, pack=GPU_PACK), "mxfp4": replace(MXFP4, pack=GPU_PACK)}


def assert_four_bits_agree(ups: Any, downs: Any, name: str, config: tiles.TileConfig, case: Case) -> None:
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


@pytest.mark.parametrize("name", FOUR_BITS)
@pytest.mark.parametrize("config", tiles.FOUR, ids=lambda config: config.name)
def test_weights_of_four_bits_are_widened_and_scaled(config: Any, name: str, device: str) -> None:
    for activation in (SILU, RELU2):
        case = Case((3, 0, 18), 192, 64, torch.float16, activation, biases=True, device=device)
        assert_four_bits_agree(up, down, name, config, case)


@pytest.mark.parametrize("name", FOUR_BITS)
def test_experts_in_four_bits_are_read_by_triton_where_activations_have_sixteen(name: str, device: str) -> None:
    case = Case((2, 1, 0), 128, 64, torch.float16, device=device)
    narrow = quantize(case.gate_up, FOUR_BITS[name]), quantize(case.down, FOUR_BITS[name])
    routed = case.x, case.weight, case.expert
    ours = moe_experts(*routed, *narrow, kernel="triton")
    torch.testing.assert_close(ours, moe_experts(*routed, *narrow, kernel="reference"), **case.tolerance)
    with pytest.raises(KernelInputError, match=r"activations are torch\.float32, not of 16 bits"):
        moe_experts(case.x.float(), *routed[1:], *narrow, kernel="triton")


@mutants(
    {
        "p_step + 1,": "p_step,",
        "p_step + hidden * num_groups,": "p_step,",
        "multiply(x_high, high, multiply(x_low, low, up": "multiply(x_low, high, multiply(x_low, low, up",
        "inner.load([first, k + HALF])": "inner.load([first, k])",
        "nibbles.to(tl.int8) - 8": "nibbles.to(tl.int8) - 7",
        "expert.to(tl.int64) * width": "expert.to(tl.int64) * hidden",
    }
)
def test_a_mutant_of_the_products_with_four_bits_is_found(
    failing_mutant: FailingMutant, monkeypatch: pytest.MonkeyPatch, edit: Edit, device: str
) -> None:
    with failing_mutant(four_bits, edit) as mutant:
        monkeypatch.setattr(up, "up_sums", mutant.up_sums)
        monkeypatch.setattr(down, "down_sums", mutant.down_sums)
        assert_four_bits_agree(up, down, "int4", tiles.FOUR[0], Case((3, 0, 18), 192, 64, torch.float16, device=device))


INVARIANT = tiles.candidates(tiles.Problem(3, 2, 136, 72, 1, invariant=True), H200)


def telling(*shape: int) -> Tensor:
    """Numbers whose products with small whole ones add up exactly within a step of 64, and are rounded from one to the
    next, so that results tell in what steps they were summed, and nothing of the order within one."""
    step = torch.arange(shape[-1]) // 64
    return torch.randint(-8, 9, shape) * 2.0 ** (-8.0 - 17.0 * (step > 0) - step)


def bits(config: tiles.TileConfig, case: Case, first: int, last: int) -> tuple[Tensor, Tensor]:
    """What both products make of row 25 among the rows `first` … `last`."""
    groups = group(case.expert[first:last], len(case.counts), config.BM)
    inner = up.up(case.x[first:last], groups, 1, case.gate_up, None, None, SILU, config)
    place = int((groups.order_R == 25 - first).nonzero())
    rows = case.inner[first:last][groups.order_R.long()]
    weighted = down.down(rows, groups, case.weight[first:last], case.down, None, None, config)
    return inner[place], weighted[25 - first]


def test_a_row_has_the_same_bits_alone_and_in_any_batch_whatever_tiles_are_chosen(device: str) -> None:
    case = Case((15, 5, 20), 136, 100, device=device)
    case.x, case.inner = telling(40, 136).to(device), telling(40, 100).to(device)
    case.gate_up = torch.randint(-8, 9, (3, 200, 136), device=device).float()
    case.down = torch.randint(-8, 9, (3, 136, 100), device=device).float()
    alone = bits(INVARIANT[0], case, 25, 26)
    for config in INVARIANT:
        for first, last in ((0, 40), (25, 26), (20, 29)):
            for ours, theirs in zip(bits(config, case, first, last), alone, strict=True):
                assert torch.equal(ours, theirs), config.name
    for ours, theirs in zip(bits(tiles.SINGLE[0], case, 25, 26), alone, strict=True):
        assert not torch.equal(ours, theirs), "shorter steps went unnoticed"


@mutants_by(
    "narrow",
    {
        "int8": {"tl.load(p_column_scale + hidden,": "tl.load(p_column_scale,"},
        "fp8": {
            "p_up_scale = p_gate_scale + hidden * across": "p_up_scale = p_gate_scale",
            "p_gate_scale + k // SCALE_BLOCK": "p_gate_scale",
            "2 * hidden + column) * across": "2 * hidden) * across",
        },
    },
)
def test_a_mutant_that_scales_otherwise_is_found(mutated: Any, narrow: str, edit: Edit, device: str) -> None:
    mutant = mutated(up, *edit)
    with pytest.raises(AssertionError):
        assert_up_agrees(
            mutant, tiles.NARROW[1], Case((3, 0, 18), 208, 144, torch.float16, narrow=narrow, device=device)
        )


@mutants_by(
    "module",
    {
        up: {
            "w_gate, gate, row_scale,": "w_gate, gate, row_scale * 0 + 1.0,",
            "p_row_scale + k // BK": "p_row_scale",
            "tl.where(m_column[None, :], inner, 0.0)": "inner",
            "tl.cdiv(hidden, BN) + column // BN": "tl.cdiv(hidden, BN)",
        },
        down: {
            "p_row_scale + k // BK": "p_row_scale",
            "tl.cdiv(hidden, BK) if EIGHT": "tl.cdiv(width, BK) if EIGHT",
        },
    },
)
def test_a_mutant_that_scales_rounded_rows_otherwise_is_found(
    mutated: Any, noticed: Any, module: Any, edit: Edit, device: str
) -> None:
    kernels = {up: up, down: down} | {module: mutated(module, *edit)}
    with pytest.raises(noticed):
        assert_eight_bits_agree(
            kernels[up], kernels[down], tiles.EIGHT[-1], Case((3, 0, 18), 208, 144, narrow="fp8", device=device)
        )


@mutants(
    {
        "mask=m_column, other=0.0).to(tl.float32)": "mask=i_column >= 0, other=0.0).to(tl.float32)",
        "row * num_groups + i_group": "row + i_group",
    }
)
def test_a_mutant_of_the_rounding_is_found(failing_mutant: FailingMutant, edit: Edit, device: str) -> None:
    with failing_mutant(rounding, edit) as mutant:
        assert_rounded_alike(mutant, Case((3, 0, 4), 1168, device=device))


# What a mutant writes where it should not stays within the tensor, or within what the allocator adds to an odd length:
# the last tile is full, and a row that is too long is so by one.
MUTANT_COUNTS = (3, 0, 70, 64)


@mutants(
    {
        "m_column = i_column < hidden": "m_column = i_column < hidden + 1",
        "m_row = i_row < end": "m_row = i_row < first + BM",
        "load_weights(w, expert, column": "load_weights(w, expert + 1, column",
        "load_weights(w, expert, hidden + column": "load_weights(w, expert, column",
        "if EVEN else m_row[:, None] & (k + i_k < width)[None, :]": "if EVEN else m_row[:, None]",
        "end - first <= TAIL:": "end - first >= TAIL:",
        "p_bias + expert.to(tl.int64) * 2 * hidden": "p_bias + expert.to(tl.int64) * hidden",
    }
)
def test_a_mutant_of_the_first_product_is_found(failing_mutant: FailingMutant, edit: Edit, device: str) -> None:
    with failing_mutant(up, edit) as mutant:
        for config in (tiles.HOPPER[1], tiles.HOPPER[-2]):
            assert_up_agrees(mutant, config, Case(MUTANT_COUNTS, 72, 67, biases=True, device=device))


@mutants(
    {
        "m_column = i_column < width\n    if": "m_column = i_column < width + 1\n    if",
        "m_row = i_row < end": "m_row = i_row < first + BM",
        "load_weights(w, expert, column": "load_weights(w, expert + 1, column",
        "inner.load([first, k])": "inner.load([first + 1, k])",
        "sums * share[None, :]": "sums",
        "p_weight + pair": "p_weight + i_row",
    }
)
def test_a_mutant_of_the_second_product_is_found(failing_mutant: FailingMutant, edit: Edit, device: str) -> None:
    with failing_mutant(down, edit) as mutant:
        assert_down_agrees(mutant, tiles.HOPPER[1], Case(MUTANT_COUNTS, 133, 40, device=device))


@mutants(
    {
        "expert * expert_stride + k": "k",
        "p_w += expert.to(tl.int64) * expert_stride": "p_w += expert.to(tl.int64) * row_stride",
        "m_k = k + i_k < width": "m_k = k + i_k < width + 5",
        "(hidden + i_column).to": "(i_column).to",
    }
)
def test_a_mutant_of_the_row_products_is_found(failing_mutant: FailingMutant, edit: Edit, device: str) -> None:
    with failing_mutant(rows, edit) as mutant:
        assert_rows_agree(mutant, Case((0, 2, 1), 72, 40, biases=True, device=device))


@mutants(
    {
        "p_up_scale = p_gate_scale + hidden * across": "p_up_scale = p_gate_scale",
        "p_gate_scale + (k + i_k) // SCALE_BLOCK": "p_gate_scale + k // SCALE_BLOCK + 0 * i_k",
        "2 * hidden + column) * across": "2 * hidden) * across",
        "(expert * width + column) * across": "(expert * width) * across",
        "p_across + (k + i_k) // SCALE_BLOCK": "p_across + (k + 0 * i_k) // SCALE_BLOCK",
    }
)
def test_a_mutant_of_the_row_products_that_scales_otherwise_is_found(
    failing_mutant: FailingMutant, edit: Edit, device: str
) -> None:
    with failing_mutant(rows, edit) as mutant:
        assert_rows_agree(mutant, Case((0, 2, 1), 208, 144, narrow="fp8", device=device))


def test_a_mutant_of_the_sum_is_found(failing_mutant: FailingMutant, device: str) -> None:
    with failing_mutant(down, ("p_rows + token * TOP_K * width", "p_rows + token * width")) as mutant:
        assert_sums_agree(mutant, device)
