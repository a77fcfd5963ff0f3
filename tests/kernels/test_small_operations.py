"""Operations without matrix products agree with their references: embedding, norms, routing, gates and positions."""

from __future__ import annotations

import pytest
import torch

from moiety_kernels.attention_input import AttentionInputPlan, attention_input
from moiety_kernels.checks import KernelInputError
from moiety_kernels.embedding import embedding
from moiety_kernels.embedding.reference import embedding as embedding_reference
from moiety_kernels.kv_store import kv_store
from moiety_kernels.kv_store.caches import LayerCache
from moiety_kernels.layer_norm import add_layer_norm, layer_norm
from moiety_kernels.layer_norm.reference import layer_norm as layer_norm_reference
from moiety_kernels.output_gate import GateKind, output_gate
from moiety_kernels.output_gate.reference import output_gate as output_gate_reference
from moiety_kernels.rms_norm import add_rms_norm, rms_norm
from moiety_kernels.rms_norm.reference import rms_norm as rms_norm_reference
from moiety_kernels.rope import rope
from moiety_kernels.rope.inputs import RotaryInputs
from moiety_kernels.route import RoutingSpec, group, group_by_expert, route
from moiety_kernels.route.reference import route as route_reference
from moiety_kernels.routed_linear import routed_linear
from moiety_kernels.routed_linear.reference import routed_linear as routed_linear_reference
from moiety_kernels.scaled_sum import reference as scaled_sum_reference
from moiety_kernels.scaled_sum import scale_rows, scaled_sum

from .reference_checks import DEVICE, WEIGHTS, close, normal, poisoned_memory, same_numbers_every_time

__all__ = ["poisoned_memory", "same_numbers_every_time"]  # fixtures

pytestmark = pytest.mark.usefixtures("several_threads")


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("tokens", [1, 31, 70])
@pytest.mark.parametrize(("width", "factor"), [(16, 1.0), (1024, 32.0), (48, 0.3), (60, 2.0)])
def test_embedding_finds_the_very_rows(tokens: int, width: int, factor: float, dtype: torch.dtype) -> None:
    whole = normal(50, width + 16).to(dtype)
    table, token_ids = whole[:, :width], torch.randint(50, (tokens,), device=DEVICE)
    found = embedding(token_ids, table, torch.float32, factor)
    assert torch.equal(found, embedding_reference(token_ids, table, torch.float32, factor))


