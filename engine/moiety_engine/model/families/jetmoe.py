"""JetMoe: experts in attention, which have query heads, and in the feed-forward."""

from __future__ import annotations

from moiety_engine.model.families.config import Config, Features, read_activation, read_attention, read_routing
from moiety_engine.model.routed_attention_spec import RoutedAttentionSpec
from moiety_engine.model.spec import LayerSpec, MoeSpec, NormSpec

_LAYER_EPS = 1e-6  # of the class, whose layers do not read rms_norm_eps


def jetmoe(config: Config, _index: int) -> LayerSpec:
    """Return a layer; a token has a query head of each of its experts for each key-value head."""
    routing = read_routing(config, "num_local_experts", renormalize=False, scoring="softmax_chosen")
    heads = {"num_attention_heads": routing.top_k * config["num_key_value_heads"], "head_dim": config["kv_channels"]}
    grouped = read_attention(config | heads)
    attention = RoutedAttentionSpec(
        grouped.num_heads, grouped.num_kv_heads, grouped.head_dim, grouped.rope, grouped.scale, routing=routing
    )
    activation = read_activation(config, "activation_function")
    return LayerSpec(attention, MoeSpec(config["intermediate_size"], routing, activation, output_bias=True))


def jetmoe_features(config: Config) -> Features:
    """Return the norms, of which only the last one has the configured epsilon."""
    return {"norm": NormSpec(_LAYER_EPS, final_eps=float(config["rms_norm_eps"]))}
