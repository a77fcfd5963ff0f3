"""Families that people run and that are not served: what each needs that no layer here has."""

from __future__ import annotations

_HYPER_CONNECTIONS = "several residual streams (hyper-connections)"

_BLOCK_SELECTION = "attention to selected blocks of keys, by key-value head"
_SHARED_LATENTS = "layers that share another layer's latent cache, and learned rotary frequencies"
_NO_DEFINITION = "a public definition, which transformers 5.24 does not have"

# What a family needs, by `model_type`.
UNSUPPORTED: dict[str, str] = {
    "dots3": _NO_DEFINITION,
    "ernie4_5_vl_moe": "experts of their own for tokens of images, and a vision encoder",
    "glm5_next": f"{_HYPER_CONNECTIONS} around Kimi Delta Attention and sparse latent attention",
    "hy_v4": f"{_HYPER_CONNECTIONS}, and sinks and output gates in sparse latent attention",
    "inkling": _NO_DEFINITION,
    "minimax_m3": _BLOCK_SELECTION,
    "minimax_m3_vl": _BLOCK_SELECTION,
    "mistral_large4": _SHARED_LATENTS,
    "mistral_large4_text": _SHARED_LATENTS,
    "muse_spark": "gated residuals, norms of embeddings, and encoders of images and sound",
    "qwen4_exp": "sparse attention with grouped heads, gated residuals, and embeddings of n-grams",
    "qwen4_exp_text": "sparse attention with grouped heads, gated residuals, and embeddings of n-grams",
    "step3p5": _NO_DEFINITION,
    "step3p7": "limits of activated gates, and a vision encoder",
}
