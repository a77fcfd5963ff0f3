"""Mapping of tensor names on disk to parts of weights. Handles names and shapes; reads no file.

Embedding models are often saved without their head, and then without the prefix `model.`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from moiety_engine.model.mtp_names import QWEN_MTP, MtpNames
from moiety_engine.model.names.attention import attention_places
from moiety_engine.model.names.compressed import stream_places
from moiety_engine.model.names.feed_forward import expert_places, feed_forward_places
from moiety_engine.model.names.sublayers import stored_prefixes
from moiety_engine.model.names.tensor_mapping import Shares, TensorMapping, plain, raised, whole
from moiety_engine.model.names.vision import vision_places
from moiety_engine.model.quantization_formats import KV_SCALES
from moiety_engine.model.spec import MoeSpec, kv_layer_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from moiety_engine.model.names.tensor_mapping import Named
    from moiety_engine.model.norm_weights import NormWeights
    from moiety_engine.model.residual_weights import TermScale
    from moiety_engine.model.spec import LayerSpec, ModelSpec
    from moiety_engine.model.weights import LayerWeights, ModelWeights, MtpInputWeights

__all__ = ["ignorable", "mtp_prefix", "placements", "root_and_embedding"]

_EXPERT = re.compile(r"\bmlp\.experts\.(\d+)\.")
_KEYS_OF_LAYER = re.compile(r"\blayers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.")
_EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "embed.weight", "embeddings.weight", "wte.weight")
_FINAL_NORMS = ("norm", "norm_f", "embedding_norm", "final_layernorm")
_HEADS = ("lm_head.weight", "head.weight")
_ATTENTION_POST_NORMS = ("post_self_attn_layernorm", "post_attn_norm", "post_attention_layernorm")
_FFN_POST_NORMS = ("post_feedforward_layernorm", "post_mlp_layernorm", "mlp.post_mlp_layernorm", "post_ffn_norm")
# The second name is that of the MTP layer of MiMo, the third of DeepSeek-V4 and LFM2, the fourth of Jamba, the last of
# DBRX.
_USUAL_FFN_NORMS = (
    "post_attention_layernorm",
    "pre_mlp_layernorm",
    "ffn_norm",
    "pre_ff_layernorm",
    "norm_attn_norm.norm_2",
)
_ATTENTION_NORMS = ("input_layernorm", "attn_norm", "operator_norm", "norm_attn_norm.norm_1")
_HEAD_STREAMS = ("hc_head_", "hc_head.hc_")  # the second as transformers saves it
_FINAL_NORM_OF_MIMO = "final_layernorm"  # of its MTP layer
_FFN_NORMS = ("pre_feedforward_layernorm", "pre_mlp_layernorm")  # where post_attention_layernorm is another norm
# Prefixes: usual, of embedding models, of the text part of vision models as published, and as in transformers 5, of
# Nemotron-H, and of DBRX.
_ROOTS = ("model.", "", "language_model.model.", "model.language_model.", "backbone.", "transformer.")
_BLOCKS = "transformer.blocks."  # DBRX's layers
_RAISED_NORMS = ("norm.weight", f"{QWEN_MTP.token_norm}.weight", f"{QWEN_MTP.before_norm}.weight")
_PLAIN_NORMS = ("linear_attn.norm.weight",)  # without the offset of the model's other norms
# Tables that some checkpoints have: of rotary embeddings, and of the constant decays of lightning attention.
_DECAY_TABLES = tuple(f"self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"))
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", *_DECAY_TABLES)


def placements(spec: ModelSpec, weights: ModelWeights, present: set[str]) -> dict[str, TensorMapping | Shares]:
    """Return the mapping of each tensor, by name on disk. Of alternative names the one in `present` is used."""
    root, embedding = root_and_embedding(present)
    found: dict[str, TensorMapping | Shares] = dict(_around(spec, weights, root, embedding, present))
    layers = zip(spec.layers, weights.layers, strict=True)
    layers_root = _BLOCKS if any(name.startswith(_BLOCKS) for name in present) else f"{root}layers."
    for index, (layer_spec, layer) in enumerate(layers):
        if spec.block_starts:
            found.update(_stored(layer_spec, layer, f"{root}layers.", stored_prefixes(spec, index), present))
            continue
        prefix = f"{layers_root}{index}."
        if spec.mtp_after is not None:
            if spec.mtp_names is not None:
                stored_as = dict(spec.mtp_names.at(spec.mtp_index).layer)
                found.update(_stored(layer_spec, layer, "", stored_as, present))
                continue
            prefix = mtp_prefix(root, spec.mtp_after, present, spec.mtp_index)
        local = {name.removeprefix(prefix) for name in present if name.startswith(prefix)}
        found.update((prefix + name, place) for name, place in _layer(layer_spec, layer, local))
    if spec.vision is not None and weights.vision is not None:
        found.update(vision_places(spec.vision, weights.vision, present))
    offset = spec.norm.weight_offset
    return {name: _raised(name, place, offset) for name, place in found.items()} if offset else found


def root_and_embedding(present: Collection[str]) -> tuple[str, str]:
    """Return the prefix of the decoder's tensors, and the name of its embedding after the prefix."""
    embeddings = ((root, name) for root in _ROOTS for name in _EMBEDDINGS if root + name in present)
    return next(embeddings, (_ROOTS[0], _EMBEDDINGS[0]))


