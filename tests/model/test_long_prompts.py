"""Families compute what transformers computes for a prompt beyond all windows, chunks and lengths before scaling."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from .near_ties import agreeing_logprobs
from .test_parity import TOLERANCE, greedy, largest_difference, tokens
from .variants import LONG_ROPE, VARIANTS

PROMPT_TOKENS, CHUNK = 2500, 512
# At one token, two scores are equal but for 4e-7 of their size in an indexer, and 2e-6 in a router, by float64.
NEARLY_TIED = {"deepseek_v32", "minimax"}


def long_checkpoint(make_checkpoint: Any, variant: str) -> Any:
    """Return the checkpoint of a variant, with a context of 4,096 tokens."""
    family, settings = VARIANTS[variant]
    checkpoint = make_checkpoint("long", variants={"long": (family, settings | {"max_position_embeddings": 4096})})
    if family == "phimoe":  # its class in transformers 5.24 never selects the long factors
        rotary = checkpoint.oracle.model.rotary_emb
        rotary.rope_init_fn = partial(rotary.rope_init_fn, seq_len=PROMPT_TOKENS)
    return checkpoint


@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_of_a_prompt_of_2500_tokens_agree_with_the_oracle(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any, variant: str
) -> None:
    checkpoint = long_checkpoint(make_checkpoint, variant)
    prompt = tokens(checkpoint.vocab_size, PROMPT_TOKENS, seed=1)
    ours = make_driver(checkpoint.folder).prefill(make_sequence(prompt), CHUNK).log_softmax(-1)
    theirs = partial(checkpoint.logprobs, prompt)
    expected = agreeing_logprobs(theirs, ours, TOLERANCE) if variant in NEARLY_TIED else theirs()
    assert largest_difference(ours, expected) <= TOLERANCE


def test_an_answer_that_passes_longropes_original_length_has_the_long_factors_from_its_first_token(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any
) -> None:
    checkpoint = long_checkpoint(make_checkpoint, "phimoe")
    original = LONG_ROPE["original_max_position_embeddings"]
    prompt = tokens(checkpoint.vocab_size, original - 8, seed=2)
    driver, sequence = make_driver(checkpoint.folder), make_sequence(list(prompt))
    generated = greedy(driver, sequence, 16, driver.prefill(sequence, CHUNK))
    best_two = checkpoint.logprobs(prompt + generated)[len(prompt) - 1 : -1].topk(2)
    for token, values, indices in zip(generated, best_two.values, best_two.indices, strict=True):
        assert token == indices[0] or values[0] - values[1] < TOLERANCE
