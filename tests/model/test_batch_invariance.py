"""In every family a sequence's logits are the same, bit for bit, alone and in any batch, however its prompt is
chunked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moiety_engine.model.errors import UnsupportedModelError

REFUSED = {"cpu": "odd widths", "cuda": "deepseek_v3"}  # whose widths only torch's attention takes
PROMPT_TOKENS, OUTPUT_TOKENS = 70, 4


def tokens(vocab_size: int, count: int, seed: int) -> list[int]:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.one_in(3)
def test_a_sequence_has_the_same_bits_alone_and_among_others(
    checkpoint: Any, device: str, make_driver: Any, make_sequence: Any, request: pytest.FixtureRequest
) -> None:
    dtype = "float32" if device == "cpu" else "bfloat16"
    if REFUSED[device] in request.node.callspec.params["checkpoint"]:
        with pytest.raises(UnsupportedModelError, match=r"--batch-invariant is not available: .* widths"):
            make_driver(checkpoint.folder, device, dtype, batch_invariant=True)
        return
    driver = make_driver(checkpoint.folder, device, dtype, batch_invariant=True)
    prompt = tokens(checkpoint.vocab_size, PROMPT_TOKENS + OUTPUT_TOKENS, seed=1)
    alone = make_sequence(list(prompt))
    expected = driver.step([(alone, PROMPT_TOKENS)])
    for _ in range(OUTPUT_TOKENS):
        expected += driver.step([(alone, 1)])
    among = make_sequence(list(prompt))
    others = [make_sequence(tokens(checkpoint.vocab_size, 200, seed)) for seed in (2, 3, 4)]
    found = []
    for step, count in enumerate((33, 37, *[1] * OUTPUT_TOKENS)):
        company = [(other, 1 if number == 0 and step else 9 + 11 * number) for number, other in enumerate(others)]
        found.append(driver.step([*company[:2], (among, count), *company[2:]])[2])
    assert torch.equal(torch.cat(found), torch.cat(expected))
