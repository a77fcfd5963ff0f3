"""Tokens are routed as each family's own router in transformers routes them, and on a CPU as the reference does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moiety_kernels.checks import KernelInputError
from moiety_kernels.route import RoutingSpec, route, weigh_experts
from moiety_kernels.route.reference import route as route_reference
from moiety_kernels.route.spec import ALL_EXPERT_SCORINGS, BIAS_SCORINGS

EXPERTS = 16
GROUPED: dict[str, Any] = {"num_groups": 4, "top_groups": 2}
V3: dict[str, Any] = {"scoring": "sigmoid", "group_score": "best_two", "scale": 2.5, **GROUPED}

SPECS = {
    "softmax": RoutingSpec(EXPERTS, 4, renormalize=False),
    "softmax, renormalised, not below a least sum": RoutingSpec(EXPERTS, 2, renormalize=True, least_sum=0.3),
    "softmax, best groups, scaled": RoutingSpec(EXPERTS, 3, renormalize=False, scale=16.0, **GROUPED),
    "sigmoid, groups by their two best": RoutingSpec(EXPERTS, 4, renormalize=True, **V3),
    "sigmoid, more than the sum": RoutingSpec(EXPERTS, 4, renormalize=True, scoring="sigmoid", added_sum=0.5),
    "sigmoid, all experts of the best groups": RoutingSpec(EXPERTS, 8, renormalize=False, **V3),
    "square root of softplus": RoutingSpec(EXPERTS, 4, renormalize=True, scoring="sqrt_softplus", scale=1.5),
    "sigmoid of the chosen": RoutingSpec(EXPERTS, 4, renormalize=True, scoring="sigmoid_chosen"),
    "softmax over the chosen": RoutingSpec(EXPERTS, 4, renormalize=False, scoring="softmax_chosen"),
    "sparse mixer": RoutingSpec(EXPERTS, 2, renormalize=False, scoring="sparse_mixer", jitter=0.2),
}


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(0)


def weight_of_each(weight_TK: Tensor, expert_TK: Tensor) -> Tensor:
    """Weights by expert, which do not depend on the order of those chosen."""
    return torch.zeros(len(weight_TK), EXPERTS).scatter_(1, expert_TK.long(), weight_TK.float())


@pytest.mark.parametrize("tokens", [1, 5, 200])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", list(SPECS))
def test_on_a_cpu_routing_is_the_references(name: str, biased: bool, tokens: int) -> None:
    spec, logits = SPECS[name], torch.randn(tokens, EXPERTS) * 2
    if biased and spec.scoring not in BIAS_SCORINGS:
        with pytest.raises(KernelInputError, match="take a bias"):
            route(logits, spec, torch.zeros(EXPERTS))
        return
    bias = torch.randn(EXPERTS) if biased else None
    weight, expert = route(logits, spec, bias)
    expected_weight, expected_expert = route_reference(logits, spec, bias)
    assert torch.equal(expert, expected_expert)
    assert torch.allclose(weight, expected_weight, rtol=1e-5, atol=1e-7)


def identity_router(kind: Any, **settings: Any) -> Any:
    """The router of a family, fed with logits instead of hidden states."""
    shape = {"hidden_size": EXPERTS, "num_experts": EXPERTS, "num_local_experts": EXPERTS}
    router = kind(SimpleNamespace(**shape, **settings)).eval()
    router.weight.data = torch.eye(EXPERTS)
    return router


def assert_biased_alike(router: Any, spec: str, logits: Tensor, bias: Tensor) -> None:
    """Choose with a correction bias as the router of the family does."""
    router.e_score_correction_bias.copy_(bias)
    _, weight, expert = router(logits)
    for ours in (route, route_reference):
        chosen = ours(logits, SPECS[spec], bias)
        assert torch.allclose(weight_of_each(*chosen), weight_of_each(weight, expert), atol=1e-6)


@pytest.mark.parametrize("shift", [0.0, -3.0])
def test_groups_with_a_bias_are_deepseek_v3s_even_where_every_biased_score_is_negative(shift: float) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    settings = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    router = identity_router(DeepseekV3TopkRouter, num_experts_per_tok=4, **settings)
    bias, logits = torch.randn(EXPERTS) + shift, torch.randn(300, EXPERTS) * 2
    assert_biased_alike(router, "sigmoid, groups by their two best", logits, bias)


def test_groups_without_a_bias_are_deepseek_v2s() -> None:
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    settings = {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}
    router, logits = identity_router(DeepseekV2TopkRouter, num_experts_per_tok=3, **settings), torch.randn(300, EXPERTS)
    _, weight, expert = router(logits)
    for ours in (route, route_reference):
        chosen = ours(logits, SPECS["softmax, best groups, scaled"])
        assert torch.allclose(weight_of_each(*chosen), weight_of_each(weight, expert), atol=1e-5)


def test_the_sigmoid_of_logits_that_a_bias_helps_to_choose_is_kolibris() -> None:
    from transformers.models.kolibri1.modeling_kolibri1 import Kolibri1TopKRouter

    router = identity_router(Kolibri1TopKRouter, num_experts_per_tok=4, norm_topk_prob=True)
    bias, logits = torch.randn(EXPERTS), torch.randn(300, EXPERTS) * 2
    assert_biased_alike(router, "sigmoid of the chosen", logits, bias)


def v4_router(kind: Any) -> Any:
    settings = {"num_experts_per_tok": 4, "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5}
    return identity_router(kind, vocab_size=50, **settings)


def test_square_roots_of_softplus_with_a_bias_are_deepseek_v4s() -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter

    router, bias = v4_router(DeepseekV4TopKRouter), torch.randn(EXPERTS)
    router.e_score_correction_bias.copy_(bias)
    logits = torch.cat((torch.randn(300, EXPERTS) * 2, torch.randn(20, EXPERTS) * 40))
    _, weight, expert = router(logits)
    for ours in (route, route_reference):
        chosen = ours(logits, SPECS["square root of softplus"], bias)
        assert torch.allclose(weight_of_each(*chosen), weight_of_each(weight, expert), atol=1e-6)


def test_weights_of_experts_chosen_by_a_hash_are_deepseek_v4s() -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter

    router, tokens = v4_router(DeepseekV4HashRouter), torch.randint(50, (300,))
    router.tid2eid.copy_(torch.rand(50, EXPERTS).argsort(dim=1)[:, :4])
    logits = torch.randn(300, EXPERTS) * 2
    _, weight, expert = router(logits, tokens)
    spec = SPECS["square root of softplus"]
    assert torch.allclose(weigh_experts(logits, expert.int(), spec), weight, atol=1e-6)


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.scoring in ALL_EXPERT_SCORINGS])
def test_experts_that_are_chosen_have_the_weights_of_a_choice(name: str) -> None:
    spec, logits = SPECS[name], torch.randn(70, EXPERTS) * 2
    weight, expert = route(logits, spec)
    assert torch.equal(weigh_experts(logits, expert, spec), weight)
    narrow = weigh_experts(logits.bfloat16(), expert, spec)  # by the definition
    assert torch.allclose(narrow, weight, rtol=0.1, atol=0.02)


def test_chosen_experts_have_no_weights_by_scores_over_the_choice() -> None:
    with pytest.raises(KernelInputError, match="any expert"):
        weigh_experts(torch.randn(3, EXPERTS), torch.zeros(3, 4, dtype=torch.int32), SPECS["softmax over the chosen"])


def test_the_sparse_mixer_is_phis() -> None:
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    logits = torch.randn(300, EXPERTS) - 0.5  # some tokens have no positive logit
    weight, expert = sparsemixer(logits, jitter_eps=0.2, training=False)
    for ours in (route, route_reference):
        chosen_weight, chosen = ours(logits, SPECS["sparse mixer"])
        assert torch.equal(chosen.long(), expert)
        assert torch.allclose(chosen_weight, weight, atol=1e-6)
    assert ((weight > 0.05) & (weight < 0.95)).any()


def test_invalid_routing_inputs_are_refused() -> None:
    with pytest.raises(KernelInputError, match="hold fewer than top_k"):
        RoutingSpec(EXPERTS, 5, renormalize=True, num_groups=4, top_groups=1)
    with pytest.raises(KernelInputError, match="groups of one size"):
        RoutingSpec(EXPERTS, 2, renormalize=True, num_groups=3)
    with pytest.raises(KernelInputError, match="two best experts"):
        RoutingSpec(EXPERTS, 4, renormalize=False, scoring="sparse_mixer")
    with pytest.raises(KernelInputError, match=r"bias has shape \(3,\)"):
        route(torch.randn(2, EXPERTS), SPECS["softmax"], torch.zeros(3))
