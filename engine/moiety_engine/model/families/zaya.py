"""ZAYA1: compressed convolutional attention, and routers that continue those of the layers before."""

from __future__ import annotations

from moiety_engine.model.conv_attention_spec import CONV_TAPS, ConvAttentionSpec
from moiety_engine.model.errors import ConfigError, UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    Features,
    first,
    read_activation,
    read_routing,
    require,
    rope_from,
)
from moiety_engine.model.residual_specs import ScaledResidual
from moiety_engine.model.router_mlp_spec import RouterMlpSpec
from moiety_engine.model.spec import LayerSpec, MoeSpec

_FULL, _SLIDING = "hybrid", "hybrid_sliding"
# Keys of the first releases, whose layers and tensors have other names (sgl-project/sglang, pull request 32517).
_OF_FIRST_RELEASES = ("num_query_groups", "norm_epsilon", "zaya_mlp_expansion")


def zaya(config: Config, index: int) -> LayerSpec:
    """Return a layer; the router of the first one has none to continue."""
    return LayerSpec(_attention(config, index), _mixture(config, index), residual=ScaledResidual())


def zaya_features(config: Config) -> Features:
    """Return whether the head has a bias. Raises UnsupportedModelError for the first releases' files."""
    for key in _OF_FIRST_RELEASES:
        if key in config:
            raise UnsupportedModelError(
                f"config.json has {key}, as the first releases of ZAYA1 do (ZAYA1-base, ZAYA1-8B-legacy), whose "
                "tensors are not read: use a release for transformers 5.13 or newer, such as Zyphra/ZAYA1-8B"
            )
    return {"head_bias": bool(config["lm_head_bias"])}


def _attention(config: Config, index: int) -> ConvAttentionSpec:
    require(config, "zaya", attention_bias=False, cca_time0=CONV_TAPS, cca_time1=CONV_TAPS)
    kinds = config.get("layer_types")
    kind = _FULL if kinds is None else kinds[index]
    if kind not in (_FULL, _SLIDING):
        raise UnsupportedModelError(f"layer type {kind!r} is not supported in zaya; known: {_FULL}, {_SLIDING}")
    heads, kv_heads, window = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "sliding_window"))
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if kind == _SLIDING and window is None:
        raise ConfigError(f"layer_types has {_SLIDING}, but sliding_window is not set")
    rope = rope_from(config, config["rope_parameters"][kind], config["head_dim"])
    return ConvAttentionSpec(rope, heads, kv_heads, config["head_dim"], heads, window if kind == _SLIDING else None)


def _mixture(config: Config, index: int) -> MoeSpec:
    """Return the experts; the router has one choice more, which is no expert."""
    require(config, "zaya", num_experts_per_tok=1)
    choices = config | {"num_choices": config["num_experts"] + 1}
    router = RouterMlpSpec(config["router_hidden_size"], float(first(config, "rms_norm_eps")), continues=index > 0)
    return MoeSpec(
        config["moe_intermediate_size"],
        read_routing(choices, "num_choices", renormalize=False),
        read_activation(config),
        selection_bias=True,
        exact_router=True,
        zero_experts=1,
        router_mlp=router,
    )
