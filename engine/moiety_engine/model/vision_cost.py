"""Cost of a model's vision encoder relative to its decoder, by counts of multiplications."""

from __future__ import annotations

from dataclasses import replace

from moiety_engine.distribution.layout import Layout, RankPosition
from moiety_engine.images.encoder_cost import NO_ENCODER, EncoderCost
from moiety_engine.model.spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, MoeSpec
from moiety_engine.model.tensor_shards import own_spec


def encoder_cost(spec: ModelSpec, layout: Layout) -> EncoderCost:
    """Return the cost by counts of multiplications; 0 for a model without an encoder.

    Every rank encodes a whole image, but of a token it computes its part of each layer; pipeline stages compute one
    after the other. The decoder's attention to earlier tokens is left out; the encoder's attention is the quadratic
    part.
    """
    vision = spec.vision
    if vision is None:
        return NO_ENCODER
    size, patches = vision.hidden_size, vision.merge_size**2
    layer = 4 * size**2 + 2 * size * vision.ffn_width
    mergers = (1 + len(vision.deepstack_layers)) * vision.merged_width * (vision.merged_width + spec.hidden_size)
    own = own_spec(spec, RankPosition(replace(layout, pp=1)))
    of_a_token = sum(
        _multiplications(*layers, spec.hidden_size, layout) for layers in zip(spec.layers, own.layers, strict=True)
    )
    linear = patches * (vision.num_layers * layer + size * vision.patch_width) + mergers
    return EncoderCost(linear / of_a_token, patches**2 * vision.num_layers * 2 * size / of_a_token)


def _multiplications(whole: LayerSpec, own: LayerSpec, hidden_size: int, layout: Layout) -> float:
    """Return the multiplications of a rank for a token of its group. `own`: its part of the layer."""
    attention, ffn = own.attention, own.ffn
    assert isinstance(attention, AttentionSpec), "models with images have grouped-query attention"
    count = hidden_size * (2 * attention.q_width + 2 * attention.kv_width)
    if isinstance(ffn, DenseSpec):
        return count + 3 * hidden_size * ffn.width
    assert isinstance(whole.ffn, MoeSpec)
    of_experts = 3 * hidden_size * whole.ffn.width * whole.ffn.routing.top_k
    num_ranks = layout.ffn_ranks or layout.stage_size  # they compute the experts of all groups' tokens
    return count + of_experts * layout.dp / num_ranks + hidden_size * whole.ffn.routing.num_experts
