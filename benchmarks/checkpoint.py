"""Generator of the random checkpoints of about 670 M parameters that the CPU benchmarks use.

    python benchmarks/checkpoint.py FOLDER [qwen3_moe|qwen3_next]

12 layers, 32 experts, top-4, hidden 1024, expert width 512, bfloat16, a byte-level BPE vocabulary of 16,000 trained on
Python's standard library. Three of four layers of Qwen3-Next are recurrent (gated DeltaNet), and each has a shared
expert. Needs transformers (the `dev` extra).
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

ATTENTION = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "norm_topk_prob": True}


RECURRENCE = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 512,
}


def make_checkpoint(folder: Path, family: str = "qwen3_moe") -> None:
    """Write the checkpoint of `family` in the Hugging Face format; the weights depend on the seed 0 only."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shared = {
        "vocab_size": len(tokenizer),
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "intermediate_size": 2048,
        **ATTENTION,
        **EXPERTS,
        "max_position_embeddings": 8192,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model: PreTrainedModel
    if family == "qwen3_next":
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**shared, **RECURRENCE))
    else:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shared))
    model.to(torch.bfloat16).save_pretrained(folder)


def _tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16_000,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train(sorted(str(path) for path in Path(sysconfig.get_path("stdlib")).glob("*.py")), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


if __name__ == "__main__":
    make_checkpoint(Path(sys.argv[1]), *sys.argv[2:3])
