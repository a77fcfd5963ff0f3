"""Names of feed-forward tensors, with and without experts.

Experts are stored in three forms: one matrix each (Qwen, OLMoE, DeepSeek, GLM), w1/w3/w2 (Mixtral, Phi), and all
experts of a layer stacked with gate and up fused (Granite, and all families in memory in transformers 5). Qwen3-VL as
published has the stacks transposed. gpt-oss has its own stacked form, and DBRX joins the rows of all experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moiety_engine.model.names.tensor_mapping import TensorMapping, joined, plain, reshaped, whole
from moiety_engine.model.weights import MoeWeights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from moiety_engine.model.names.tensor_mapping import Named
    from moiety_engine.model.router_mlp import RouterMlpWeights
    from moiety_engine.model.spec import DenseSpec, MoeSpec
    from moiety_engine.model.weights import DenseWeights, MixtureNorms, SharedWeights

_BLOCKS = ("mlp.", "block_sparse_moe.", "feed_forward.", "ffn.")
_ROUTER_OF_ZAYA = "gate.router_mlp.out_proj.weight"
_ROUTERS = (
    "gate.weight",
    "router.weight",
    "router.layer.weight",
    "router.gate.weight",
    "gate.wg.weight",
    "router.classifier.weight",
    _ROUTER_OF_ZAYA,
)
_FUSED_SHARED = "shared_mlp.input_linear.weight"  # Granite's, beside the block of the routed experts
_SHARED = ("shared_experts.", "shared_expert.", "shared_mlp.")
_KOLIBRI_BIAS = "moe.router.expert_bias"  # Kolibri's selection bias, beside the block of everything else
_STACKED = {
    "experts.gate_up_proj": "experts.down_proj",
    "experts.up_proj": "experts.down_proj",  # without gates
    "input_linear.weight": "output_linear.weight",
    "experts.fc1.weight": "experts.fc2.weight",
}
_JOINED = ("experts.mlp.w1", "experts.mlp.v1", "experts.mlp.w2")  # DBRX's gate, up and, transposed, down
_USUAL_NAMES, _SHORT_NAMES = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
_SINGLE = {"experts.0.gate_proj.weight": _USUAL_NAMES, "experts.0.w1.weight": _SHORT_NAMES}
_SELECTION_BIASES = (
    "gate.e_score_correction_bias",
    "moe_statics.e_score_correction_bias",
    "gate.moe_statics.e_score_correction_bias",
    "gate.expert_bias",
    "gate.balancing_biases",
    "experts.e_score_correction_bias",
    "router.expert_bias",
    "router.e_score_correction_bias",
    "e_score_correction_bias",
    "expert_bias",
    "gate.bias",
)
_EXPERTS_OF_TOKENS = "gate.tid2eid"


def feed_forward_places(
    spec: DenseSpec | MoeSpec, weights: DenseWeights | MoeWeights, present: set[str]
) -> Iterator[Named]:
    """Yield the names, relative to the layer's, and mappings of feed-forward tensors.

    `present`: the names in the checkpoint.
    """
    block, local = _block(present)
    gated = spec.activation.gated
    if not isinstance(weights, MoeWeights):
        # transformers saves Kimi Linear's dense layers, which are published as "mlp.", as it does those with experts
        block = "block_sparse_moe." if "block_sparse_moe.down_proj.weight" in present else block
        names = _SHORT_NAMES if f"{block}w2.weight" in present else _USUAL_NAMES
        yield from _fused_shared(weights) if _FUSED_SHARED in present else _dense(block, weights, names, gated=gated)
        return
    if weights.norms is not None:
        yield from _normed(weights, weights.norms, present)
        return
    for name, place in _mixture(weights, local, gated=gated):
        of_kolibri = name == _SELECTION_BIASES[0] and _KOLIBRI_BIAS in present
        yield _KOLIBRI_BIAS if of_kolibri else block + name, place
    if weights.shared is not None and _FUSED_SHARED in present:
        yield from _fused_shared(weights.shared.dense)
    elif weights.shared is not None:
        for name, place in _shared(weights.shared, local, gated=gated):
            yield block + name, place


def _normed(weights: MoeWeights, norms: MixtureNorms, present: set[str]) -> Iterator[Named]:
    """Yield the names and mappings of Gemma 4's experts beside a dense feed-forward."""
    root_size = norms.router_D.shape[0] ** -0.5
    scale = TensorMapping(norms.router_D, tuple(norms.router_D.shape), lambda source: source.float() * root_size)
    yield "router.proj.weight", whole(weights.router_ED)
    yield "router.scale", scale
    yield "router.per_expert_scale", whole(norms.expert_scale_E)
    yield "pre_feedforward_layernorm.weight", whole(norms.shared_D)
    yield "post_feedforward_layernorm_1.weight", whole(norms.shared_output_D)
    yield "pre_feedforward_layernorm_2.weight", whole(norms.routed_D)
    yield "post_feedforward_layernorm_2.weight", whole(norms.routed_output_D)
    yield from _experts(weights, present)
    assert weights.shared is not None
    yield from _dense("mlp.", weights.shared.dense)


