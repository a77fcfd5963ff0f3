"""The operations of recurrent layers agree with their definitions, which agree with transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moiety_kernels.causal_conv import CausalConvWeights, causal_conv
from moiety_kernels.causal_conv import reference as conv_reference
from moiety_kernels.checks import KernelInputError
from moiety_kernels.gated_delta import gated_delta_rule
from moiety_kernels.gated_delta import reference as delta_reference
from moiety_kernels.gated_norm import Gate, gated_norm
from moiety_kernels.gated_norm import reference as norm_reference
from moiety_kernels.linear_attention import linear_attention
from moiety_kernels.linear_attention import reference as linear_reference
from moiety_kernels.recurrent.inputs import RecurrentHeads, RecurrentSequences
from moiety_kernels.selective_scan import reference as scan_reference
from moiety_kernels.selective_scan import selective_scan
from moiety_kernels.selective_scan.inputs import ScanInputs

from .recurrent import TOKENS, delta_inputs, scan_inputs, sequences, states

pytestmark = pytest.mark.usefixtures("several_threads")


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(0)


def one_sequence(count: int, *, has_state: bool) -> RecurrentSequences:
    """One sequence of `count` tokens, in the first slot."""
    has_state_S, start_S1 = (torch.tensor(one, dtype=torch.int32) for one in ([int(has_state)], [0, count]))
    return RecurrentSequences(torch.tensor([0]), has_state_S, start_S1, max_query=count)


@pytest.mark.parametrize(("width", "value_width", "gates"), [(64, 128, 1), (48, 64, 48), (20, 24, 1)])
def test_the_recurrence(width: int, value_width: int, gates: int) -> None:
    inputs, ours = delta_inputs(width, value_width, gates, torch.float32), states(4, width, value_width)
    theirs = ours.clone()
    made = gated_delta_rule(*inputs, ours, sequences())
    expected = delta_reference.gated_delta_rule(*inputs, theirs, sequences())
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_the_definition_is_that_of_transformers() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as oracle  # takes a second, in this test alone

    heads, log_decay, beta = delta_inputs(32, 48, 1, torch.float32)
    q, k, v, log_decay, beta = (
        one[:150].unsqueeze(0) for one in (heads.q_THK, heads.k_THK, heads.v_TMV, log_decay, beta)
    )
    expected, state = oracle.torch_chunk_gated_delta_rule(
        q, k, v, log_decay.squeeze(3), beta, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    ours = torch.full((1, 4, 32, 48), float("nan"))
    made = delta_reference.gated_delta_rule(
        RecurrentHeads(q[0], k[0], v[0]), log_decay[0], beta[0], ours, one_sequence(150, has_state=False)
    )
    torch.testing.assert_close(made, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours, state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_bits_do_not_depend_on_the_chunks(chunk: int) -> None:
    heads, log_decay, beta = delta_inputs(64, 64, 1, torch.float32)
    x, weight = torch.randn(TOKENS, 64), torch.randn(4, 64)
    found = []
    for some in (TOKENS, chunk):
        state, tail, outs = torch.full((1, 4, 64, 64), float("nan")), torch.full((1, 3, 64), float("nan")), []
        for first in range(0, TOKENS, some):
            part = slice(first, min(TOKENS, first + some))
            count = part.stop - part.start
            one = one_sequence(count, has_state=first > 0)
            mixed = causal_conv(x[part], CausalConvWeights(weight, silu=True), tail, one)
            parts = RecurrentHeads(heads.q_THK[part], heads.k_THK[part], heads.v_TMV[part])
            outs.append((mixed, gated_delta_rule(parts, log_decay[part], beta[part], state, one)))
        found.append([*(torch.cat(parts) for parts in zip(*outs, strict=True)), state, tail])
    assert all(torch.equal(whole, cut) for whole, cut in zip(*found, strict=True))


@pytest.mark.parametrize(("channels", "has_bias", "silu"), [(576, True, True), (48, False, False), (20, True, False)])
def test_the_convolution(channels: int, has_bias: bool, silu: bool) -> None:
    x, weight = torch.randn(TOKENS, channels + 16)[:, 16:], torch.randn(4, channels)
    weights, ours = CausalConvWeights(weight, torch.randn(channels) if has_bias else None, silu), states(3, channels)
    theirs = ours.clone()
    made = causal_conv(x, weights, ours, sequences())
    expected = conv_reference.causal_conv(x, weights, theirs, sequences())
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("gate", "rows"), [("silu", 1), ("sigmoid", 1), ("silu_first", 3)])
@pytest.mark.parametrize("width", [64, 20])
def test_the_gated_normalisation(gate: Gate, rows: int, width: int) -> None:
    x, z = torch.randn(70, 3, width), torch.randn(70, 4 * width)[:, width:].view(70, 3, width)
    weight = torch.rand(rows, width)
    made = gated_norm(x, z, weight, 1e-6, gate)
    torch.testing.assert_close(made, norm_reference.gated_norm(x, z, weight, 1e-6, gate), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value_width", [128, 24])
def test_linear_attention(value_width: int) -> None:
    heads, log_decay, _ = delta_inputs(48, value_width, 1, torch.float32)
    ours, gates = states(4, 48, value_width), 4 * log_decay.squeeze(2)  # near 0, and further
    theirs = ours.clone()
    made = linear_attention(heads, gates, ours, sequences())
    expected = linear_reference.linear_attention(heads, gates, theirs, sequences())
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    "operation", [linear_attention, linear_reference.linear_attention], ids=["kernel", "definition"]
)
def test_decays_near_one_are_exact_over_thousands_of_tokens(operation: Any) -> None:
    """The rates of MiniMax-Text-01's last layer; e^g in float32 would be 3e-5 off after so many tokens."""
    count, log_decay_M = 2500, -torch.tensor([3.75e-6, 9.375e-7, 5.86e-8])
    q, k, v = torch.nn.functional.silu(torch.randn(3, count, 3, 16)).unbind()
    exact = torch.zeros(3, 16, 16, dtype=torch.float64)
    for t in range(count):
        exact = exact * log_decay_M.double().exp()[:, None, None] + k[t].double()[:, :, None] * v[t].double()[:, None]
    state = torch.full((1, 3, 16, 16), float("nan"))
    gates = log_decay_M.expand(count, -1).contiguous()
    operation(RecurrentHeads(q, k, v), gates, state, one_sequence(count, has_state=False))
    assert ((state[0] - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)).max() < 2e-6


