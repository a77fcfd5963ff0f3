"""Which tensor on disk goes to which part of which weight. Knows names and shapes; reads no file.

Models for embeddings are often saved without their head, and then without `model.` before every name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.model.names.attention import attention_places
from moiety_engine.model.names.feed_forward import feed_forward_places
from moiety_engine.model.names.place import Place, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moiety_engine.model.names.place import Named
    from moiety_engine.model.spec import LayerSpec, ModelSpec
    from moiety_engine.model.weights import LayerWeights, ModelWeights, NormWeights

__all__ = ["Place", "ignorable", "placements"]

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # tables that some old checkpoints carry


def placements(spec: ModelSpec, weights: ModelWeights, present: set[str]) -> dict[str, Place]:
    """Name on disk → where it goes. Of several ways to name a thing the one that is `present` is taken."""
    root = "" if "embed_tokens.weight" in present else "model."
    found = {f"{root}embed_tokens.weight": whole(weights.embedding_VD)}
    found.update(_norm(f"{root}norm", weights.final_norm))
    if not spec.tie_word_embeddings:
        found["lm_head.weight"] = whole(weights.head_VD)
    if weights.head_bias_V is not None:
        found["lm_head.bias"] = whole(weights.head_bias_V)
    for index, (layer_spec, layer) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        prefix = f"{root}layers.{index}."
        local = {name.removeprefix(prefix) for name in present if name.startswith(prefix)}
        found.update((prefix + name, place) for name, place in _layer(layer_spec, layer, local))
    return found


def ignorable(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor that has no place may be in the checkpoint all the same."""
    copied_head = spec.tie_word_embeddings and name == "lm_head.weight"
    return copied_head or name.endswith(_IGNORED_SUFFIXES) or name.startswith(spec.ignored_prefixes)


def _layer(spec: LayerSpec, layer: LayerWeights, present: set[str]) -> Iterator[Named]:
    yield from _norm("input_layernorm", layer.attention_norm)
    yield from _norm("post_attention_layernorm", layer.ffn_norm)
    yield from attention_places(spec.attention, layer.attention)
    yield from feed_forward_places(layer.ffn, present)


def _norm(name: str, weights: NormWeights) -> Iterator[Named]:
    yield f"{name}.weight", whole(weights.weight_D)
    if weights.bias_D is not None:
        yield f"{name}.bias", whole(weights.bias_D)
