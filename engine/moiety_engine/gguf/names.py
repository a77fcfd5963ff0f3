"""Names of a GGUF file's tensors, and those that they have in a Hugging Face checkpoint. Handles no tensors.

All experts of a layer are one tensor in a GGUF file. As in a checkpoint with one matrix for each expert, they are named
`NAME[expert]`, except where the checkpoint has them in one tensor too (gpt-oss).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from moiety_engine.gguf.header import GgufHeader

GPT_OSS = "gpt-oss"
UNUSED = ("rope_freqs.weight",)  # the configuration has the scaling that it stands for
_LAYER = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>.+)")
_EXPERTS = re.compile(r"ffn_(?P<which>gate|up|down)_exps\.weight")
_ONE_EXPERT = re.compile(r"ffn_(?P<which>gate|up|down)\.(?P<expert>\d+)\.weight")  # of older files
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_SHARED = {"qwen2moe": "mlp.shared_expert.", "deepseek2": "mlp.shared_experts."}
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


class GgufTensor(NamedTuple):
    """A tensor of a file, or one expert of it."""

    name: str
    expert: int | None = None

    @property
    def key(self) -> str:
        return self.name if self.expert is None else f"{self.name}[{self.expert}]"


def tensors_by_name(header: GgufHeader) -> dict[str, tuple[GgufTensor, ...]]:
    """Return the tensors that make up each tensor of a Hugging Face checkpoint, by its name.

    Where there are two, they are gate and up of gpt-oss's experts, or keys and values of latent attention. Tensors that
    have no counterpart have their own name.
    """
    found: dict[str, tuple[GgufTensor, ...]] = {}
    for name, entry in header.tensors.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            found[_OUTSIDE.get(name, name)] = (GgufTensor(name),)
            continue
        layer, part = f"model.layers.{match['layer']}.", match["part"]
        if header.architecture == GPT_OSS:
            for of, tensors in _of_gpt_oss(name, part):
                found[layer + of] = tensors
        elif experts := _EXPERTS.fullmatch(part):
            for expert in range(entry.shape[0]):
                found[layer + _expert(header, experts["which"], expert)] = (GgufTensor(name, expert),)
        elif one := _ONE_EXPERT.fullmatch(part):
            found[layer + _expert(header, one["which"], int(one["expert"]))] = (GgufTensor(name),)
        elif part == "attn_k_b.weight":
            values = name.replace("attn_k_b", "attn_v_b")
            found[layer + "self_attn.kv_b_proj.weight"] = (GgufTensor(name), GgufTensor(values))
        elif part != "attn_v_b.weight":
            found[layer + _part(header, part)] = (GgufTensor(name),)
    return found


def is_mixtral(header: GgufHeader) -> bool:
    """Return whether a file of the architecture llama has experts."""
    return header.architecture == "llama" and bool(header.value("expert_count"))


def _expert(header: GgufHeader, which: str, expert: int) -> str:
    if is_mixtral(header):
        return f"block_sparse_moe.experts.{expert}.{_MIXTRAL[which]}.weight"
    return f"mlp.experts.{expert}.{which}_proj.weight"


def _part(header: GgufHeader, part: str) -> str:
    """Return the name within a layer; `part` itself if it is not known."""
    stem, _, kind = part.rpartition(".")
    if part == "exp_probs_b.bias":
        return "mlp.gate.e_score_correction_bias"
    if stem == "ffn_gate_inp" and is_mixtral(header):
        return f"block_sparse_moe.gate.{kind}"
    if stem.endswith("_shexp") and stem in ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"):
        which = stem.removeprefix("ffn_").removesuffix("_shexp")
        return f"{_SHARED.get(header.architecture, 'mlp.shared_experts.')}{which}_proj.{kind}"
    return f"{_PARTS[stem]}.{kind}" if stem in _PARTS else part


def _of_gpt_oss(name: str, part: str) -> list[tuple[str, tuple[GgufTensor, ...]]]:
    stem, _, kind = part.rpartition(".")
    end = "" if kind == "weight" else "_bias"
    if stem == "ffn_gate_exps":
        up = GgufTensor(name.replace("ffn_gate_exps", "ffn_up_exps"))
        return [(f"mlp.experts.gate_up_proj{end}", (GgufTensor(name), up))]
    if stem == "ffn_up_exps":
        return []
    own = {
        "ffn_down_exps": f"mlp.experts.down_proj{end}",
        "ffn_gate_inp": f"mlp.router.{kind}",
        "attn_sinks": "self_attn.sinks",
    }
    usual = f"{_PARTS[stem]}.{kind}" if stem in _PARTS else part
    return [(own.get(stem, usual), (GgufTensor(name),))]
