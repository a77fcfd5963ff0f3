"""Names of the tensors of an MTP layer that are not named as those of a further layer of the model, as data."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

_INDEX = re.compile(r"^((?:model\.)?mtp\.(?:layers\.)?)0\.")


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Names without `.weight`, and prefixes, of an MTP layer's tensors.

    `token_norm` and `before_norm` normalize the token's embedding and the hidden state before it, and `projection`
    combines both. `layer`: the prefix on disk of each usual prefix of names within a layer; of two that a name begins
    with, the first one is meant. `second_projection`: the half of the projection for the hidden state, where it is
    stored apart. `copies`: copies of the model's embedding and head that files may have, each with the name of the
    model's own. `streams`: prefix of the hyper-connections that end the layer's residual streams.
    """

    token_norm: str
    before_norm: str
    projection: str
    final_norm: str
    layer: tuple[tuple[str, str], ...]
    second_projection: str | None = None
    copies: tuple[tuple[str, str], ...] = ()
    streams: str | None = None

    def at(self, index: int) -> MtpNames:
        """Return the names of the MTP layer with this index; these are those of the first one.

        What names have no index is shared by all layers.
        """

        def renamed(name: Any) -> Any:
            if isinstance(name, tuple):
                return tuple(map(renamed, name))
            return name if name is None else _INDEX.sub(rf"\g<1>{index}.", name)

        return replace(self, **{field.name: renamed(getattr(self, field.name)) for field in fields(self)})


QWEN_MTP = MtpNames(  # of Qwen3-Next, Qwen 3.5 and K-EXAONE
    token_norm="mtp.pre_fc_norm_embedding",
    before_norm="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    final_norm="mtp.norm",
    layer=(("", "mtp.layers.0."),),
)
LONGCAT_MTP = MtpNames(
    token_norm="model.mtp.layers.0.enorm.m",
    before_norm="model.mtp.layers.0.hnorm.m",
    projection="model.mtp.layers.0.eh_proj",
    final_norm="model.mtp.norm",
    layer=(("mlp.", "model.mtp.layers.0.transformer_layer.mlp."), ("", "model.mtp.layers.0.")),
    copies=(("model.mtp.embed_tokens", "model.embed_tokens"),),
)
DEEPSEEK_V4_MTP = MtpNames(
    token_norm="mtp.0.enorm",
    before_norm="mtp.0.hnorm",
    projection="mtp.0.e_proj",
    final_norm="mtp.0.norm",
    layer=(("", "mtp.0."),),
    second_projection="mtp.0.h_proj",
    copies=(("mtp.0.emb.tok_emb", "embed"), ("mtp.0.head", "head")),
    streams="mtp.0.hc_head_",
)


def nemotron_mtp_names(num_sublayers: int) -> MtpNames:
    """Return the names of Nemotron 3's MTP layer, whose attention and feed-forward, if it has one, are layers on disk.

    Source: vLLM's nemotron_h_mtp.py, which reads the published checkpoints.
    """
    sublayers = (("input_layernorm.", "self_attn."), ("post_attention_layernorm.", "mlp."))[:num_sublayers]
    stored = [(f"mtp.layers.{index}.norm.", f"mtp.layers.{index}.mixer.") for index in range(num_sublayers)]
    return MtpNames(
        token_norm="mtp.layers.0.enorm",
        before_norm="mtp.layers.0.hnorm",
        projection="mtp.layers.0.eh_proj",
        final_norm=f"mtp.layers.{num_sublayers - 1}.final_layernorm",
        layer=tuple(pair for own, disk in zip(sublayers, stored, strict=True) for pair in zip(own, disk, strict=True)),
    )
