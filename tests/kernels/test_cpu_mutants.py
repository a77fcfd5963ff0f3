"""Each kernel for CPUs agrees with its reference, and each mutant of it fails the same check.

A mutant drops a mask or uses a wrong offset. No mutant reads or writes beyond the kernel's arguments."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from moiety_kernels.attention_input import AttentionInputPlan
from moiety_kernels.attention_input import cpu as attention_input
from moiety_kernels.attention_input.reference import attention_input as attention_input_reference
from moiety_kernels.causal_conv import CausalConvWeights
from moiety_kernels.causal_conv import cpu as causal_conv
from moiety_kernels.causal_conv.reference import causal_conv as causal_conv_reference
from moiety_kernels.compressed_attention import cpu as compressed_attention
from moiety_kernels.cpu import compiling, paths
from moiety_kernels.embedding import cpu as embedding
from moiety_kernels.embedding.reference import embedding as embedding_reference
from moiety_kernels.expert_count import ExpertSums, owner_code
from moiety_kernels.expert_count import cpu as expert_count
from moiety_kernels.expert_count.reference import count_picks as count_picks_reference
from moiety_kernels.gated_delta import cpu as gated_delta
from moiety_kernels.gated_delta.reference import delta_gates as delta_gates_reference
from moiety_kernels.gated_delta.reference import gated_delta_rule as gated_delta_reference
from moiety_kernels.gated_norm import cpu as gated_norm
from moiety_kernels.gated_norm.reference import gated_norm as gated_norm_reference
from moiety_kernels.head_linear import cpu as head_linear
from moiety_kernels.head_linear.reference import head_linear as head_linear_reference
from moiety_kernels.hyper_connections import cpu as hyper_connections
from moiety_kernels.input_order import cpu as input_order
from moiety_kernels.kv_store.caches import LatentCache, LayerCache
from moiety_kernels.latent_input import LatentInputPlan
from moiety_kernels.latent_input import cpu as latent_input
from moiety_kernels.latent_input import reference as latent_reference
from moiety_kernels.layer_norm import cpu as layer_norm
from moiety_kernels.lightning_indexer import cpu as lightning_indexer
from moiety_kernels.lightning_indexer.reference import select_tokens as select_tokens_reference
from moiety_kernels.linear import cpu as linear
from moiety_kernels.linear.reference import linear as linear_reference
from moiety_kernels.linear_attention import cpu as linear_attention
from moiety_kernels.linear_attention.reference import linear_attention as linear_attention_reference
from moiety_kernels.low_rank import Factors
from moiety_kernels.low_rank import cpu as low_rank
from moiety_kernels.low_rank import reference as low_rank_reference
from moiety_kernels.moe import RELU2, SILU
from moiety_kernels.moe import cpu as moe
from moiety_kernels.moe.reference import experts as experts_reference
from moiety_kernels.output_gate import cpu as output_gate
from moiety_kernels.output_gate.reference import output_gate as output_gate_reference
from moiety_kernels.paged_attention import cpu as paged_attention
from moiety_kernels.paged_attention import cpu_pairs
from moiety_kernels.paged_attention.inputs import AttentionParameters
from moiety_kernels.paged_attention.reference import paged_attention as paged_attention_reference
from moiety_kernels.rms_norm import cpu as rms_norm
from moiety_kernels.rms_norm.reference import rms_norm as rms_norm_reference
from moiety_kernels.rope.inputs import RotaryInputs
from moiety_kernels.route import RoutingSpec
from moiety_kernels.route import cpu as route
from moiety_kernels.route.reference import route as route_reference
from moiety_kernels.scaled_sum import cpu as scaled_sum
from moiety_kernels.selective_scan import cpu as selective_scan
from moiety_kernels.selective_scan.reference import selective_scan as selective_scan_reference

from .conftest import Paged
from .deepseek_v4_checks import assert_close, compresses, connects_streams
from .ordered_checks import gathers, mixes_ordered_experts
from .recurrent import TOKENS, delta_inputs, scan_inputs, sequences, states

Check = Callable[[ModuleType, Any], None]


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("several_threads")]  # each fault is compiled


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(0)


def embeds(kernel: ModuleType, _: Any) -> None:
    ids, table = torch.randint(50, (70,)), torch.randn(50, 48).bfloat16()
    for factor in (1.0, 3.0):
        assert torch.equal(kernel.embedding(ids, table, factor), embedding_reference(ids, table, torch.float32, factor))
    strange = torch.tensor([4, 49, 50, -1, 1 << 40, 0])
    nan_T = kernel.embedding(strange, table, 1.0).isnan().sum(dim=1)
    assert nan_T.tolist() == [0, 0, 48, 48, 48, 0]


def counts(kernel: ModuleType, _: Any) -> None:
    chosen = [torch.rand(40, 8).topk(2).indices.int() for _ in range(3)]
    slot = torch.randint(0, 4, (40,))
    slot[(chosen[0] == 0).any(dim=1)] = 0  # an expert that only padding tokens go to
    owner = torch.tensor([one and owner_code(one, 1 + t % 3, t // 2) for t, one in enumerate(slot.tolist())])
    found = []
    for count in (kernel.count_picks, count_picks_reference):
        sums = ExpertSums(*(torch.zeros(n, dtype=torch.int64) for n in ((4, 3, 8), (3,), (3, 8), (20,), (20, 3, 1))))
        for _ in range(2):
            count(chosen, owner, sums, expert_bytes=1001, num_with_weights=7)
        found.append(sums)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def normalizes(kernel: ModuleType, _: Any) -> None:
    x, delta, weight = torch.randn(70, 48), torch.randn(70, 48), torch.randn(48)
    assert_close(kernel.rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    total, normed = kernel.add_rms_norm(x.clone(), delta.clone(), weight, 1e-5)
    assert_close(total, x + delta)
    assert_close(normed, rms_norm_reference(x + delta, weight, 1e-5))


def normalizes_by_mean(kernel: ModuleType, _: Any) -> None:
    x, delta, weight, bias = torch.randn(70, 48) + 2, torch.randn(70, 48), torch.randn(48), torch.randn(48)
    assert_close(kernel.layer_norm(x, weight, bias, 1e-6), torch.layer_norm(x, (48,), weight, bias, 1e-6))
    total, normed = kernel.add_layer_norm(x.clone(), delta.clone(), weight, bias, 1e-5)
    assert_close(total, x + delta)
    assert_close(normed, torch.layer_norm(x + delta, (48,), weight, bias, 1e-5))


def scales(kernel: ModuleType, _: Any) -> None:
    x, y, factors, row = torch.randn(90, 112), torch.randn(90, 112), torch.randn(99), torch.randint(99, (90,))
    assert_close(kernel.scaled_sum(x, 0.3, y, -2.0), 0.3 * x - 2.0 * y)
    assert_close(kernel.scaled_sum(x, 0.3, None, 1.0), x * 0.3)
    assert_close(kernel.scale_rows(x, factors[:90], None), x * factors[:90, None])
    assert_close(kernel.scale_rows(x, factors, row), x * factors[row, None])


def routes(kernel: ModuleType, _: Any) -> None:
    grouped = {"scoring": "sigmoid", "num_groups": 4, "top_groups": 2, "group_score": "best_two", "scale": 2.5}
    for more in ({}, grouped, {"scoring": "softmax_chosen"}, {"scoring": "sqrt_softplus"}):
        spec = RoutingSpec(16, 3, renormalize=True, **more)
        logits, bias = 3 * torch.randn(70, 16), torch.randn(16) if more is grouped else None
        weight, expert = kernel.route(logits, spec, bias)
        expected_weight, expected_expert = route_reference(logits, spec, bias)
        assert torch.equal(expert, expected_expert)
        assert_close(weight, expected_weight)


def multiplies(kernel: ModuleType, _: Any) -> None:
    x, weight, bias = torch.randn(200, 64).bfloat16().float(), torch.randn(515, 64).bfloat16() / 8, torch.randn(515)
    assert_close(kernel.linear(x, weight, bias), linear_reference(x, weight, bias))


def multiplies_heads(kernel: ModuleType, _: Any) -> None:
    x, weight = torch.randn(130, 3, 64).bfloat16().float(), torch.randn(3, 40, 64).bfloat16() / 8
    assert_close(kernel.head_linear(x, weight), head_linear_reference(x, weight))


def adds_low_rank(kernel: ModuleType, _: Any) -> None:
    factors = Factors(torch.randn(3, 2 * 4, 32), torch.randn(3, 4, 48), (32, 16))
    x, slots, out = torch.randn(9, 32), torch.tensor([0, -1, 2, 1, 1, -1, 0, 2, 2]), torch.randn(9, 48)
    expected = out.clone()
    low_rank_reference.add(expected, x, factors, slots)
    kernel.add(out, x, factors, slots)
    assert_close(out, expected)


def attends(kernel: ModuleType, paged: Any) -> None:
    inputs = paged([1, 1, 7, 130], [1, 300, 7, 150], 6, 2, 64, 5)
    for window, sinks in ((None, None), (37, 3 * torch.randn(6))):
        parameters = AttentionParameters(0.125, window, sinks)
        ours = kernel.paged_attention(*inputs, parameters)
        assert_close(ours, paged_attention_reference(*inputs, parameters), 2e-5)


def attends_in_pairs(kernel: ModuleType, paged: Paged) -> None:
    """By the task of `kernel`; what rounding does is far below what a fault does."""
    inputs = paged([1, 1, 7, 130], [1, 300, 7, 150], 6, 2, 64, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_pairs, "task", kernel.task)
        patch.setattr(cpu_pairs, "usable", lambda: True)
        for window, sinks in ((None, None), (37, 3 * torch.randn(6))):
            parameters = AttentionParameters(0.125, window, sinks, rounds=True)
            ours = paged_attention.paged_attention(*inputs, parameters)
            assert_close(ours, paged_attention_reference(*inputs, parameters), 2e-2)


def prepares(kernel: ModuleType, _: Any) -> None:
    qkv, angles, positions = torch.randn(37, 10 * 32), torch.randn(500, 8), torch.randint(0, 500, (37,))
    slots = torch.randperm(80)[:37]
    slots[5::9] = -1
    plan = AttentionInputPlan(torch.randn(32), torch.randn(32), 1e-6, 2.0)
    caches = [torch.full((10, 2, 8, 32), 7.0) for _ in range(4)]
    rotary = RotaryInputs(angles.cos(), angles.sin(), positions)
    expected = attention_input_reference(qkv.clone(), plan, rotary, LayerCache(*caches[:2]), slots)
    assert_close(kernel.attention_input(qkv, plan, rotary, LayerCache(*caches[2:]), slots), expected)
    assert_close(caches[2], caches[0])
    assert torch.equal(caches[3], caches[1])


def prepares_latent(kernel: ModuleType, _: Any) -> None:
    x, angles, positions = torch.randn(37, 48 + 64 + 16), torch.randn(500, 8), torch.randint(0, 500, (37,))
    slots = torch.randperm(80)[:37]
    plan, rotary = (
        LatentInputPlan(torch.randn(64), torch.randn(48), 1e-6),
        RotaryInputs(angles.cos(), angles.sin(), positions),
    )
    ours, theirs = (LatentCache(torch.full((10, 8, 80), 7.0), 64) for _ in range(2))
    expected = latent_reference.latent_input(x.clone(), plan, rotary, theirs, slots)
    assert_close(kernel.latent_input(x, plan, rotary, ours, slots), expected)
    assert_close(ours.rows_NPL, theirs.rows_NPL)
    q, key_up = torch.randn(37, 3, 48).bfloat16().float(), torch.randn(3, 40, 32).bfloat16() / 8
    assert_close(kernel.latent_queries(q, key_up, rotary), latent_reference.latent_queries(q, key_up, rotary))


def mixes_experts(kernel: ModuleType, _: Any) -> None:
    x, up, down = torch.randn(90, 64), torch.randn(4, 96, 64) / 8, torch.randn(4, 64, 48) / 7
    weight, expert = torch.rand(90, 2), torch.rand(90, 4).topk(2).indices.int()
    for activation, firsts in ((SILU, up), (RELU2, up[:, :48].contiguous())):
        ours = kernel.experts(x, weight, expert, firsts, down, activation, None, None)
        assert_close(ours, experts_reference(x, weight, expert, firsts, down, activation=activation))

    mixes_ordered_experts(kernel)


def convolves(kernel: ModuleType, _: Any) -> None:
    x, ours = torch.randn(TOKENS, 64), states(3, 64)
    weights = CausalConvWeights(torch.randn(4, 64), torch.randn(64), silu=True)
    theirs = ours.clone()
    expected = causal_conv_reference(x, weights, theirs, sequences())
    assert_close(kernel.causal_conv(x, weights, ours, sequences()), expected)
    assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))


def scans(kernel: ModuleType, _: Any) -> None:
    inputs, ours = scan_inputs(80, 16, torch.float32), states(16, 80)
    theirs = ours.clone()
    expected = selective_scan_reference(inputs, theirs, sequences())
    assert_close(kernel.selective_scan(inputs, ours, sequences()), expected)
    assert_close(ours.nan_to_num(7), theirs.nan_to_num(7))


def recurs(kernel: ModuleType, _: Any) -> None:
    projected, decay, bias = 9 * torch.randn(70, 6), torch.randn(3), torch.randn(3)
    for ours, theirs in zip(
        kernel.delta_gates(projected, decay, bias), delta_gates_reference(projected, decay, bias), strict=True
    ):
        assert_close(ours, theirs)
    for gates in (1, 32):
        inputs, ours = delta_inputs(32, 128, gates, torch.float32), states(4, 32, 128)
        theirs = ours.clone()
        expected = gated_delta_reference(*inputs, theirs, sequences())
        assert_close(kernel.gated_delta_rule(*inputs, ours, sequences()), expected)
        assert_close(ours.nan_to_num(7), theirs.nan_to_num(7))


def decays(kernel: ModuleType, _: Any) -> None:
    heads, log_decay, _ = delta_inputs(32, 128, 1, torch.float32)
    ours = states(4, 32, 128)
    theirs, gates = ours.clone(), 4 * log_decay.squeeze(2)  # near 0, and further
    expected = linear_attention_reference(heads, gates, theirs, sequences())
    assert_close(kernel.linear_attention(heads, gates, ours, sequences()), expected)
    assert_close(ours.nan_to_num(7), theirs.nan_to_num(7))


def normalizes_with_gates(kernel: ModuleType, _: Any) -> None:
    x, z = torch.randn(70, 3, 32), torch.randn(70, 96 + 32)[:, 32:].view(70, 3, 32)
    for gate, weight in (
        ("silu", torch.rand(1, 32)),
        ("sigmoid", torch.rand(3, 32)),
        ("silu_first", torch.rand(3, 32)),
    ):
        assert_close(kernel.gated_norm(x, z, weight, 1e-6, gate), gated_norm_reference(x, z, weight, 1e-6, gate))


def gates(kernel: ModuleType, _: Any) -> None:
    out = torch.randn(9, 6, 20)
    for columns, kind in ((6, "softplus"), (120, "sigmoid"), (120, "gelu_tanh")):
        gate = 12 * torch.randn(9, columns)
        assert_close(kernel.output_gate(out.clone(), gate, kind), output_gate_reference(out, gate, kind))


def selects(kernel: ModuleType, paged: Paged) -> None:
    q, cache, metadata = paged([1, 1, 7, 130], [1, 300, 7, 600], 6, 1, 64, 5)
    keys = cache.k_NGPd
    for weight, few_values in ((torch.randn(139, 6), False), (torch.ones(139, 6), True)):
        query, key = (q.sign() * (torch.rand(q.shape) < 0.03), keys.sign()) if few_values else (q, keys)
        tensors = query, weight, key.squeeze(1), metadata
        for most in (9, 290):
            slots, counts = kernel.select_tokens(*tensors, most)
            expected, expected_counts = select_tokens_reference(*tensors, most)
            assert torch.equal(counts, expected_counts)
            is_void = torch.arange(most) >= counts[:, None]
            assert torch.equal(slots.masked_fill(is_void, 0), expected)


CHECKS: dict[ModuleType, Check] = {
    compressed_attention: compresses,
    hyper_connections: connects_streams,
    causal_conv: convolves,
    gated_delta: recurs,
    gated_norm: normalizes_with_gates,
    lightning_indexer: selects,
    linear_attention: decays,
    embedding: embeds,
    expert_count: counts,
    rms_norm: normalizes,
    layer_norm: normalizes_by_mean,
    scaled_sum: scales,
    route: routes,
    linear: multiplies,
    head_linear: multiplies_heads,
    low_rank: adds_low_rank,
    paged_attention: attends,
    cpu_pairs: attends_in_pairs,
    attention_input: prepares,
    latent_input: prepares_latent,
    moe: mixes_experts,
    selective_scan: scans,
    output_gate: gates,
    input_order: gathers,
}
MUTANTS = [
    (compressed_attention, "source_position % runs.size\n", "(source_position + 1) % runs.size\n"),
    (compressed_attention, "source_position) + 4 * series\n", "source_position)\n"),
    (compressed_attention, "weight * load_f32(value, c)", "weight * load_f32(gate, c)"),
    (compressed_attention, "token * args.most + k", "task + k"),
    (compressed_attention, "store_i32(args.seen_T, task, num_rows + count)", "store_i32(args.seen_T, task, num_rows)"),
    (hyper_connections, "(t * n + j) * n + i", "(t * n + i) * n + j"),
    (hyper_connections, "for _ in range(args.iterations - 1):", "for _ in range(args.iterations):"),
    (hyper_connections, "2.0 * _sigmoid", "_sigmoid"),
    (causal_conv, "source = t - taps + 1 + tap", "source = t - taps + tap"),
    (causal_conv, "if not has_state:", "if has_state:"),
    (causal_conv, "source = end - taps + 1 + place", "source = end - taps + place"),
    (gated_delta, "row[column] * decay)", "row[column])"),
    (gated_delta, "group = head // shared.sharing", "group = head % shared.sharing"),
    (gated_delta, "if not has_state:", "if has_state:"),
    (gated_delta, "products(k, decay, width, decayed_k)", "products(k, k, width, decayed_k)"),
    (gated_norm, "r // heads * args.gate_stride", "r // heads * 4 * heads * width"),
    (gated_delta, "load_f32(row, heads + m)", "load_f32(row, m)"),
    (gated_norm, "if args.is_sigmoid:", "if not args.is_sigmoid:"),
    (gated_norm, "            x_V = out_V\n", ""),
    (gated_norm, "r % heads * args.weight_stride", "r // heads * args.weight_stride"),
    (lightning_indexer, "larger(row[i], zero)", "larger(row[i], row[i])"),
    (lightning_indexer, "value == least and equal == 0", "value == least"),
    (lightning_indexer, "load_f32(args.weight_TH, token * heads + h)", "load_f32(args.weight_TH, h)"),
    (lightning_indexer, "else -1 - bits", "else bits"),
    (linear_attention, "e.fma(former, added, key * values[n])", "key * values[n]"),
    (linear_attention, "kept=1.0 if is_near_one else 0.0", "kept=1.0"),
    (linear_attention, "math.expm1(gate) if is_near_one", "math.exp(gate) if is_near_one"),
    (linear_attention, "4 * width * (head // shared.sharing)", "4 * width * (head % shared.sharing)"),
    (linear_attention, "if not has_state:", "if has_state:"),
    (selective_scan, "state[0] * decay)", "state[0])"),
    (selective_scan, "t * args.gate_stride + own", "t * args.gate_stride + column"),
    (selective_scan, "if not has_state:", "if has_state:"),
    (selective_scan, "args.read_TN + t * args.read_stride", "args.read_TN + begin * args.read_stride"),
    (embedding, "load_i64(token_ids_T, t)", "load_i64(token_ids_T, task * _BLOCK)"),
    (embedding, "token_id >= args.rows", "token_id > args.rows"),
    (embedding, "if token_id < 0 or", "if"),
    (embedding, "if factor != 1.0:", "if factor == 1.0:"),
    (expert_count, "if slot != 0:", "if slot >= 0:"),
    (expert_count, "+ slot * args.slot_bytes", "+ (slot & 1) * args.slot_bytes"),
    (expert_count, "expert) + weight)", "expert) + 1)"),
    (expert_count, "if e < args.with_weights else 0", "if e <= args.with_weights else 0"),
    (expert_count, "rest += has % num_tokens", "rest = has % num_tokens"),
    (expert_count, "if owner & SLOT_MASK != 0:", "if owner >= 0:"),
    (expert_count, "args.bits_W + part * args.part_bytes", "args.bits_W"),
    (expert_count, "store_i64(bits_W, w, 0)", "store_i64(bits_W, w, 1)"),
    (layer_norm, "load_f32(x_D, i) - mean", "load_f32(x_D, i)"),
    (layer_norm, "args.delta_TD + 4 * width * t, width", "args.delta_TD, width"),
    (layer_norm, "args.bias_D, width, 1.0", "args.bias_D, width, 0.0"),
    (scaled_sum, "args.num_values - first, _BLOCK", "args.num_values - first, _BLOCK - 16"),
    (scaled_sum, "load_i64(args.row_T, row)", "load_i64(args.row_T, 0)"),
    (rms_norm, "sum_squares(x_D, width) / width", "sum_squares(x_D, width - 16) / width"),
    (rms_norm, "delta_TD + 4 * width * t, width", "delta_TD + 4 * width * (task * _BLOCK), width"),
    (route, "if better >= top_groups:", "if better > top_groups:"),
    (
        route,
        "for e in range(1, experts):\n                if load",
        "for e in range(1, experts - 1):\n                if load",
    ),
    (route, "math.log1p(math.exp(logit))", "math.exp(logit)"),
    (linear, "args.x_MK + row * x_stride, x_stride", "args.x_MK, x_stride"),
    (head_linear, "head * n + column, num_columns", "column, num_columns"),
    (low_rank, "load_f32(inner, part * rank + j)", "load_f32(inner, j)"),
    (paged_attention, "end_seen(args, position) - start)", "end_seen(args, position) + 1 - start)"),
    (paged_attention, "number = load_i32(table, block)", "number = load_i32(table, 0)"),
    (
        cpu_pairs,
        "end_seen(args, position + i // sharing) - start",
        "end_seen(args, position + i // sharing) + 1 - start",
    ),
    (attention_input, "_normalize(k, kv_heads * width, k_norm", "_normalize(k, width, k_norm"),
    (
        attention_input,
        "if not args.rotates_first:\n            rotate_heads(q, heads + kv_heads,",
        "if not args.rotates_first:\n            rotate_heads(q, heads,",
    ),
    (attention_input, "if args.rotates_first:", "if not args.rotates_first:"),
    (attention_input, "if slot < 0:\n            continue", "if slot < 0:\n            slot = 0"),
    (latent_input, "load_i64(positions_T, t)\n        rotate", "load_i64(positions_T, 0)\n        rotate"),
    (latent_input, "q_THd + t * token_bytes + head * head_bytes", "q_THd + t * token_bytes"),
    (output_gate, "gate > _LINEAR else math.log1p(math.exp(gate))", "True else 0.0"),
    (output_gate, "0.044715 * gate * gate * gate", "0.044715 * gate * gate"),
    (output_gate, "args.out_THd + 4 * columns * shared_by * t", "args.out_THd + 4 * columns * t"),
    (input_order, "args.x_TK + t * args.x_stride", "args.x_TK + 4 * width * t"),
    (input_order, "index = load_i32(order_K, k)", "index = k"),
    (moe, "args.up_order_ED + 4 * width * item.expert", "args.up_order_ED"),
    (moe, "args.down_order_EF + 4 * hidden * item.expert", "args.down_order_EF"),
    (moe, "if layer.down_order_EF:", "if layer.down_order_EF < 0:"),
    (moe, "expert * args.num_ups + column", "expert * 2 * hidden + column"),
    (moe, "x_TD + pair // top_k * x_stride", "x_TD + pair // top_k // 2 * x_stride"),
    (moe, "expert * width + column, num_columns, hidden", "column, num_columns, hidden"),
]


def named(module: ModuleType) -> str:
    return module.__name__.removeprefix("moiety_kernels.")


@pytest.mark.parametrize("module", CHECKS, ids=named)
def test_a_kernel_agrees_with_its_reference(module: ModuleType, paged: Any) -> None:
    if module is cpu_pairs and not paths.is_usable(paths.PAIRS):
        pytest.skip("this processor does not multiply in pairs: test_emulated.py runs this with that emulated")
    CHECKS[module](module, paged)


@pytest.mark.parametrize(
    ("module", "old", "new"), [pytest.param(*one, id=f"{named(one[0])}: {one[1][:40]}") for one in MUTANTS]
)
def test_a_mutant_is_found(
    module: ModuleType, old: str, new: str, mutated: Any, paged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if module is cpu_pairs and not paths.is_usable(paths.PAIRS):
        pytest.skip("this processor does not multiply in pairs: test_emulated.py runs this with that emulated")
    monkeypatch.setattr(compiling, "use_cache", lambda: False)  # nothing is cached of a source that no longer exists
    mutant = mutated(module, old, new)
    with pytest.raises(AssertionError):
        CHECKS[module](mutant, paged)


def test_every_kernel_for_cpus_has_mutants() -> None:
    import importlib
    import pkgutil

    import moiety_kernels

    packages = [one.name for one in pkgutil.iter_modules(moiety_kernels.__path__) if one.ispkg]
    found = {
        name
        for name in packages
        for one in pkgutil.iter_modules(importlib.import_module(f"moiety_kernels.{name}").__path__)
        if one.name == "cpu"
    }
    assert found == {named(module).partition(".")[0] for module, _, _ in MUTANTS}
