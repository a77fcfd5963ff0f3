"""Names of a vision encoder's tensors, as Qwen3-VL's checkpoints have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.model.names.tensor_mapping import reshaped, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moiety_engine.model.names.tensor_mapping import Named
    from moiety_engine.model.norm_weights import NormWeights
    from moiety_engine.model.vision_spec import VisionSpec
    from moiety_engine.model.vision_weights import LinearWeights, PatchMergerWeights, VisionWeights

_ROOTS = ("model.visual.", "visual.")


def vision_places(spec: VisionSpec, weights: VisionWeights, present: set[str]) -> Iterator[Named]:
    """Yield the names and mappings of the encoder's tensors. `present`: the names in the checkpoint."""
    root = next((root for root in _ROOTS if f"{root}patch_embed.proj.weight" in present), _ROOTS[0])
    patch_shape = (spec.num_channels, spec.temporal_patch_size, spec.patch_size, spec.patch_size)
    patch = weights.patch
    yield f"{root}patch_embed.proj.weight", reshaped(patch.weight_OI, (spec.hidden_size, *patch_shape))
    yield f"{root}patch_embed.proj.bias", whole(patch.bias_O)
    yield f"{root}pos_embed.weight", whole(weights.positions_QD)
    for index, layer in enumerate(weights.layers):
        block = f"{root}blocks.{index}."
        yield from _norm(f"{block}norm1", layer.attention_norm)
        yield from _linear(f"{block}attn.qkv", layer.qkv)
        yield from _linear(f"{block}attn.proj", layer.output)
        yield from _norm(f"{block}norm2", layer.ffn_norm)
        yield from _linear(f"{block}mlp.linear_fc1", layer.up)
        yield from _linear(f"{block}mlp.linear_fc2", layer.down)
    yield from _merger(f"{root}merger.", weights.merger)
    for index, merger in enumerate(weights.deepstack):
        yield from _merger(f"{root}deepstack_merger_list.{index}.", merger)


def _merger(prefix: str, weights: PatchMergerWeights) -> Iterator[Named]:
    yield from _norm(f"{prefix}norm", weights.norm)
    yield from _linear(f"{prefix}linear_fc1", weights.up)
    yield from _linear(f"{prefix}linear_fc2", weights.down)


def _linear(name: str, weights: LinearWeights) -> Iterator[Named]:
    yield f"{name}.weight", whole(weights.weight_OI)
    yield f"{name}.bias", whole(weights.bias_O)


def _norm(name: str, weights: NormWeights) -> Iterator[Named]:
    assert weights.bias_D is not None
    yield f"{name}.weight", whole(weights.weight_D)
    yield f"{name}.bias", whole(weights.bias_D)