@pytest.mark.parametrize("rows", [1, 31, 70])
@pytest.mark.parametrize("width", [16, 48, 1024, 60])
def test_rms_norm_alone_and_after_an_addition(rows: int, width: int) -> None:
    x, delta, weight = normal(rows, width), normal(rows, width), normal(width)
    assert close(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    total = x + delta
    ours_total, ours = add_rms_norm(x.clone(), delta.clone(), weight, 1e-5)
    assert close(ours_total, total)
    assert close(ours, rms_norm_reference(total, weight, 1e-5))


@pytest.mark.parametrize("rows", [1, 31, 70])
@pytest.mark.parametrize("width", [16, 48, 1024, 60])
def test_layer_norm_alone_and_after_an_addition(rows: int, width: int) -> None:
    x, delta, weight, bias = normal(rows, width) + 3, normal(rows, width), normal(width), normal(width)
    assert close(layer_norm(x, weight, bias, 1e-6), layer_norm_reference(x, weight, bias, 1e-6))
    total = x + delta
    ours_total, ours = add_layer_norm(x.clone(), delta.clone(), weight, bias, 1e-5)
    assert close(ours_total, total)
    assert close(ours, layer_norm_reference(total, weight, bias, 1e-5))


@pytest.mark.parametrize("shape", [(1, 16), (31, 48), (70, 1024), (3, 5, 7), (70, 4, 32), (0, 16)])
def test_scaled_sums_and_rows_with_a_factor_each(shape: tuple[int, ...]) -> None:
    x, y = normal(*shape), normal(*shape)
    assert torch.equal(scaled_sum(x, 0.3), x * 0.3)
    assert torch.equal(scaled_sum(x, 1.0, y), x + y)
    assert torch.allclose(scaled_sum(x, 0.3, y, -2.0), scaled_sum_reference.scaled_sum(x, 0.3, y, -2.0), atol=1e-6)
    factors, row = normal(90), torch.randint(90, shape[:1], device=DEVICE)
    assert torch.equal(scale_rows(x, factors, row), scaled_sum_reference.scale_rows(x, factors, row))
    assert torch.equal(scale_rows(x, factors, row.int()), scale_rows(x, factors, row))
    single = normal(shape[0], 1)  # weights of routed experts
    assert torch.equal(scale_rows(single, factors, row.int()), single * factors[row, None])
    apart = torch.cat((x, y), dim=1)[:, : shape[1]]  # rows of a wider tensor
    assert torch.equal(scale_rows(apart, factors, row), scaled_sum_reference.scale_rows(x, factors, row))
    in_order = factors[: shape[0]].unsqueeze(1).contiguous()
    assert torch.equal(scale_rows(x, in_order), scaled_sum_reference.scale_rows(x, in_order, None))


@pytest.mark.parametrize(("rows", "num_experts", "widths"), [(0, 3, (16, 32)), (1, 4, (48, 16)), (70, 6, (32, 80))])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_routed_linear(rows: int, num_experts: int, widths: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = normal(rows, widths[0]), normal(num_experts, widths[1], widths[0])
    expert = torch.randint(num_experts - 1, (rows,), device=DEVICE, dtype=dtype)  # one has no row
    found = routed_linear(x, weight, expert)
    assert torch.allclose(found, routed_linear_reference(x, weight, expert), atol=1e-4)
    for row in range(min(rows, 3)):
        assert torch.equal(routed_linear(x[row : row + 1], weight, expert[row : row + 1]), found[row : row + 1])
    with pytest.raises(KernelInputError, match="each row has one expert"):
        routed_linear(x, weight, expert.new_zeros(rows + 1))


def test_tensors_of_different_shapes_are_not_added() -> None:
    with pytest.raises(KernelInputError, match="x and y must have one shape and dtype"):
        scaled_sum(normal(3, 16), 1.0, normal(3, 32))
    with pytest.raises(KernelInputError, match="each row has a factor"):
        scale_rows(normal(3, 16), normal(4))


@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 4, 4), (5, 8, 2), (70, 60, 4), (200, 128, 8)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_route(tokens: int, num_experts: int, top_k: int, renormalize: bool) -> None:
    logits, spec = normal(tokens, num_experts, scale=3), RoutingSpec(num_experts, top_k, renormalize)
    weight, expert = route(logits, spec)
    expected_weight, expected_expert = route_reference(logits, spec)
    assert torch.equal(expert, expected_expert)
    assert close(weight, expected_weight)


def test_groups_list_every_pair_once_in_the_order_of_experts() -> None:
    expert = torch.randint(0, 6, (40, 3), dtype=torch.int32, device=DEVICE)
    order, counts = group_by_expert(expert, 6)
    assert sorted(order.tolist()) == list(range(120))
    assert expert.flatten()[order].tolist() == sorted(expert.flatten().tolist())
    assert counts.tolist() == [int((expert == e).sum()) for e in range(6)]


@pytest.mark.parametrize(("tokens", "num_experts", "tile_rows"), [(0, 3, 4), (1, 8, 16), (40, 6, 4), (65, 3, 64)])
def test_tiles_cover_the_rows_of_each_expert(tokens: int, num_experts: int, tile_rows: int) -> None:
    expert = torch.randint(0, num_experts, (tokens, 3), dtype=torch.int32, device=DEVICE)
    groups = group(expert, num_experts, tile_rows)
    order, counts = group_by_expert(expert, num_experts)
    starts = [0, *counts.cumsum(0).tolist()]
    tiles = [(e, row) for e in range(num_experts) for row in range(starts[e], starts[e + 1], tile_rows)]
    assert groups.order_R.tolist() == order.tolist()
    assert groups.starts_E1.tolist() == starts
    assert groups.num_tiles_1.tolist() == [len(tiles)]
    unused = len(groups.tiles_N2) - len(tiles)
    assert [(e, row) for e, row in groups.tiles_N2.tolist()] == tiles + [(-1, -1)] * unused
    assert 0 <= unused <= num_experts


@pytest.mark.skipif(DEVICE != "cpu", reason="a cache of bfloat16 beside float32 queries is a CPU's")
def test_a_cache_of_bfloat16_rounds_as_torch_does() -> None:
    tie, above = 1.0 + 2**-8, 1.0 + 2**-8 + 2**-20
    values = torch.tensor([tie, -tie, above, 1.0 + 3 * 2**-8, 3.4e38, 1e-40, 0.0, float("inf")]).repeat(4)
    values[8], values[9:] = float("nan"), values[9:] * torch.rand(23)
    caches = [torch.zeros(1, 1, 1, 32, dtype=torch.bfloat16) for _ in range(2)]
    qkv = torch.cat([torch.zeros(32), torch.zeros(32), values])[None]
    zero = torch.zeros(1, dtype=torch.int64)
    still = RotaryInputs(torch.ones(1, 16), torch.zeros(1, 16), zero)
    attention_input(qkv, AttentionInputPlan(None, None, 1e-6, None), still, LayerCache(*caches), zero)
    assert torch.equal(caches[1].flatten().nan_to_num(7.0), values.bfloat16().nan_to_num(7.0))


def test_values_beyond_float8_are_stored_as_its_largest_number() -> None:
    caches = [torch.zeros(2, 1, 4, 8, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2)]
    rows = torch.tensor([3.0, 1e4, -1e9], device=DEVICE)[:, None, None].expand(3, 1, 8)
    kv_store(rows, -rows, LayerCache(*caches), torch.tensor([1, 6, 0], device=DEVICE))
    assert [cache.float()[[0, 1, 0], 0, [1, 2, 0], 0].tolist() for cache in caches] == [[3, 448, -448], [-3, -448, 448]]


@pytest.mark.parametrize(
    ("columns", "kind"), [(6, "softplus"), (6, "sigmoid"), (120, "softplus"), (120, "sigmoid"), (120, "gelu_tanh")]
)
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_output_gate(columns: int, kind: GateKind, tokens: int) -> None:
    out, gate = normal(tokens, 6, 20), normal(tokens, columns, scale=15.0)
    expected = output_gate_reference(out, gate, kind)
    ours = output_gate(out.clone(), gate, kind)
    assert ours.shape == out.shape
    assert tokens == 0 or close(ours, expected)


def test_a_gate_of_another_number_of_heads_is_refused() -> None:
    with pytest.raises(KernelInputError, match=r"shape \(3, 5\); it needs 6 or 120 columns for 3 tokens"):
        output_gate(normal(3, 6, 20), normal(3, 5), "sigmoid")


def test_rope_leaves_lengths_and_the_rest_of_a_head_as_they_are() -> None:
    x, angles = normal(11, 3, 40), normal(50, 12)
    positions = torch.randint(0, 50, (11,), device=DEVICE)
    rotated = rope(x, angles.cos(), angles.sin(), positions)
    assert torch.equal(rotated[..., 24:], x[..., 24:])
    assert close(rotated.norm(dim=-1), x.norm(dim=-1))
    assert not close(rotated, x)
