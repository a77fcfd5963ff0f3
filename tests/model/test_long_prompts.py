"""Families compute what transformers computes for a prompt beyond all windows, chunks and lengths before scaling."""

from __future__ import annotations

from typing import Any

import pytest

from .test_parity import TOLERANCE, largest_difference, tokens
from .variants import VARIANTS

PROMPT_TOKENS, CHUNK = 2500, 512
COMPARED = [  # the other variants are compared for shorter prompts only, in test_parity
    "qwen3_moe",
    "mixtral, sliding window",
    "qwen2_moe",
    "dots1",
    "afmoe",
    "axk2",
    "dbrx",
    "deepseek_v4",
    "exaone_moe",
    "flex_olmo",
    "granitemoe_swa",
    "granitemoeshared",
    "jamba",
    "kimi_linear",
    "laguna, a gate for each value",
    "lfm2_moe",
    "longcat_flash",
    "nemotron_h",
    "sarvam_mla",
    "solar_open",
    "gemma3",
    "gpt_oss",
    "llama, biases, odd widths",
]


@pytest.mark.parametrize("variant", COMPARED)
def test_logprobs_of_a_prompt_of_2500_tokens_agree_with_the_oracle(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any, variant: str
) -> None:
    family, settings = VARIANTS[variant]
    checkpoint = make_checkpoint("long", variants={"long": (family, settings | {"max_position_embeddings": 4096})})
    prompt = tokens(checkpoint.vocab_size, PROMPT_TOKENS, seed=1)
    logits = make_driver(checkpoint.folder).prefill(make_sequence(prompt), CHUNK)
    assert largest_difference(logits, checkpoint.logprobs(prompt)) <= TOLERANCE
