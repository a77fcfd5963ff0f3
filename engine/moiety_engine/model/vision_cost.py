"""Cost of a model's vision encoder relative to its decoder, by counts of multiplications."""

from __future__ import annotations

from moiety_engine.images.encoder_cost import NO_ENCODER, EncoderCost
from moiety_engine.model.spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, MoeSpec


def encoder_cost(spec: ModelSpec) -> EncoderCost:
    """Return the cost by counts of multiplications; 0 for a model without an encoder.

    The decoder's attention to earlier tokens is left out; the encoder's attention is the quadratic part.
    """
    vision = spec.vision
    if vision is None:
        return NO_ENCODER
    size, patches = vision.hidden_size, vision.merge_size**2
    layer = 4 * size**2 + 2 * size * vision.ffn_width
    mergers = (1 + len(vision.deepstack_layers)) * vision.merged_width * (vision.merged_width + spec.hidden_size)
    of_a_token = sum(_multiplications(one, spec.hidden_size) for one in spec.layers)
    linear = patches * (vision.num_layers * layer + size * vision.patch_width) + mergers
    return EncoderCost(linear / of_a_token, patches**2 * vision.num_layers * 2 * size / of_a_token)


def _multiplications(layer: LayerSpec, hidden_size: int) -> int:
    attention, ffn = layer.attention, layer.ffn
    assert isinstance(attention, AttentionSpec), "models with images have grouped-query attention"
    count = hidden_size * (2 * attention.q_width + 2 * attention.kv_width)
    if isinstance(ffn, DenseSpec):
        return count + 3 * hidden_size * ffn.width
    assert isinstance(ffn, MoeSpec)
    return count + 3 * hidden_size * ffn.width * ffn.routing.top_k + hidden_size * ffn.routing.num_experts
