"""Experts with other activations and with biases: the reference is transformers', and every path is the reference's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moiety_kernels.checks import KernelInputError
from moiety_kernels.moe import GELU_TANH, RELU2, SILU, Activation, dense_glu, experts, grouped
from moiety_kernels.moe.reference import experts as experts_reference
from moiety_kernels.route import RoutingSpec, route

CLIPPED = Activation("clipped", limit=1.5, alpha=1.702)
LIMITED = Activation("limited_silu", limit=0.5)
SCALED = Activation("scaled_silu", alpha=0.6)
ACTIVATIONS = [SILU, GELU_TANH, CLIPPED, LIMITED, SCALED, RELU2]


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(0)


def a_layer(
    tokens: int, width: int, hidden: int, dtype: torch.dtype = torch.float32, activation: Activation = SILU
) -> tuple[list[Tensor], Any]:
    """Rows, weights and choices, products; and the biases."""
    choices = route(torch.randn(tokens, 5), RoutingSpec(5, 2, renormalize=True))
    ups = activation.num_inputs * hidden
    gate_up, down = torch.randn(5, ups, width) * width**-0.5, torch.randn(5, width, hidden) * hidden**-0.5
    biases = {"gate_up_bias_E2F": torch.randn(5, ups), "down_bias_ED": torch.randn(5, width)}
    return [torch.randn(tokens, width).bfloat16().to(dtype), *choices, gate_up.to(dtype), down.to(dtype)], biases


def close(ours: Tensor, theirs: Tensor, ratio: float) -> bool:
    return bool((ours - theirs).abs().max() <= ratio * theirs.abs().max())


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation.kind)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("tokens", "width", "hidden"), [(1, 64, 48), (37, 48, 112), (9, 40, 24)])
def test_on_a_cpu_experts_are_the_references(
    activation: Activation, biased: bool, tokens: int, width: int, hidden: int
) -> None:
    inputs, biases = a_layer(tokens, width, hidden, activation=activation)
    given = biases if biased else {}
    expected = experts_reference(*inputs, activation=activation, **given)
    assert close(experts(*inputs, activation=activation, **given), expected, 1e-5)
    x, _, _, gate_up, down = inputs
    one = torch.ones(tokens, 1), torch.zeros(tokens, 1, dtype=torch.int32)
    first = {name: bias[:1] for name, bias in given.items()}
    expected = experts_reference(x, *one, gate_up[:1], down[:1], activation=activation, **first)
    dense = dense_glu(x, gate_up[0], down[0], *(bias[0] for bias in given.values()), activation=activation)
    assert close(dense, expected, 1e-5)
    weight, onto = torch.rand(tokens, 1), torch.randn(tokens, width)
    beside = dense_glu(x, gate_up[0], down[0], activation=activation, weight_T1=weight, onto_TD=onto.clone())
    plain = dense_glu(x, gate_up[0], down[0], activation=activation)
    assert close(beside, onto + weight * plain, 1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation.kind)
def test_feed_forward_agrees_with_bfloat16_weights(activation: Activation) -> None:
    (x, weight, expert, gate_up, down), biases = a_layer(37, 64, 96, activation=activation)
    inputs = x, weight, expert, gate_up.bfloat16(), down.bfloat16()
    expected = experts_reference(*inputs, activation=activation, **biases)
    assert close(experts(*inputs, activation=activation, **biases), expected, 2**-8)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation.kind)
def test_through_torchs_grouped_product_too(activation: Activation) -> None:
    inputs, biases = a_layer(50, 64, 48, torch.bfloat16, activation)
    assert grouped.fits(inputs[0], inputs[4])
    ours = grouped.experts(*inputs, activation=activation, **biases)
    expected = experts_reference(*inputs, activation=activation, **biases)
    assert close(ours.float(), expected.float(), 0.02)


def test_clipped_experts_are_gpt_oss() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    (x, weight, expert, gate_up, down), biases = a_layer(30, 32, 48)
    shape = {"intermediate_size": 48, "hidden_size": 32, "num_local_experts": 5}
    theirs = GptOssExperts(
        SimpleNamespace(swiglu_alpha=1.702, swiglu_limit=1.5, _experts_implementation="eager", **shape)
    )

    def interleaved(halves: Tensor) -> Tensor:
        return halves.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)

    with torch.no_grad():
        theirs.gate_up_proj.copy_(interleaved(gate_up).transpose(1, 2))
        theirs.gate_up_proj_bias.copy_(interleaved(biases["gate_up_bias_E2F"]))
        theirs.down_proj.copy_(down.transpose(1, 2))
        theirs.down_proj_bias.copy_(biases["down_bias_ED"])
        expected = theirs(x, expert.long(), weight)
    assert close(experts(x, weight, expert, gate_up, down, activation=CLIPPED, **biases), expected, 1e-5)


def answer_of(theirs: Any, x: Tensor, expert: Tensor, weight: Tensor, **weights: Tensor) -> Tensor:
    """Return the answer of another library's experts with these weights."""
    with torch.no_grad():
        for name, given in weights.items():
            getattr(theirs, name).copy_(given)
        answer: Tensor = theirs(x, expert.long(), weight)
    return answer


