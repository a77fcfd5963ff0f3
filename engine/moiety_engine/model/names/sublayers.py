"""Names in checkpoints whose layers are not those of the spec.

In Nemotron-H attention and feed-forward are layers of their own. In LongCat-Flash a layer has two attentions and two
dense feed-forwards, which are two layers of the spec, and experts, which belong to the first one. In Falcon-H1 a layer
has Mamba-2 beside attention, which are two layers of the spec too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.model.recurrent_specs import RecurrentSpec

if TYPE_CHECKING:
    from moiety_engine.model.spec import LayerSpec, ModelSpec


def stored_prefixes(spec: ModelSpec, index: int) -> dict[str, str]:
    """Return the prefix on disk, which follows `layers.`, of each usual prefix of names within a layer of the spec.

    Of two prefixes that a name begins with, the first one is meant.
    """
    layer, start = spec.layers[index], spec.block_starts[index]
    if spec.has_parallel_layers:
        return _parallel_prefixes(layer, start)
    if not spec.has_sublayers:
        return _sublayer_prefixes(layer, start)
    sub = int(index > 0 and spec.block_starts[index - 1] == start)
    dense = "mlp." if sub else "mlp.shared_experts."
    found = {f"{name}.": f"{start}.{name}.{sub}." for name in ("self_attn", "input_layernorm")}
    found |= {"post_attention_layernorm.": f"{start}.post_attention_layernorm.{sub}.", dense: f"{start}.mlps.{sub}."}
    return found if sub else found | {"mlp.": f"{start}.mlp."}


def _parallel_prefixes(layer: LayerSpec, start: int) -> dict[str, str]:
    """Return the prefixes of a layer that is one on disk with the layer beside it, which reads the same input."""
    if not layer.shares_input:
        return {name: f"{start}.{name}" for name in ("input_layernorm.", "mamba.")}
    own = {"post_attention_layernorm.": f"{start}.pre_ff_layernorm.", "mlp.": f"{start}.feed_forward."}
    return {"self_attn.": f"{start}.self_attn."} | own


def _sublayer_prefixes(layer: LayerSpec, start: int) -> dict[str, str]:
    """Return the prefixes of a layer whose attention and feed-forward, if it has one, are two layers on disk."""
    attention = "mamba." if isinstance(layer.attention, RecurrentSpec) else "self_attn."
    found = {"input_layernorm.": f"{start}.norm.", attention: f"{start}.mixer."}
    if layer.ffn is not None:
        found |= {"post_attention_layernorm.": f"{start + 1}.norm.", "mlp.": f"{start + 1}.mixer."}
    return found