def _fused_shared(weights: DenseWeights) -> Iterator[Named]:
    gate_up_2FD, down_DF = plain(weights.gate_up_2FD), plain(weights.down_DF)
    yield _FUSED_SHARED, joined(gate_up_2FD, (down_DF.shape[1], down_DF.shape[1]))
    yield "shared_mlp.output_linear.weight", whole(down_DF)


def expert_places(spec: DenseSpec | MoeSpec, weights: DenseWeights | MoeWeights, present: set[str]) -> Iterator[Named]:
    """Yield the names and mappings of routed experts only."""
    block, local = _block(present)
    gated = spec.activation.gated
    for name, place in _experts(weights, local, gated=gated) if isinstance(weights, MoeWeights) else ():
        yield block + name, place


def _block(present: set[str]) -> tuple[str, set[str]]:
    """Return the name prefix of the block, and the names with that prefix, without it."""
    block = next((one for one in _BLOCKS if any(name.startswith(one) for name in present)), _BLOCKS[0])
    return block, {name.removeprefix(block) for name in present if name.startswith(block)}


def _dense(
    prefix: str, weights: DenseWeights, names: tuple[str, str, str] = _USUAL_NAMES, *, gated: bool = True
) -> Iterator[Named]:
    gate_name, up_name, down_name = names
    for fused, kind in ((plain(weights.gate_up_2FD), "weight"), (weights.gate_up_bias_2F, "bias")):
        if fused is not None and gated:
            gate, up = fused.chunk(2)
            yield f"{prefix}{gate_name}.{kind}", whole(gate)
            yield f"{prefix}{up_name}.{kind}", whole(up)
        elif fused is not None:
            yield f"{prefix}{up_name}.{kind}", whole(fused)
    yield f"{prefix}{down_name}.weight", whole(plain(weights.down_DF))
    if weights.down_bias_D is not None:
        yield f"{prefix}{down_name}.bias", whole(weights.down_bias_D)


def _mixture(weights: MoeWeights, present: set[str], *, gated: bool) -> Iterator[Named]:
    router = _which(_ROUTERS, present)
    yield router, whole(weights.router_ED)
    if weights.router_mlp is not None:
        yield from _router_mlp(weights.router_mlp)
    if weights.router_bias_E is not None:
        yield router.replace("weight", "bias"), whole(weights.router_bias_E)
    if weights.selection_bias_E is not None:
        name = _which(_SELECTION_BIASES, present)
        bias = weights.selection_bias_E
        yield name, reshaped(bias, (1, *bias.shape)) if "moe_statics" in name else whole(bias)
    if weights.expert_of_token_VK is not None:
        yield _EXPERTS_OF_TOKENS, whole(weights.expert_of_token_VK)
    if weights.latent is not None:
        yield "fc1_latent_proj.weight", whole(plain(weights.latent.down_LD))
        yield "fc2_latent_proj.weight", whole(plain(weights.latent.up_DL))
    yield from _experts(weights, present, gated=gated)


