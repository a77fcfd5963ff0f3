"""Our models compute what transformers computes, however tokens are chunked, batched and stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moiety_engine.model.checkpoint import load
from moiety_engine.model.transformer import Transformer
from moiety_engine.model.transformer_options import TransformerOptions

TOLERANCE = 1e-4
PROMPT_TOKENS = 300
ATTENDING_OTHERWISE = ["deepseek_v2", "deepseek_v3", "gemma3", "gpt_oss"]
DENSE = [
    "granite",
    "llama, llama3 rope",
    "mistral, sliding window",
    "qwen2, windows in the upper layers",
    "qwen3, tied",
]
RECENT = [  # with what older families do not have, such as output gates, layers without positions, norms of outputs
    "afmoe",
    "axk1",
    "axk2",
    "cohere2_moe",
    "dbrx",
    "deepseek_v32",
    "deepseek_v4",
    "bailing_hybrid",
    "falcon_h1",
    "falcon_h1, no norms",
    "flex_olmo",
    "gemma4_text",
    "gemma4_text, embeddings by layer",
    "granitemoe_swa",
    "granitemoehybrid",
    "hunyuan_v1_moe",
    "jamba",
    "jetmoe",
    "kimi_linear",
    "kolibri1",
    "laguna",
    "lfm2_moe",
    "llama4_text",
    "longcat_flash",
    "mimo_v2_flash",
    "minimax",
    "minimax_m2",
    "mistral4",
    "nemotron_h",
    "nemotron_h, latent experts",
    "zaya",
]
CHOOSING_NEARLY_TIED = {"kolibri1"}  # among its three prompts, rounding exchanges two experts of one token
ROUTED_OTHERWISE = [
    "dots1",
    "ernie4_5_moe",
    "glm4_moe",
    "granitemoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_next",
]


def tokens(vocab_size: int, count: int, seed: int) -> list[int]:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def largest_difference(logits: Tensor, expected_logprobs: Tensor) -> float:
    return (logits.log_softmax(-1) - expected_logprobs).abs().max().item()


# `make test` runs most families with the first one, since steps of a token each cost the most
@pytest.mark.parametrize("chunk", [7, 1, 64, PROMPT_TOKENS])
def test_logprobs_of_a_prompt_agree_with_the_oracle_for_every_chunk_size(
    checkpoint: Any, device: str, make_driver: Any, make_sequence: Any, chunk: int
) -> None:
    prompt = tokens(checkpoint.vocab_size, PROMPT_TOKENS, seed=1)
    logits = make_driver(checkpoint.folder, device).prefill(make_sequence(prompt), chunk)
    assert largest_difference(logits, checkpoint.logprobs(prompt)) <= TOLERANCE


@pytest.mark.parametrize(
    ("variant", "kept", "share", "most"),
    [
        ("qwen3, tied", torch.bfloat16, 1 / 2, 0.005),
        ("qwen3, tied", torch.float8_e4m3fn, 1 / 4, 0.1),
        ("qwen3, tied", torch.int8, (1 + 4 / 32) / 4, 0.02),  # heads of 32 have a scale of 4 bytes
        ("deepseek_v2", torch.bfloat16, 1 / 2, 0.005),
        ("deepseek_v4", torch.bfloat16, 1 / 2, 0.005),
        ("deepseek_v2", torch.float8_e4m3fn, 1 / 4, 0.1),
        ("deepseek_v2", torch.int8, (1 + 8 / 48) / 4, 0.02),  # rows of 32 + 16 have two
    ],
)
def test_a_cache_in_fewer_bits_is_smaller_by_them_and_changes_little(
    make_checkpoint: Any,
    make_driver: Any,
    make_sequence: Any,
    variant: str,
    kept: torch.dtype,
    share: float,
    most: float,
) -> None:
    checkpoint = make_checkpoint(variant)
    prompt = tokens(checkpoint.vocab_size, 100, seed=1)
    driver = make_driver(checkpoint.folder)
    spec = driver.model.spec
    weights = load(checkpoint.folder, spec, device=torch.device("cpu"), dtype=torch.float32)
    model = Transformer(spec, weights, TransformerOptions(kept))
    assert model.kv_bytes_per_block(16) == round(share * driver.model.kv_bytes_per_block(16))
    logprobs = type(driver)(model).prefill(make_sequence(prompt), 7).log_softmax(-1)
    assert TOLERANCE < (logprobs - checkpoint.logprobs(prompt)).abs().mean() < most  # most are between -4 and -9


def greedy(driver: Any, sequence: Any, count: int, logits: Tensor) -> list[int]:
    generated: list[int] = []
    for _ in range(count):
        generated.append(int(logits[-1].argmax()))
        sequence.token_ids.append(generated[-1])
        (logits,) = driver.step([(sequence, 1)])
    return generated


def test_greedy_continuation_is_the_oracles(checkpoint: Any, device: str, make_driver: Any, make_sequence: Any) -> None:
    prompt = tokens(checkpoint.vocab_size, 40, seed=2)
    driver, sequence = make_driver(checkpoint.folder, device), make_sequence(list(prompt))
    generated = greedy(driver, sequence, 64, driver.prefill(sequence, 16))
    best_two = checkpoint.logprobs(prompt + generated)[len(prompt) - 1 : -1].topk(2)
    for token, values, indices in zip(generated, best_two.values, best_two.indices, strict=True):
        assert token == indices[0] or values[0] - values[1] < TOLERANCE


@pytest.mark.one_in(3)
def test_sequences_at_different_stages_in_one_batch_do_not_disturb_each_other(
    checkpoint: Any, device: str, make_driver: Any, make_sequence: Any
) -> None:
    prompts = [tokens(checkpoint.vocab_size, count, seed=count) for count in (300, 130, 77, 16, 5)]
    driver = make_driver(checkpoint.folder, device)
    sequences = [make_sequence(prompt) for prompt in prompts]
    collected: list[list[Tensor]] = [[] for _ in prompts]
    pace = [64, 7, 1, 16, 5]
    step = 0
    while any(s.num_stored < len(s.token_ids) for s in sequences):
        step += 1
        running = [  # they join one by one, and leave when they are through
            i for i, s in enumerate(sequences) if s.num_stored < len(s.token_ids) and step > i
        ]
        chunks = [(sequences[i], min(pace[i], len(prompts[i]) - sequences[i].num_stored)) for i in running]
        for i, part in zip(running, driver.step(chunks), strict=True):
            collected[i].append(part)
    for prompt, parts in zip(prompts, collected, strict=True):
        assert largest_difference(torch.cat(parts), checkpoint.logprobs(prompt)) <= TOLERANCE


@pytest.mark.one_in(3)
@pytest.mark.parametrize("chunk", [1, 7, PROMPT_TOKENS])
def test_blocks_of_another_sequence_serve_as_a_prefix(
    checkpoint: Any, device: str, make_driver: Any, make_sequence: Any, chunk: int
) -> None:
    first = tokens(checkpoint.vocab_size, PROMPT_TOKENS, seed=3)
    second = first[:200] + tokens(checkpoint.vocab_size, 100, seed=4)
    driver = make_driver(checkpoint.folder, device)
    if driver.model.spec.recurrent_layers:
        pytest.skip("no block has a state: tests/engine/test_recurrent_states.py shows snapshots")
    owner = make_sequence(first)
    driver.prefill(owner, 128)
    sharing = driver.share_prefix(owner, second)
    cached = sharing.num_stored
    assert cached == 192
    logits = driver.prefill(sharing, chunk)
    assert largest_difference(logits, checkpoint.logprobs(second)[cached:]) <= TOLERANCE


@pytest.mark.parametrize("block_size", [3, 8, 32])
def test_any_block_size_gives_the_same_logprobs(
    make_checkpoint: Any, device: str, make_driver: Any, make_sequence: Any, block_size: int
) -> None:
    checkpoint = make_checkpoint("mixtral, sliding window")
    prompt = tokens(checkpoint.vocab_size, 140, seed=5)
    driver = make_driver(checkpoint.folder, device, block_size=block_size)
    assert largest_difference(driver.prefill(make_sequence(prompt), 33), checkpoint.logprobs(prompt)) <= TOLERANCE


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "variant",
    [
        "qwen3_moe",
        "mixtral, sliding window",
        "olmoe",
        "llama, llama3 rope",
        *RECENT,
        *ROUTED_OTHERWISE,
        *ATTENDING_OTHERWISE,
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_on_a_cpu_has_the_same_bits_in_any_batch(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any, variant: str, dtype: str
) -> None:
    checkpoint = make_checkpoint(variant)
    prompts = [tokens(checkpoint.vocab_size, count, seed=count) for count in (140, 33, 18)]
    drivers = [make_driver(checkpoint.folder, dtype=dtype) for _ in range(7)]
    alone = [driver.prefill(make_sequence(one), 1000) for driver, one in zip(drivers[:3], prompts, strict=True)]
    together = drivers[3].step([(make_sequence(prompt), len(prompt)) for prompt in prompts])
    one_by_one = [driver.prefill(make_sequence(one), 1) for driver, one in zip(drivers[4:], prompts, strict=True)]
    for a, b, c in zip(alone, together, one_by_one, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize(
    "variant",
    [
        "qwen3_moe",
        "qwen3_moe, dense layers, biases, yarn",
        "llama, biases, odd widths",
        "deepseek_v3",
        "gemma3",
        "gpt_oss",
    ],
)
def test_decode_steps_stay_right_when_sequences_come_and_go_and_tables_grow(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any, variant: str
) -> None:
    checkpoint = make_checkpoint(variant)
    prompts = [tokens(checkpoint.vocab_size, count, seed=count) for count in (300, 210, 40, 6)]
    driver = make_driver(checkpoint.folder, block_size=4, num_blocks=400)
    sequences = [make_sequence(prompt) for prompt in prompts]
    driver.step([(sequences[0], 240), (sequences[1], 190)])
    rows: list[list[Tensor]] = [[], [], [], []]
    while any(s.num_stored < len(s.token_ids) for s in sequences):
        running = [i for i, s in enumerate(sequences) if s.num_stored < len(s.token_ids)]
        for i, row in zip(running, driver.step([(sequences[i], 1) for i in running]), strict=True):
            rows[i].append(row)
    for prompt, some in zip(prompts, rows, strict=True):
        assert largest_difference(torch.cat(some), checkpoint.logprobs(prompt)[-len(some) :]) <= TOLERANCE


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "variant",
    [
        "qwen3_moe",
        "mixtral",
        "olmoe",
        *DENSE,
        *sorted({*RECENT} - CHOOSING_NEARLY_TIED),
        *ROUTED_OTHERWISE,
        *ATTENDING_OTHERWISE,
    ],
)
def test_bfloat16_is_at_most_half_again_as_far_from_float32_as_the_oracles_bfloat16(
    make_checkpoint: Any, device: str, make_driver: Any, make_sequence: Any, variant: str
) -> None:
    checkpoint = make_checkpoint(variant, dtype=torch.bfloat16)
    narrow = type(checkpoint.oracle).from_pretrained(checkpoint.folder, dtype=torch.bfloat16)
    theirs, ours = [], []
    for seed in range(3):
        prompt = tokens(checkpoint.vocab_size, 200, seed=seed)
        expected = checkpoint.logprobs(prompt)
        with torch.no_grad():
            theirs.append((narrow(torch.tensor([prompt])).logits[0].float().log_softmax(-1) - expected).abs())
        driver = make_driver(checkpoint.folder, device, dtype="bfloat16")
        ours.append((driver.prefill(make_sequence(prompt), 64).log_softmax(-1) - expected).abs())
    assert torch.stack(ours).mean() <= 1.5 * torch.stack(theirs).mean()
    assert torch.stack(ours).max() <= 1.5 * torch.stack(theirs).max()
