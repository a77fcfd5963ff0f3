"""The operations of recurrent layers agree with their definitions, which agree with transformers'."""

from __future__ import annotations

import pytest
import torch

from moiety_kernels.causal_conv import causal_conv
from moiety_kernels.causal_conv import reference as conv_reference
from moiety_kernels.checks import KernelInputError
from moiety_kernels.gated_delta import gated_delta_rule
from moiety_kernels.gated_delta import reference as delta_reference
from moiety_kernels.gated_norm import Gate, gated_norm
from moiety_kernels.gated_norm import reference as norm_reference
from moiety_kernels.linear_attention import linear_attention
from moiety_kernels.linear_attention import reference as linear_reference

from .recurrent import QUERIES, TOKENS, delta_inputs, sequences, states

pytestmark = pytest.mark.usefixtures("several_threads")


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("width", "value_width", "gates"), [(64, 128, 1), (48, 64, 48), (20, 24, 1)])
def test_the_recurrence(width: int, value_width: int, gates: int) -> None:
    inputs, ours = delta_inputs(width, value_width, gates, torch.float32), states(4, width, value_width)
    theirs = ours.clone()
    made = gated_delta_rule(*inputs, ours, *sequences(), max_query=max(QUERIES))
    expected = delta_reference.gated_delta_rule(*inputs, theirs, *sequences())
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_the_definition_is_that_of_transformers() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as oracle  # takes a second, in this test alone

    q, k, v, log_decay, beta = (one[:150].unsqueeze(0) for one in delta_inputs(32, 48, 1, torch.float32))
    expected, state = oracle.torch_chunk_gated_delta_rule(
        q, k, v, log_decay.squeeze(3), beta, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    ours = torch.full((1, 4, 32, 48), float("nan"))
    one = (torch.tensor([0]), torch.tensor([0], dtype=torch.int32), torch.tensor([0, 150], dtype=torch.int32))
    made = delta_reference.gated_delta_rule(q[0], k[0], v[0], log_decay[0], beta[0], ours, *one)
    torch.testing.assert_close(made, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours, state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_bits_do_not_depend_on_the_chunks(chunk: int) -> None:
    q, k, v, log_decay, beta = delta_inputs(64, 64, 1, torch.float32)
    x, weight = torch.randn(TOKENS, 64), torch.randn(4, 64)
    found = []
    for some in (TOKENS, chunk):
        state, tail, outs = torch.full((1, 4, 64, 64), float("nan")), torch.full((1, 3, 64), float("nan")), []
        for first in range(0, TOKENS, some):
            part = slice(first, min(TOKENS, first + some))
            count = part.stop - part.start
            one = (
                torch.tensor([0]),
                torch.tensor([int(first > 0)], dtype=torch.int32),
                torch.tensor([0, count], dtype=torch.int32),
            )
            mixed = causal_conv(x[part], weight, None, tail, *one, silu=True, max_query=count)
            inputs = q[part], k[part], v[part], log_decay[part], beta[part]
            outs.append((mixed, gated_delta_rule(*inputs, state, *one, max_query=count)))
        found.append([*(torch.cat(parts) for parts in zip(*outs, strict=True)), state, tail])
    assert all(torch.equal(whole, cut) for whole, cut in zip(*found, strict=True))


@pytest.mark.parametrize(("channels", "has_bias", "silu"), [(576, True, True), (48, False, False), (20, True, False)])
def test_the_convolution(channels: int, has_bias: bool, silu: bool) -> None:
    x, weight = torch.randn(TOKENS, channels + 16)[:, 16:], torch.randn(4, channels)
    bias, ours = torch.randn(channels) if has_bias else None, states(3, channels)
    theirs = ours.clone()
    made = causal_conv(x, weight, bias, ours, *sequences(), silu=silu, max_query=max(QUERIES))
    expected = conv_reference.causal_conv(x, weight, bias, theirs, *sequences(), silu=silu)
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
    q, k, v, log_decay, _ = delta_inputs(48, value_width, 1, torch.float32)
    ours, gates = states(4, 48, value_width), log_decay.squeeze(2)
    theirs = ours.clone()
    made = linear_attention(q, k, v, gates, ours, *sequences(), max_query=max(QUERIES))
    expected = linear_reference.linear_attention(q, k, v, gates, theirs, *sequences())
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_shapes_that_do_not_go_together_are_refused() -> None:
    inputs = delta_inputs(64, 64, 1, torch.float32)
    with pytest.raises(KernelInputError, match="state has shape"):
        gated_delta_rule(*inputs, states(4, 64, 32), *sequences(), max_query=max(QUERIES))
    with pytest.raises(KernelInputError, match="one entry a head, or one a channel"):
        gated_delta_rule(
            *inputs[:3], inputs[3].expand(-1, -1, 3), inputs[4], states(4, 64, 64), *sequences(), max_query=150
        )
    with pytest.raises(KernelInputError, match="tail has shape"):
        causal_conv(
            torch.randn(TOKENS, 64), torch.randn(4, 64), None, states(4, 64), *sequences(), silu=True, max_query=9
        )
