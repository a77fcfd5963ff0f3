"""Catalogue of the supported families for documents and for `moiety models`: released models, and what is special."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moiety_engine.model.families.config import Config


@dataclass(frozen=True, slots=True)
class FamilyEntry:
    """Entry of one `model_type`.

    `settings`: values of config.json keys beside the class's defaults that make a model of the family, where the
    defaults alone make none or an untypical one.
    """

    examples: str
    attention: str
    feed_forward: str
    settings: Config = field(default_factory=dict)


_DEEPSEEK = "sigmoid; the best groups by their two best experts, with a selection bias; shared experts"
_AS_DEEPSEEK = "as DeepSeek-V3; first layers dense"
_GRANITE = "softmax over the chosen; multipliers of embedding, residuals and logits"
_SIGMOID = "sigmoid, with a selection bias; shared experts; first layers dense"
_NO_ROPE = "windows; full attention without positions"
_DELTA = "gated DeltaNet in three of four layers, else norms of heads and an output gate"
_WITH_SHARED = "softmax, renormalised; a shared expert with a gate"

_LING_ATTENTION = "part of each head rotated, norms of heads"
_LING: Config = {  # Ling mini 2.0
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
    "score_function": "sigmoid",
    "vocab_size": 157_184,
    "max_position_embeddings": 32_768,
}

CATALOG: dict[str, FamilyEntry] = {
    "afmoe": FamilyEntry("Trinity Mini, Nano", f"norms of heads, an output gate, {_NO_ROPE}", _SIGMOID),
    "aria_text": FamilyEntry(
        "the text model of Aria",
        "grouped",
        "softmax over the chosen; shared experts",
        {
            "hidden_size": 2560,
            "intermediate_size": 1664,
            "moe_num_experts": 64,
            "moe_topk": 6,
            "num_attention_heads": 20,
            "num_hidden_layers": 28,
        },
    ),
    "axk1": FamilyEntry("A.X-K1", "latent, YaRN", f"{_AS_DEEPSEEK}; a norm of the output of experts"),
    "axk2": FamilyEntry(
        "A.X-K2-Light",
        "latent, an output gate; sparse: an indexer selects 2,048 tokens",
        f"{_AS_DEEPSEEK}; norms of inputs have gates",
    ),
    "bailing_hybrid": FamilyEntry(
        "Ling 3, Ring 3", "Kimi Delta Attention; in every sixth layer latent with gates of heads", _AS_DEEPSEEK
    ),
    "bailing_moe": FamilyEntry("Ling 2.0, Ring 2.0 (BailingMoeV2)", _LING_ATTENTION, _AS_DEEPSEEK, _LING),
    "bailing_moe_v2": FamilyEntry("Ling 2.0, Ring 2.0 (BailingMoeV2)", _LING_ATTENTION, _AS_DEEPSEEK, _LING),
    "cohere2_moe": FamilyEntry(
        "Cohere 2 with experts",
        "rotates neighbours, windows; full attention without positions; beside the feed-forward",
        "softmax or sigmoid of the chosen; the mean with shared experts; LayerNorm; scaled logits",
    ),
    "dbrx": FamilyEntry("DBRX Base, Instruct", "grouped, clipping", "softmax, renormalised; LayerNorm"),
    "deepseek_v2": FamilyEntry(
        "DeepSeek-V2, V2-Lite",
        "latent, YaRN",
        "softmax; the best groups by their best expert; scaled; shared experts",
        {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    ),
    "deepseek_v3": FamilyEntry("DeepSeek-V3, R1", "latent, YaRN", _DEEPSEEK),
    "deepseek_v32": FamilyEntry(
        "DeepSeek-V3.2, V3.2-Exp", "latent, YaRN; sparse: an indexer selects 2,048 tokens", _DEEPSEEK
    ),
    "deepseek_v4": FamilyEntry(
        "DeepSeek-V4-Flash, V4-Pro, on a CPU",
        "a window of 128 tokens beside entries for 4 and for 128 tokens; sparse: an indexer selects 512 of the former",
        "square root of softplus, with a selection bias; a hash chooses in the first layers; a shared expert; "
        "hyper-connections",
    ),
    "dots1": FamilyEntry(
        "dots.llm1",
        "norms of heads, windows",
        "as DeepSeek-V3",
        {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    ),
    "ernie4_5_moe": FamilyEntry(
        "ERNIE-4.5-21B-A3B, 300B-A47B",
        "grouped, rotates neighbours",
        "softmax with a selection bias; shared experts; first layers dense",
    ),
    "exaone_moe": FamilyEntry("K-EXAONE-236B-A23B", f"norms of heads, {_NO_ROPE}", _AS_DEEPSEEK),
    "falcon_h1": FamilyEntry(
        "Falcon-H1 (0.5B to 34B)",
        "Mamba-2 beside grouped attention in each layer; multipliers",
        "dense; multipliers",
    ),
    "flex_olmo": FamilyEntry("FlexOlmo-7x7B-1T", "norms of all heads at once", "softmax; norms of outputs only"),
    "gemma3": FamilyEntry("Gemma 3 (its text)", "norms of heads, windows, two rotary bases", "dense, GELU"),
    "gemma3_text": FamilyEntry("Gemma 3 1B", "norms of heads, windows, two rotary bases", "dense, GELU"),
    "gemma4_text": FamilyEntry(
        "the text model of Gemma 4 E2B, E4B, 26B-A4B and 31B",
        "norms of heads and values, windows; full attention with wider heads whose keys are values; in E2B and E4B "
        "upper layers read the keys and values of lower ones",
        "softmax, renormalised, beside a dense feed-forward, each with norms of its own; or dense; in E2B and E4B "
        "embeddings of each token by layer",
        {
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "hidden_size": 2816,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 2112,
            "moe_intermediate_size": 704,
            "num_attention_heads": 16,
            "num_experts": 128,
            "num_global_key_value_heads": 2,
            "num_key_value_heads": 8,
            "sliding_window": 1024,
            "top_k_experts": 8,
        },
    ),
    "glm4_moe": FamilyEntry("GLM-4.5, 4.5-Air, 4.6", "part of each head rotated, norms of heads", _AS_DEEPSEEK),
    "glm4_moe_lite": FamilyEntry("GLM-4.7-Flash", "latent", _AS_DEEPSEEK),
    "glm_moe_dsa": FamilyEntry(
        "GLM-5, 5.1, 5.2", "latent; sparse: an indexer selects 2,048 tokens, for one or several layers", _AS_DEEPSEEK
    ),
    "gpt_oss": FamilyEntry(
        "gpt-oss-20b, 120b", "sinks, windows, YaRN", "softmax over the chosen, biases, clipped activation"
    ),
    "granite": FamilyEntry(
        "Granite 3.0 to 3.3 2B, 8B",
        "grouped, a configured attention scale",
        "dense; multipliers of embedding, residuals and logits",
    ),
    "granitemoe": FamilyEntry(
        "Granite 3.0 and 3.1 1B-A400M, 3B-A800M", "grouped, a configured attention scale", _GRANITE
    ),
    "granitemoe_swa": FamilyEntry(
        "Granite Swash 3B-A600M", "sinks, windows, a rotary base by layer or none", f"{_GRANITE}; shared experts"
    ),
    "granitemoehybrid": FamilyEntry(
        "Granite 4.0 (H-Small, H-Tiny, H-Micro)",
        "Mamba-2; in few layers full attention without positions",
        f"{_GRANITE}; shared experts",
        {"layer_types": ["mamba", "mamba", "mamba", "attention"], "num_hidden_layers": 4},
    ),
    "granitemoeshared": FamilyEntry(
        "Granite with shared experts", "grouped, a configured attention scale", f"{_GRANITE}; shared experts"
    ),
    "hunyuan_v1_moe": FamilyEntry(
        "Hunyuan-A13B",
        "norms of heads after the rotation, NTK-aware base",
        "softmax, renormalised; a shared expert",
        {"num_experts": 64, "moe_topk": 8},
    ),
    "hy_v3": FamilyEntry("Hy3", "norms of heads", _SIGMOID),
    "jamba": FamilyEntry(
        "Jamba v0.1, 1.5, 1.6, 1.7 (Mini, Large)",
        "Mamba; in every eighth layer full attention without positions",
        "softmax; every other layer dense",
    ),
    "jetmoe": FamilyEntry(
        "JetMoe-8B",
        "query heads of each token's own experts; all share the keys and values",
        "softmax over the chosen",
        {"num_hidden_layers": 24, "rms_norm_eps": 1e-5},
    ),
    "kimi_linear": FamilyEntry(
        "Kimi-Linear-48B-A3B",
        "Kimi Delta Attention; in every fourth layer latent without positions",
        _SIGMOID,
    ),
    "kimi_k2": FamilyEntry("Kimi K2, K2 Thinking", "latent, YaRN", _DEEPSEEK),
    "kolibri1": FamilyEntry(
        "Kolibri 1",
        f"norms of heads, {_NO_ROPE}",
        "sigmoids of the chosen logits, with a selection bias; a shared expert; norms of outputs too",
    ),
    "laguna": FamilyEntry(
        "Laguna XS.2", "norms of heads, windows, query heads by layer, an output gate, two rotary embeddings", _SIGMOID
    ),
    "lfm2_moe": FamilyEntry(
        "LFM2-8B-A1B, LFM2-24B-A2B",
        "short convolutions with gates; in every fourth layer norms of heads",
        "sigmoid, with a selection bias; first layers dense",
        {  # LFM2-8B-A1B
            "layer_types": ["full_attention" if index in (2, 6, 10, 14, 18, 21) else "conv" for index in range(24)],
            "num_hidden_layers": 24,
        },
    ),
    "llama4_text": FamilyEntry(
        "the text model of Llama 4 Scout, Maverick",
        "chunks, norms of heads after the rotation; every fourth layer sees all, without positions",
        "sigmoid of the one chosen, which scales its input; a shared expert; every other layer dense in Maverick",
    ),
    "llama": FamilyEntry("Llama 2, 3 and models with the same architecture", "grouped", "dense"),
    "longcat_flash": FamilyEntry(
        "LongCat-Flash-Chat, LongCat-Flash-Thinking",
        "latent, twice a layer",
        "softmax with a selection bias; 256 of 768 experts return their input; their output is added a half later, "
        "beside dense feed-forwards",
    ),
    "mellum": FamilyEntry(
        "Mellum 2 12B-A2.5B",
        "norms of heads, windows, two rotary embeddings",
        "softmax, renormalised; some layers dense",
    ),
    "mimo_v2_flash": FamilyEntry(
        "MiMo-V2-Flash",
        "part of each head rotated, narrower values; windows with sinks and twice the key-value heads",
        "as DeepSeek-V3 without shared experts; first layer dense",
    ),
    "minimax": FamilyEntry(
        "MiniMax-Text-01, MiniMax-M1, and their hf versions",
        "lightning attention and full attention by layer; residuals after the norms",
        "softmax, renormalised",
    ),
    "minimax_m2": FamilyEntry(
        "MiniMax-M2, M2.5",
        "part of each head rotated, norms of all heads at once",
        "sigmoid, with a selection bias",
    ),
    "mistral": FamilyEntry("Mistral 7B, Nemo", "grouped, windows", "dense"),
    "mistral4": FamilyEntry(
        "the text model of Mistral Small 4",
        "latent, YaRN, queries that grow with the position",
        "softmax; the best groups by their two best experts; shared experts",
    ),
    "mixtral": FamilyEntry("Mixtral 8x7B, 8x22B", "grouped, windows", "softmax, renormalised"),
    "nemotron_h": FamilyEntry(
        "Nemotron 3 Nano, Super; Nemotron-H, Nemotron Nano 2",
        "Mamba-2; in few layers full attention without positions",
        "sigmoid, with a selection bias, squared ReLU without gates, in a narrower width in Super; a shared expert; "
        "dense in Nemotron-H and Nano 2",
        {  # Nemotron 3 Nano 30B-A3B
            "hidden_size": 2688,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "mamba_num_heads": 64,
            "max_position_embeddings": 262_144,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "num_key_value_heads": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "olmoe": FamilyEntry("OLMoE 1B-7B", "norms of all heads at once, clipping", "softmax"),
    "phimoe": FamilyEntry("Phi-3.5-MoE, Phi-mini-MoE", "grouped, LongRoPE, LayerNorm", "sparse mixer"),
    "qwen2": FamilyEntry("Qwen 2, 2.5", "grouped, biases, windows", "dense"),
    "qwen2_moe": FamilyEntry(
        "Qwen1.5-MoE, Qwen2-57B-A14B", "grouped, biases, windows", "softmax; a shared expert with a gate"
    ),
    "qwen3": FamilyEntry("Qwen 3", "norms of heads, windows", "dense"),
    "qwen3_5": FamilyEntry("Qwen 3.5 (its text)", _DELTA, "dense"),
    "qwen3_5_moe": FamilyEntry("Qwen3.5-35B-A3B (its text)", _DELTA, _WITH_SHARED),
    "qwen3_5_moe_text": FamilyEntry("the text model of Qwen3.5-35B-A3B", _DELTA, _WITH_SHARED),
    "qwen3_5_text": FamilyEntry("the text model of Qwen 3.5", _DELTA, "dense"),
    "qwen3_moe": FamilyEntry(
        "Qwen3-30B-A3B, 235B-A22B", "norms of heads, windows", "softmax, renormalised; some layers dense"
    ),
    "qwen3_next": FamilyEntry("Qwen3-Next-80B-A3B", _DELTA, f"{_WITH_SHARED}; some layers dense"),
    "qwen3_vl_moe": FamilyEntry(
        "Qwen3-VL-30B-A3B, 235B-A22B",
        "norms of heads, M-RoPE; a vision encoder ([images](images.md))",
        "softmax, renormalised; some layers dense",
        {"vision_config": {"out_hidden_size": 2048}},
    ),
    "sarvam_mla": FamilyEntry("Sarvam-105B", "latent, YaRN", _AS_DEEPSEEK),
    "sarvam_moe": FamilyEntry("Sarvam-30B", "norms of heads", _AS_DEEPSEEK),
    "solar_open": FamilyEntry("Solar Open 100B", "grouped", "as DeepSeek-V3"),
    "zaya": FamilyEntry(
        "ZAYA1-8B, 74B-preview",
        "convolutions of queries and keys; half of the values are those of the token before",
        "softmax with a selection bias, one expert or none; routers continue those of the layers before",
    ),
}