def ignorable(name: str, spec: ModelSpec) -> bool:
    """Return whether a checkpoint may contain this tensor although no weight uses it."""
    if spec.has_zero_experts and _of_zero_expert(name, spec):
        return True
    if spec.layer_embeddings is not None and _of_unused_keys(name, spec):
        return True
    copied_head = spec.tie_word_embeddings and name in ("lm_head.weight", "language_model.lm_head.weight")
    return copied_head or name.endswith(_IGNORED_SUFFIXES + KV_SCALES) or name.startswith(spec.ignored_prefixes)


def _of_unused_keys(name: str, spec: ModelSpec) -> bool:
    """Return whether the tensor belongs to the keys or values of a layer that reads those of another layer."""
    found = _KEYS_OF_LAYER.search(name)
    return found is not None and kv_layer_of(spec.layers[int(found[1])].attention) is not None


def _of_zero_expert(name: str, spec: ModelSpec) -> bool:
    """Return whether the tensor is that of an expert without weights, for which transformers saves some."""
    expert = _EXPERT.search(name)
    counts = {layer.ffn.num_experts for layer in spec.layers if isinstance(layer.ffn, MoeSpec)}
    return expert is not None and int(expert[1]) >= max(counts)


def mtp_prefix(root: str, num_layers: int, present: Collection[str], index: int = 0) -> str:
    """Return the prefix of the tensors of a model's MTP layer with this index: MiMo's are numbered from 0."""
    if f"{root}mtp.layers.0.eh_proj.weight" in present:
        return f"{root}mtp.layers.{index}."
    return f"{root}layers.{num_layers + index}."


def _usual_mtp_names(prefix: str, present: Collection[str]) -> MtpNames:
    final = _FINAL_NORM_OF_MIMO if f"{prefix}{_FINAL_NORM_OF_MIMO}.weight" in present else "shared_head.norm"
    return MtpNames(f"{prefix}enorm", f"{prefix}hnorm", f"{prefix}eh_proj", f"{prefix}{final}", (("", prefix),))


def _mtp_places(names: MtpNames, weights: ModelWeights, mtp_input: MtpInputWeights) -> Iterator[Named]:
    """Yield the names and mappings of an MTP layer's weights outside its layer."""
    yield from _norm(names.token_norm, mtp_input.token_norm)
    yield from _norm(names.before_norm, mtp_input.before_norm)
    if names.second_projection is None:
        yield f"{names.projection}.weight", whole(mtp_input.projection_DJ)
    else:
        halves = zip((names.projection, names.second_projection), mtp_input.projection_DJ.chunk(2, dim=1), strict=True)
        yield from ((f"{name}.weight", whole(half_DD)) for name, half_DD in halves)
    if names.streams is not None and weights.streams is not None:
        yield from stream_places(names.streams, weights.streams)
    yield from _norm(names.final_norm, weights.final_norm)


def _around(spec: ModelSpec, weights: ModelWeights, root: str, embedding: str, present: set[str]) -> Iterator[Named]:
    """Yield the names and mappings of the weights outside the layers."""
    mtp_input = weights.mtp_input
    if mtp_input is not None:
        usual = _usual_mtp_names(mtp_prefix(root, spec.mtp_after or 0, present, spec.mtp_index), present)
        names = usual if spec.mtp_names is None else spec.mtp_names.at(spec.mtp_index)
        yield from _mtp_places(names, weights, mtp_input)
        return
    outside = "language_model." if root == "language_model.model." else ""
    yield root + embedding, whole(weights.embedding_VD)
    final = next((name for name in _FINAL_NORMS if f"{root}{name}.weight" in present), _FINAL_NORMS[0])
    yield from _norm(f"{root}{final}", weights.final_norm)
    if not spec.tie_word_embeddings:
        head = next((name for name in _HEADS if outside + name in present), _HEADS[0])
        yield outside + head, whole(plain(weights.head_VD))
    if weights.streams is not None:
        streams = next((name for name in _HEAD_STREAMS if f"{root}{name}fn" in present), _HEAD_STREAMS[0])
        yield from stream_places(root + streams, weights.streams)
    if weights.layer_embeddings is not None:
        yield f"{root}embed_tokens_per_layer.weight", whole(weights.layer_embeddings.table_VA)
        yield f"{root}per_layer_model_projection.weight", whole(weights.layer_embeddings.projection_AD)
        yield f"{root}per_layer_projection_norm.weight", whole(weights.layer_embeddings.norm_P)
    if weights.input_scale is not None:
        yield from _term(f"{root}input_hidden_states_", weights.input_scale)
    if weights.head_bias_V is not None:
        yield f"{outside}lm_head.bias", whole(weights.head_bias_V)


