"""The Triton kernels of recurrent layers agree with their definitions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.mutants import Edit, FailingMutant, mutants
from tests.kernels.recurrent import NUM_DECODE, TOKENS, delta_inputs, scan_inputs, sequences, states

from moiety_kernels.causal_conv import CausalConvWeights
from moiety_kernels.causal_conv import kernel as conv
from moiety_kernels.causal_conv import reference as conv_reference
from moiety_kernels.gated_delta import kernel as delta
from moiety_kernels.gated_delta import reference as delta_reference
from moiety_kernels.gated_norm import kernel as norm
from moiety_kernels.gated_norm import reference as norm_reference
from moiety_kernels.linear_attention import kernel as linear
from moiety_kernels.linear_attention import reference as linear_reference
from moiety_kernels.recurrent.kernels import chunks
from moiety_kernels.selective_scan import kernel as scan
from moiety_kernels.selective_scan import reference as scan_reference

TOLERANCE: dict[torch.dtype, Any] = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
}


def assert_recurs(kernels: Any, gates: int, num_decode: int, dtype: torch.dtype, device: str) -> None:
    inputs = delta_inputs(32, 16, gates, dtype, device)
    ours = states(4, 32, 16, device=device)
    theirs, batch = ours.clone(), replace(sequences(device), num_decode=num_decode)
    made = kernels.gated_delta_rule(*inputs, ours, batch)
    expected = delta_reference.gated_delta_rule(*inputs, theirs, batch)
    torch.testing.assert_close(made, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(ours, theirs, equal_nan=True, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_gate_of_each_head_by_chunks(dtype: torch.dtype, device: str) -> None:
    assert_recurs(delta, 1, NUM_DECODE, dtype, device)


def test_a_gate_of_each_channel_token_by_token(device: str) -> None:
    assert_recurs(delta, 32, NUM_DECODE, torch.float32, device)


def assert_decays(kernels: Any, dtype: torch.dtype, device: str) -> None:
    heads, log_decay, _ = delta_inputs(32, 48, 1, dtype, device)
    heads = replace(heads, q_THK=heads.q_THK / 4, k_THK=heads.k_THK / 4)
    ours, gates = states(4, 32, 48, device=device), log_decay.squeeze(2)
    gates[:NUM_DECODE, :2] /= 16  # near 0
    theirs, batch = ours.clone(), sequences(device)
    made = kernels.linear_attention(heads, gates, ours, batch)
    expected = linear_reference.linear_attention(heads, gates, theirs, batch)
    torch.testing.assert_close(made, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(ours, theirs, equal_nan=True, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_state_that_decays(dtype: torch.dtype, device: str) -> None:
    assert_decays(linear, dtype, device)


def assert_scans(kernels: Any, dtype: torch.dtype, device: str) -> None:
    inputs, ours = scan_inputs(40, 8, dtype, device), states(8, 40, device=device)
    theirs, batch = ours.clone(), sequences(device)
    made = kernels.selective_scan(inputs, ours, batch)
    expected = scan_reference.selective_scan(inputs, theirs, batch)
    torch.testing.assert_close(made, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(ours, theirs, equal_nan=True, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_selective_scan(dtype: torch.dtype, device: str) -> None:
    assert_scans(scan, dtype, device)


@pytest.mark.thorough
@mutants(
    {
        "state * tl.exp(step[None, :] * rate)": "state * tl.exp(rate)",
        "mask=has_state & m_channel[None, :]": "mask=m_channel[None, :]",
        "+ skip * x": "+ x",
        "tl.where(x > 20.0, x, ": "tl.where(x > 200.0, x, ",
        "p_read + t * read_stride": "p_read + begin * read_stride",
    }
)
def test_a_mutant_of_the_selective_scan_is_found(failing_mutant: FailingMutant, edit: Edit, device: str) -> None:
    with failing_mutant(scan, edit) as mutant:
        assert_scans(mutant, torch.float32, device)


def assert_convolves(kernels: Any, dtype: torch.dtype, device: str, *, whole: bool) -> None:
    x = torch.randn(TOKENS, 217).to(device, dtype)[:, 17:]
    weight, bias = torch.randn(4, 200, device=device), torch.randn(200, device=device) if whole else None
    weights = CausalConvWeights(weight, bias, silu=whole)
    ours = states(3, 200, device=device).to(dtype)
    theirs, batch = ours.clone(), sequences(device)
    made = kernels.causal_conv(x, weights, ours, batch)
    expected = conv_reference.causal_conv(x, weights, theirs, batch)
    torch.testing.assert_close(made, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "whole"), [(torch.float32, True), (torch.float16, False)])
def test_a_convolution_with_tails(dtype: torch.dtype, whole: bool, device: str) -> None:
    assert_convolves(conv, dtype, device, whole=whole)


def assert_normalizes(kernels: Any, gate: str, device: str) -> None:
    x, z = torch.randn(9, 5, 48, device=device), torch.randn(9, 300, device=device)[:, 10:250].view(9, 5, 48)
    weight = torch.rand(1 if gate == "silu" else 5, 48, device=device)
    made = kernels.gated_norm(x, z, weight, 1e-5, gate)
    torch.testing.assert_close(made, norm_reference.gated_norm(x, z, weight, 1e-5, gate), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gate", ["silu", "sigmoid", "silu_first"])
def test_a_gated_normalisation(gate: str, device: str) -> None:
    assert_normalizes(norm, gate, device)


@pytest.mark.thorough
@mutants(
    {
        "is_later = i_token[:, None] > i_token[None, :]": "is_later = i_token[:, None] >= i_token[None, :]",
        "for i in range(1, CHUNK):": "for i in range(1, CHUNK - 1):",
        "beta * length * tl.exp(total)": "beta * length",
        "tl.minimum(first + CHUNK, end) - 1": "first + CHUNK - 1",
        "state *= tl.exp(last)\n": "state *= 1.0\n",
        "written -= tl.dot(read_k": "written += tl.dot(read_k",
        "is_seen = i_token[:, None] >= i_token[None, :]": "is_seen = i_token[:, None] > i_token[None, :]",
        "recalled = tl.sum(state * k[:, None], axis=0)": "recalled = tl.sum(state, axis=0)",
        "p_q + t * q_stride + i_group * WIDTH + i_key)": "p_q + t * q_stride + i_key)",
    }
)
def test_a_mutant_of_the_recurrence_is_found(failing_mutant: FailingMutant, edit: Edit, device: str) -> None:
    with failing_mutant(delta, edit) as mutant:
        assert_recurs(mutant, 1, NUM_DECODE, torch.float32, device)


@pytest.mark.thorough
@mutants(
    {
        "state * tl.exp(last), input": "state, input",
        "i_token == CHUNK - 1": "i_token == 0",
        "state * tl.exp(gate) + entry": "state + entry",
        "state * less_than_one(gate) + entry": "entry",
        "* tl.exp(total)[:, None]": "",
    }
)
def test_a_mutant_of_linear_attention_is_found(failing_mutant: FailingMutant, edit: Edit, device: str) -> None:
    with failing_mutant(linear, edit) as mutant:
        assert_decays(mutant, torch.float32, device)


@pytest.mark.thorough
@mutants(
    {
        "mask=has_state & (i_key >= 0)[:, None]": "mask=(i_key >= 0)[:, None]",
        "+ i_head * WIDTH * VALUE_WIDTH": "+ i_head * WIDTH",
        "total[:, None] - total[None, :]": "total[:, None]",
    }
)
def test_a_mutant_of_their_shared_parts_is_found(
    edit: Edit, mutated: Any, noticed: Any, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    mutant = mutated(chunks, *edit)
    for user in (delta, linear):
        for name in ("load_state", "store_chunk", "decay_between"):
            monkeypatch.setattr(user, name, getattr(mutant, name))
    with pytest.raises(noticed):
        assert_recurs(delta, 1, NUM_DECODE, torch.float32, device)
    with pytest.raises(noticed):
        assert_decays(linear, torch.float32, device)


@pytest.mark.thorough
@mutants(
    {
        "source = t - (TAPS - 1) + tap": "source = t - TAPS + tap",
        "m_before = (source < begin)[:, None] & m_out & has_state": "m_before = (source < begin)[:, None] & m_out",
        "source = end - (TAPS - 1) + i_place": "source = begin - (TAPS - 1) + i_place",
        "total *= tl.sigmoid(total)": "total = tl.sigmoid(total)",
    }
)
def test_a_mutant_of_the_convolution_is_found(failing_mutant: FailingMutant, edit: Edit, device: str) -> None:
    with failing_mutant(conv, edit) as mutant:
        assert_convolves(mutant, torch.float32, device, whole=True)


@pytest.mark.thorough
@mutants(
    {
        "/ width + eps": "/ BLOCK + eps",
        "p_gate + i_token * gate_stride": "p_gate + i_token * heads * width",
    }
)
def test_a_mutant_of_the_normalisation_is_found(failing_mutant: FailingMutant, edit: Edit, device: str) -> None:
    with failing_mutant(norm, edit) as mutant:
        assert_normalizes(mutant, "silu", device)
