"""Families that people run and that are not served: what each needs that no layer here has."""

from __future__ import annotations

_HYPER_CONNECTIONS = "several residual streams (hyper-connections)"

# What a family needs, by `model_type`.
UNSUPPORTED: dict[str, str] = {
    "hy_v4": f"{_HYPER_CONNECTIONS}, and sinks and output gates in sparse latent attention",
    "minimax_m3_vl": "attention to selected blocks of keys, by key-value head",
    "mistral_large4": "layers that share another layer's latent cache, and learned rotary frequencies",
    "mistral_large4_text": "layers that share another layer's latent cache, and learned rotary frequencies",
}
