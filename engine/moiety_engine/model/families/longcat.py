"""LongCat-Flash: two latent attentions and feed-forwards a layer, and experts whose output is added at its end."""

from __future__ import annotations

from dataclasses import replace

from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    Features,
    first,
    read_activation,
    read_routing,
    require,
)
from moiety_engine.model.families.deepseek import read_latent_attention
from moiety_engine.model.mtp_names import LONGCAT_MTP
from moiety_engine.model.spec import DenseSpec, LatentAttentionSpec, LayerSpec, MoeSpec, SharedSpec

_NUM_LAYERS = 28  # of the class


def longcat_flash(config: Config, index: int) -> LayerSpec:
    """Return one half of a layer on disk: the first one has the experts, whose output the second one adds."""
    dense = DenseSpec(config["ffn_hidden_size"], activation=read_activation(config))
    if index % 2:
        return LayerSpec(_attention(config), dense)
    return LayerSpec(_attention(config), _mixture(config, dense), defers_experts=True)


def longcat_flash_features(config: Config) -> Features:
    """Return the layer on disk of each layer, the MTP layer, and its prefix, which decoding ignores.

    All released checkpoints have one MTP layer, with a dense feed-forward, though their config.json does not say so.
    """
    num_layers = first(config, "num_layers")
    if num_layers is None:
        num_layers = config["num_hidden_layers"] // 2 if "num_hidden_layers" in config else _NUM_LAYERS
    starts = tuple(index // 2 for index in range(2 * num_layers))
    dense = DenseSpec(config["ffn_hidden_size"], activation=read_activation(config))
    num_mtp_layers = first(config, "num_nextn_predict_layers", default=1)
    return {
        "block_starts": starts,
        "ignored_prefixes": ("model.mtp.",),
        "mtp_layers": (LayerSpec(_attention(config), dense),) * num_mtp_layers,
        "mtp_names": LONGCAT_MTP,
    }


def _attention(config: Config) -> LatentAttentionSpec:
    """Return the attention, whose latent rows are enlarged by the root of the model's width over theirs."""
    require(config, "longcat_flash", attention_bias=False, attention_method="MLA")
    require(config, "longcat_flash", mla_scale_q_lora=True, mla_scale_kv_lora=True)
    latent = read_latent_attention(config, interleaved=True)
    if latent.query_rank is None:
        raise UnsupportedModelError("q_lora_rank null is not supported in longcat_flash")
    width = config["hidden_size"]
    return replace(
        latent,
        query_factor=(width / latent.query_rank) ** 0.5,
        latent_factor=(width / latent.latent_width) ** 0.5,
    )


def _mixture(config: Config, dense: DenseSpec) -> MoeSpec:
    require(config, "longcat_flash", router_bias=False, norm_topk_prob=False, zero_expert_type="identity")
    zero_experts = config["zero_expert_num"] or 0
    counts = config | {"num_choices": config["n_routed_experts"] + zero_experts}
    routing = read_routing(
        counts,
        "num_choices",
        top_k_key="moe_topk",
        renormalize=False,
        scoring="softmax",
        scale=float(config["routed_scaling_factor"]),
    )
    return MoeSpec(
        config["expert_ffn_hidden_size"],
        routing,
        dense.activation,
        selection_bias=True,
        exact_router=True,
        shared=SharedSpec(dense),
        zero_experts=zero_experts,
    )
