"""Detection of config.json keys that no reader looks up, since the model may depend on them."""

from __future__ import annotations

from typing import Any

from moiety_engine.model.families.config import Config

# Keys that any transformers configuration may have: its origin, its software, and tasks other than generation.
_GENERIC = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_from_model_config",
    "_model_name_or_path", "_name_or_path", "_output_attentions", "architectures", "auto_map", "bos_token_id",
    "cache_implementation", "chunk_size_feed_forward", "cls_token_id", "decoder_start_token_id", "dtype",
    "eod_token_id", "eos_token_id", "finetuning_task", "id2label", "initializer_range", "is_llama_config", "label2id",
    "mask_token_id", "model_type", "output_attentions", "output_hidden_states", "output_scores", "pad_token_id",
    "problem_type", "return_dict", "return_dict_in_generate", "sep_token_id", "task_specific_params",
    "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version",
    "unk_token_id", "unsloth_fixed", "unsloth_version", "use_cache"
})  # fmt: skip
_TRAINING = frozenset({
    "attention_dropout", "aux_loss_alpha", "aux_loss_coef", "embedding_dropout", "ep_size", "input_jitter_noise",
    "output_dropout", "output_router_logits", "pretraining_tp", "router_aux_loss_coef", "router_jitter_noise",
    "seq_aux", "use_bfloat16"
})  # fmt: skip
_DRAWING = frozenset({
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "length_penalty",
    "max_length", "max_new_tokens", "min_length", "min_p", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "remove_invalid_values", "repetition_penalty", "temperature", "top_k", "top_p",
    "typical_p"
})  # fmt: skip
# Keys that choose the precision of a sum, for which this engine has a rule of its own.
_PRECISION = frozenset({"enable_moe_fp32_combine", "router_dtype"})
# Sizes that a model may not use; errors in those that it uses show in the tensors' shapes.
_SIZES = frozenset({
    "experts_per_token", "head_dim", "initial_context_length", "intermediate_size", "num_key_value_heads",
    "qk_head_dim", "vocab_size_per_layer_input"
})  # fmt: skip
# Keys that say nothing about a model's layers, or nothing where no layer has experts.
_NEMOTRON = frozenset({
    "chunk_size", "expand", "hybrid_override_pattern", "mamba_chunk_size", "mamba_dt_init_floor", "mamba_dt_max",
    "mamba_dt_min", "mamba_expand", "mamba_proj_bias", "mamba_ssm_cache_dtype", "moe_intermediate_size",
    "moe_latent_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap",
    "mtp_hybrid_override_pattern", "mtp_layers_block_type", "n_group", "n_routed_experts", "n_shared_experts",
    "norm_eps", "norm_topk_prob", "num_experts_per_tok", "num_hidden_layers", "num_logits_to_keep",
    "num_nextn_predict_layers", "partial_rotary_factor", "rescale_prenorm_residual", "rope_theta",
    "routed_scaling_factor", "time_step_floor", "time_step_max", "time_step_min", "topk_group", "use_mamba_kernels"
})  # fmt: skip
# Keys of single families: the blocks in which the published code computes a recurrence, and what other keys state too.
_OF_FAMILY: dict[str, frozenset[str]] = {
    "bailing_hybrid": frozenset({"layer_group_size", "rope_theta", "short_conv_kernel_size"}),
    "dbrx": frozenset({"attn_pdrop", "emb_pdrop", "moe_jitter_eps", "moe_loss_weight", "resid_pdrop"}),
    "deepseek_v4": frozenset(
        {"compress_rope_theta", "num_hash_layers", "num_nextn_predict_layers", "qk_rope_head_dim", "rope_theta"}
    ),
    "falcon_h1": frozenset(
        {
            "attn_layer_indices",
            "mamba_chunk_size",
            "mamba_expand",
            "mamba_norm_before_gate",
            "mlp_expansion_factor",
            "num_logits_to_keep",
            "time_step_floor",
            "time_step_max",
            "time_step_min",
        }
    ),
    "granitemoehybrid": frozenset({"mamba_chunk_size"}),
    "jamba": frozenset({"n_ctx", "num_logits_to_keep", "use_associative_scan", "use_mamba_kernels", "use_mambapy"}),
    "minimax": frozenset({"block_size"}),
    "longcat_flash": frozenset({"num_hidden_layers"}),
    "nemotron_h": _NEMOTRON,
}
_HARMLESS = _GENERIC | _TRAINING | _DRAWING | _PRECISION | _SIZES
_OF_WINDOWS = frozenset({"sliding_window", "max_window_layers", "layer_types"})
_OF_LAYERS = frozenset({"max_window_layers", "sliding_window_pattern", "_sliding_window_pattern"})
_OFF: tuple[object, ...] = (None, False, 0, "", [], {})  # values that mean absence


class RecordingConfig(dict[str, Any]):
    """Configuration that records which keys are looked up; results of `|` record into the same set."""

    def __init__(self, config: Config, seen: set[str] | None = None) -> None:
        super().__init__(config)
        self.seen: set[str] = set() if seen is None else seen

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __or__(self, other: Config) -> RecordingConfig:  # type: ignore[override]
        return RecordingConfig(super().__or__(other), self.seen)

    def __ror__(self, other: Config) -> RecordingConfig:  # type: ignore[override]
        return RecordingConfig(super().__ror__(other), self.seen)


def ignored_of(stated: Config, seen: set[str]) -> list[str]:
    """Return the keys of the file that were not looked up.

    Keys with empty values, and keys without effect on the model's computation, are left out.
    """
    harmless = _HARMLESS | _OF_FAMILY.get(stated.get("model_type", ""), frozenset())
    if not stated.get("use_sliding_window", True):
        harmless |= _OF_WINDOWS
    if stated.get("layer_types") and "layer_types" in seen:
        harmless |= _OF_LAYERS
    return sorted(key for key, value in stated.items() if key not in seen | harmless and value not in _OFF)