@pytest.mark.parametrize(("channels", "rows"), [(144, 16), (64, 5), (20, 16)])
def test_the_selective_scan(channels: int, rows: int) -> None:
    inputs, ours = scan_inputs(channels, rows, torch.float32), states(rows, channels)
    theirs = ours.clone()
    made = selective_scan(inputs, ours, sequences())
    expected = scan_reference.selective_scan(inputs, theirs, sequences())
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_the_definition_of_the_selective_scan_is_that_of_transformers() -> None:
    from transformers.models.jamba import modeling_jamba as oracle  # takes a second, in this test alone

    *of_tokens, rate, bias, skip = scan_inputs(24, 16, torch.float32)
    x, step, gate, write, read = (one[:150].T.unsqueeze(0) for one in of_tokens)
    expected, state = oracle.mamba_selective_scan(
        x, step, rate.T, write, read, D=skip, z=gate, delta_bias=bias, delta_softplus=True, return_last_state=True
    )
    ours = torch.full((1, 16, 24), float("nan"))
    one, parts = one_sequence(150, has_state=False), (part[:150] for part in of_tokens)
    made = scan_reference.selective_scan(ScanInputs(*parts, rate, bias, skip), ours, one)
    torch.testing.assert_close(made.T, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[0].T, state[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_bits_of_the_selective_scan_do_not_depend_on_the_chunks(chunk: int) -> None:
    *of_tokens, rate, bias, skip = scan_inputs(96, 16, torch.float32)
    found = []
    for some in (TOKENS, chunk):
        state, outs = torch.full((1, 16, 96), float("nan")), []
        for first in range(0, TOKENS, some):
            parts = [one[first : first + some] for one in of_tokens]
            one = one_sequence(len(parts[0]), has_state=first > 0)
            outs.append(selective_scan(ScanInputs(*parts, rate, bias, skip), state, one))
        found.append((torch.cat(outs), state))
    assert all(torch.equal(whole, cut) for whole, cut in zip(*found, strict=True))


def test_shapes_that_do_not_go_together_are_refused() -> None:
    heads, log_decay, beta = delta_inputs(64, 64, 1, torch.float32)
    with pytest.raises(KernelInputError, match="state has shape"):
        gated_delta_rule(heads, log_decay, beta, states(4, 64, 32), sequences())
    with pytest.raises(KernelInputError, match="one entry a head, or one a channel"):
        gated_delta_rule(heads, log_decay.expand(-1, -1, 3), beta, states(4, 64, 64), sequences())
    with pytest.raises(KernelInputError, match="tail has shape"):
        causal_conv(torch.randn(TOKENS, 64), CausalConvWeights(torch.randn(4, 64)), states(4, 64), sequences())
