"""Generator of a random checkpoint in GLM-4.5's form with an MTP layer whose predictions are mostly right.

    python benchmarks/mtp_checkpoint.py FOLDER [--wrong]

The first layer determines the output; the others take time and do not change it. The MTP layer repeats the first layer,
without the first token. With --wrong the MTP layer is random, and its predictions are never right. The checkpoint has
360 M parameters in bfloat16.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY, WIDTH, LAYERS, EXPERTS, EXPERT_WIDTH = 32_000, 1024, 12, 16, 384
HEADS, KV_HEADS, HEAD_WIDTH = 16, 4, 64
DTYPE = torch.bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wrong", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "glm4_moe",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_WIDTH,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": EXPERT_WIDTH,
        "first_k_dense_replace": 0,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (options.folder / "config.json").write_text(json.dumps(config, indent=1))
    torch.manual_seed(0)
    rows = torch.randn(VOCABULARY, WIDTH)
    tensors = {
        "model.embed_tokens.weight": rows / rows.square().mean(-1, keepdim=True).sqrt(),
        "model.norm.weight": torch.ones(WIDTH),
        "lm_head.weight": torch.randn(VOCABULARY, WIDTH) * 3 * WIDTH**-0.5,
    }
    for index in range(LAYERS):
        tensors |= layer(f"model.layers.{index}.", adds=index == 0)
    last = f"model.layers.{LAYERS}."
    first = {name: one for name, one in tensors.items() if name.startswith("model.layers.0.")}
    tensors |= {name.replace("layers.0.", f"layers.{LAYERS}."): one.clone() for name, one in first.items()}
    tensors |= {f"{last}{name}.weight": torch.ones(WIDTH) for name in ("enorm", "hnorm", "shared_head.norm")}
    reads = torch.randn(WIDTH, WIDTH) * WIDTH**-0.5 if options.wrong else torch.eye(WIDTH)
    tensors[f"{last}eh_proj.weight"] = torch.cat((reads, torch.zeros(WIDTH, WIDTH)), dim=1)
    kept = {name: one if "bias" in name else one.to(DTYPE) for name, one in tensors.items()}
    save_file(kept, options.folder / "model.safetensors", metadata={"format": "pt"})
    print(f"{sum(one.numel() for one in kept.values()) / 1e6:.0f} M parameters in {options.folder}")


def layer(prefix: str, *, adds: bool) -> dict[str, torch.Tensor]:
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_WIDTH, WIDTH),
        "self_attn.k_proj": (KV_HEADS * HEAD_WIDTH, WIDTH),
        "self_attn.v_proj": (KV_HEADS * HEAD_WIDTH, WIDTH),
        "self_attn.o_proj": (WIDTH, HEADS * HEAD_WIDTH),
        "mlp.gate": (EXPERTS, WIDTH),
    }
    for block in ("shared_experts", *(f"experts.{expert}" for expert in range(EXPERTS))):
        shapes |= {f"mlp.{block}.{name}_proj": (EXPERT_WIDTH, WIDTH) for name in ("gate", "up")}
        shapes[f"mlp.{block}.down_proj"] = (WIDTH, EXPERT_WIDTH)
    found = {f"{prefix}{name}.weight": torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    if not adds:
        for name, one in found.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                one.zero_()
    norms = {f"{prefix}{name}.weight": torch.ones(WIDTH) for name in ("input_layernorm", "post_attention_layernorm")}
    return found | norms | {f"{prefix}mlp.gate.e_score_correction_bias": torch.zeros(EXPERTS)}


if __name__ == "__main__":
    main()
