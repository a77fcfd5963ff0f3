"""Names in checkpoints where attention and feed-forward are layers of their own (Nemotron-H)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.model.recurrent_specs import RecurrentSpec

if TYPE_CHECKING:
    from moiety_engine.model.spec import LayerSpec


def prefixes_of_halves(spec: LayerSpec, start: int) -> dict[str, str]:
    """Return the usual prefix of names within a layer for each prefix on disk, which follows `layers.`.

    A layer on disk is a norm and a mixer. The layer's attention is layer `start` on disk, and its feed-forward, if it
    has one, the next layer.
    """
    attention = "mamba." if isinstance(spec.attention, RecurrentSpec) else "self_attn."
    found = {f"{start}.norm.": "input_layernorm.", f"{start}.mixer.": attention}
    if spec.ffn is not None:
        found |= {f"{start + 1}.norm.": "post_attention_layernorm.", f"{start + 1}.mixer.": "mlp."}
    return found