def _router_mlp(weights: RouterMlpWeights) -> Iterator[Named]:
    """Yield the names and mappings of ZAYA1's router before its last product."""
    yield "gate.down_proj.weight", whole(weights.down_WD)
    yield "gate.down_proj.bias", whole(weights.down_bias_W)
    yield "gate.router_mlp.norm.weight", whole(weights.norm_W)
    yield "gate.router_mlp.fc1.weight", whole(weights.first_WW)
    yield "gate.router_mlp.fc1.bias", whole(weights.first_bias_W)
    yield "gate.router_mlp.fc2.weight", whole(weights.second_WW)
    yield "gate.router_mlp.fc2.bias", whole(weights.second_bias_W)
    if weights.scale_W is not None:
        yield "gate.router_states_scale", whole(weights.scale_W)


def _experts(weights: MoeWeights, present: set[str], *, gated: bool = True) -> Iterator[Named]:
    gate_up_E2FD, down_EDF = plain(weights.gate_up_E2FD), plain(weights.down_EDF)
    if weights.gate_up_bias_E2F is not None and weights.down_bias_ED is not None:
        yield from _interwoven(gate_up_E2FD, weights.gate_up_bias_E2F)
        yield "experts.down_proj", TensorMapping(down_EDF.mT, tuple(down_EDF.mT.shape))
        yield "experts.down_proj_bias", whole(weights.down_bias_ED)
        return
    if weights.down_bias_ED is not None and weights.gate_up_bias_E2F is None:
        bias_ED = weights.down_bias_ED  # of all experts
        yield "bias", TensorMapping(bias_ED, tuple(bias_ED.shape[1:]), lambda source: source.expand(bias_ED.shape))
    for gate_up_name, down_name in _STACKED.items():
        if gate_up_name in present:
            for name, stack in ((gate_up_name, gate_up_E2FD), (down_name, down_EDF)):
                yield name, TensorMapping(stack, tuple(stack.shape), takes_transposed=True)
            return
    if _JOINED[0] in present:
        for name, stack in zip(_JOINED, (*gate_up_E2FD.chunk(2, dim=1), down_EDF.mT), strict=True):
            num_experts, width, outputs = stack.shape
            yield name, replace(reshaped(stack, (num_experts * width, outputs)), rows_of_expert=width)
        return
    gate_name, up_name, down_name = _SINGLE[_which(tuple(_SINGLE), present)]
    if not gated:
        for expert, (up, down) in enumerate(zip(gate_up_E2FD, down_EDF, strict=True)):
            yield f"experts.{expert}.up_proj.weight", whole(up)
            yield f"experts.{expert}.down_proj.weight", whole(down)
        return
    for expert, (gate_up, down) in enumerate(zip(gate_up_E2FD, down_EDF, strict=True)):
        gate, up = gate_up.chunk(2)
        yield f"experts.{expert}.{gate_name}.weight", whole(gate)
        yield f"experts.{expert}.{up_name}.weight", whole(up)
        yield f"experts.{expert}.{down_name}.weight", whole(down)


def _interwoven(gate_up_E2FD: Tensor, bias_E2F: Tensor) -> Iterator[Named]:
    """Yield the names and mappings of gpt-oss's gate and up tensors: transposed, with interleaved outputs."""
    experts, both, width = gate_up_E2FD.shape
    gate_up = gate_up_E2FD.view(experts, 2, both // 2, width).permute(0, 3, 2, 1)
    yield "experts.gate_up_proj", reshaped(gate_up, (experts, width, both))
    yield "experts.gate_up_proj_bias", reshaped(bias_E2F.view(experts, 2, both // 2).mT, (experts, both))


def _shared(weights: SharedWeights, present: set[str], *, gated: bool) -> Iterator[Named]:
    prefixes = (name for name in _SHARED if f"{name}down_proj.weight" in present)
    prefix = next(prefixes, _SHARED[0])
    names = _SHORT_NAMES if f"{_SHARED[0]}w2.weight" in present else _USUAL_NAMES
    yield from _dense(prefix, weights.dense, names, gated=gated)
    if weights.gate_1D is not None:
        yield "shared_expert_gate.weight", whole(weights.gate_1D)


def _which(names: tuple[str, ...], present: set[str]) -> str:
    """Return the name that is present; the first if none is, so that the error names it as missing."""
    return next((name for name in names if name in present), names[0])