def test_limited_experts_are_deepseek_v4s() -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

    (x, weight, expert, gate_up, down), _ = a_layer(30, 32, 48)
    shape = {"intermediate_size": 48, "hidden_size": 32, "num_local_experts": 5, "hidden_act": "silu"}
    theirs = DeepseekV4Experts(SimpleNamespace(swiglu_limit=0.5, _experts_implementation="eager", **shape))
    expected = answer_of(theirs, x, expert, weight, gate_up_proj=gate_up, down_proj=down)
    assert close(experts(x, weight, expert, gate_up, down, activation=LIMITED), expected, 1e-5)


def test_experts_without_gates_are_nemotrons() -> None:
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    (x, weight, expert, up, down), _ = a_layer(30, 32, 48, activation=RELU2)
    sizes = {"moe_intermediate_size": 48, "hidden_size": 32, "n_routed_experts": 5, "moe_latent_size": None}
    theirs = NemotronHExperts(SimpleNamespace(mlp_hidden_act="relu2", _experts_implementation="eager", **sizes))
    expected = answer_of(theirs, x, expert, weight, up_proj=up, down_proj=down)
    assert close(experts(x, weight, expert, up, down, activation=RELU2), expected, 1e-5)


def test_gates_of_experts_without_gates_are_refused() -> None:
    inputs, _ = a_layer(3, 32, 48)
    with pytest.raises(KernelInputError, match=r"\[E, F, D\] without gates"):
        experts(*inputs, activation=RELU2)


def test_biases_of_another_shape_are_refused() -> None:
    inputs, biases = a_layer(3, 32, 48)
    with pytest.raises(KernelInputError, match=r"gate_up_bias has shape \(5, 32\)"):
        experts(*inputs, gate_up_bias_E2F=biases["down_bias_ED"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", [range(0, 2), range(2, 5)], ids=lambda held: f"{len(held)} of 5")
def test_experts_that_are_elsewhere_add_nothing(held: range, dtype: torch.dtype) -> None:
    (x, weight, expert, gate_up, down), biases = a_layer(37, 64, 48, dtype)
    here = (expert >= held.start) & (expert < held.stop)
    own = [gate_up[held.start : held.stop], down[held.start : held.stop]]
    own_biases = {name: bias[held.start : held.stop].contiguous() for name, bias in biases.items()}
    local = torch.where(here, expert - held.start, -1)
    others_muted = experts_reference(x, weight * here, expert, gate_up, down, **biases)
    assert not here.all()
    for one in (experts, experts_reference, *([grouped.experts] if dtype is torch.bfloat16 else [])):
        assert close(one(x, weight, local, *own, **own_biases).float(), others_muted.float(), 0.02)
    nothing = experts(x, weight, torch.full_like(expert, -1), *own, **own_biases)
    assert not nothing.any()
