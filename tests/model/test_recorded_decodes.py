"""Decode steps on a CPU are recorded and replayed in families that scale, add or normalize by other operations than the
usual ones, and in those with recurrent layers or sparse attention. Replayed steps say what transformers says, and what
the same steps say without a recording."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moiety_engine.config import EngineConfig
from moiety_engine.messages import CoreSubmit
from moiety_engine.model import decode_programs
from moiety_engine.offline import run_all
from moiety_engine.startup import load_loop
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling

from .conftest import Driver, Sequence

RECORDED = [
    "cohere2_moe",  # attention beside the feed-forward, layer norms, a mean with shared experts
    "dbrx",
    "gemma4_text",  # layers and experts have factors
    "granite",
    "granitemoe",
    "llama4_text",  # inputs of experts are weighted, queries grow
    "mimo_v2_flash",  # values are scaled
    "mistral4",
    "phimoe",
]
RECURRENT = [
    "bailing_hybrid",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2_moe",
    "minimax",
    "qwen3_5_moe",
    "qwen3_next",
    "zaya",
]
SPARSE = ["axk2", "deepseek_v32", "glm_moe_dsa", "longcat_flash"]
PROMPT = [3 + (i * i * 31 + i * 7) % 370 for i in range(60)]
NUM_READ, NUM_REPLAYED = 50, 8


@pytest.mark.parametrize("variant", RECORDED)
def test_decode_steps_are_recorded_and_say_what_transformers_says(
    make_checkpoint: Any, make_driver: Any, variant: str
) -> None:
    checkpoint = make_checkpoint(variant)
    driver: Driver = make_driver(checkpoint.folder)
    one, other = Sequence(list(PROMPT)), Sequence(list(reversed(PROMPT)))
    driver.step([(one, NUM_READ), (other, NUM_READ)])
    replays = 0
    found = []
    for _ in range(NUM_REPLAYED):
        assert driver.model._programs is not None
        known = dict(driver.model._programs._recorded)
        found.append(torch.stack([rows[-1] for rows in driver.step([(one, 1), (other, 1)])]))
        replays += (2, False) in known
    assert driver.model.only_kernels
    assert replays == NUM_REPLAYED - 1
    expected = torch.stack([checkpoint.logprobs(one.token_ids), checkpoint.logprobs(other.token_ids)], dim=1)
    ours = torch.stack(found).log_softmax(-1)
    assert (ours - expected[NUM_READ : NUM_READ + NUM_REPLAYED]).abs().max() <= 1e-4


@pytest.mark.parametrize("variant", [*RECURRENT, *SPARSE])
def test_replayed_steps_have_the_bits_of_steps_without_a_recording(
    make_checkpoint: Any, make_driver: Any, variant: str
) -> None:
    checkpoint = make_checkpoint(variant)
    recorded, plain = (make_driver(checkpoint.folder) for _ in range(2))
    plain.model._programs = None
    found = [_logits_of_steps(driver) for driver in (recorded, plain)]
    programs = recorded.model._programs
    assert set(programs._recorded) == {(1, False), (2, False)}
    assert torch.equal(*found)


def _logits_of_steps(driver: Driver) -> torch.Tensor:
    """Return the logits of decode steps of two sequences, one of which pauses, and of a third in the slots of one."""
    one, other = Sequence(list(PROMPT)), Sequence(list(reversed(PROMPT)))
    driver.step([(one, 30), (other, 17)])
    found = []
    for both in (True, True, True, False, False, True, True):
        found += driver.step([(one, 1), (other, 1)] if both else [(other, 1)])
    third = Sequence(list(PROMPT[5:]), state_slot=one.state_slot)
    driver.step([(third, 20)])
    for _ in range(3):
        found += driver.step([(other, 1), (third, 1)])
    return torch.cat(found)


@pytest.mark.parametrize("has_logits", [True, False])
def test_steps_of_many_sequences_are_replayed_from_tokens_to_logits_unless_these_are_large(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, has_logits: bool
) -> None:
    folder = make_checkpoint("qwen3, tied").folder
    if not has_logits:
        monkeypatch.setattr(decode_programs, "MAX_LOGITS_BYTES", 0)
    sizes: dict[str, Any] = {"max_running": 24, "max_batch_tokens": 64, "kv_memory_bytes": 8 << 20}
    greedy = Sampling(temperature=0.0)

    def submits(first: int) -> list[CoreSubmit]:
        prompts = [PROMPT[: 5 + key] for key in range(24)]
        return [
            CoreSubmit(first + i, "t", STANDARD, ids, greedy, 40, 0, [], 40, b"s", 0) for i, ids in enumerate(prompts)
        ]

    with load_loop(EngineConfig(model=str(folder), name="t", **sizes)) as loop:
        found = [result.token_ids for _, result in sorted(run_all(loop, submits(1)).items())]
        model = loop.executor.model
        recorded = model._programs._recorded[24, False]
        assert recorded.whole.num_jobs == recorded.layers.num_jobs + 1 + has_logits, (
            "the embedding's rows, and the logits"
        )
        assert (recorded.replayed.logits is not None) == has_logits
        model._programs = None
        assert [result.token_ids for _, result in sorted(run_all(loop, submits(101)).items())] == found