def _stored(
    spec: LayerSpec, layer: LayerWeights, root: str, stored_as: dict[str, str], present: set[str]
) -> Iterator[Named]:
    """Yield the names and mappings of a layer with other prefixes on disk than the usual ones."""
    local = {
        prefix + name.removeprefix(root + stored)
        for prefix, stored in stored_as.items()
        for name in present
        if name.startswith(root + stored)
    }
    for name, place in _layer(spec, layer, local):
        prefix = next(prefix for prefix in stored_as if name.startswith(prefix))
        yield root + stored_as[prefix] + name.removeprefix(prefix), place


def _layer(spec: LayerSpec, layer: LayerWeights, present: set[str]) -> Iterator[Named]:
    if spec.only_experts:
        if spec.ffn is not None and layer.ffn is not None:
            yield from expert_places(spec.ffn, layer.ffn, present)
        return
    ffn_norm = _norm_name(_USUAL_FFN_NORMS, present)
    if layer.attention_post_norm is not None:
        post_norm = _norm_name(_ATTENTION_POST_NORMS, present)
        yield from _norm(post_norm, layer.attention_post_norm)
        ffn_norm = _norm_name(_FFN_NORMS, present) if post_norm == _USUAL_FFN_NORMS[0] else _USUAL_FFN_NORMS[0]
    if layer.attention_norm is not None:
        yield from _norm(_norm_name(_ATTENTION_NORMS, present), layer.attention_norm)
    if layer.ffn_norm is not None:
        yield from _norm(ffn_norm, layer.ffn_norm)
    for prefix, streams in (("hc_attn_", layer.attention_streams), ("hc_ffn_", layer.ffn_streams)):
        if streams is not None:
            yield from stream_places(prefix, streams)
    yield from _scales(layer)
    if layer.scale_1 is not None:
        yield "layer_scalar", whole(layer.scale_1)
    if layer.embedding is not None:
        yield "per_layer_input_gate.weight", whole(layer.embedding.gate_PD)
        yield "per_layer_projection.weight", whole(layer.embedding.projection_DP)
        yield "post_per_layer_input_norm.weight", whole(layer.embedding.post_norm_D)
    if layer.ffn_post_norm is not None:
        yield from _norm(_norm_name(_FFN_POST_NORMS, present), layer.ffn_post_norm)
    yield from attention_places(spec.attention, layer.attention, present)
    if spec.ffn is not None and layer.ffn is not None:
        yield from feed_forward_places(spec.ffn, layer.ffn, present)


def _scales(layer: LayerWeights) -> Iterator[Named]:
    """Yield the names and mappings of the factors and biases of residual connections, if the layer has them."""
    for half, scales in (("attention", layer.attention_scales), ("mlp", layer.ffn_scales)):
        if scales is not None:
            yield from _term(f"post_{half}_residual_scale.residual_", scales.input)
            yield from _term(f"post_{half}_residual_scale.hidden_states_", scales.output)


def _term(prefix: str, weights: TermScale) -> Iterator[Named]:
    yield f"{prefix}scale", whole(weights.factor_D)
    yield f"{prefix}bias", whole(weights.bias_D)


def _raised(name: str, place: TensorMapping | Shares, offset: float) -> TensorMapping | Shares:
    is_raised = name.endswith(_RAISED_NORMS) and not name.endswith(_PLAIN_NORMS)
    return raised(place, offset) if isinstance(place, TensorMapping) and is_raised else place


def _norm_name(names: tuple[str, ...], present: set[str]) -> str:
    """Return the name that is present; the first if none is, so that the error names it as missing."""
    return next((name for name in names if f"{name}.weight" in present), names[0])


def _norm(name: str, weights: NormWeights) -> Iterator[Named]:
    if weights.gate is not None:
        yield f"{name}.norm.weight", whole(weights.weight_D)
        yield f"{name}.W_down.weight", whole(weights.gate.down_RD)
        yield f"{name}.W_up.weight", whole(weights.gate.up_DR)
        return
    yield f"{name}.weight", whole(weights.weight_D)
    if weights.bias_D is not None:
        yield f"{name}.bias", whole(weights.bias_D)
