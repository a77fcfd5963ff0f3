"""Attention whose query heads are those of routed experts (JetMoe): whole engines, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moiety_engine.adapters.dummy import write_adapter
from moiety_engine.adapters.peft import read_adapter
from moiety_engine.distribution.layout import Layout, RankPosition
from moiety_engine.errors import AdapterError, InvalidConfig
from moiety_engine.model.families import read_spec
from moiety_engine.model.tensor_shards import own_spec

from .recent_variants import RECENT_VARIANTS
from .test_parity import TOLERANCE, tokens
from .test_recurrent_engines import assert_answers_are_the_oracles, run_with_a_preemption


@pytest.mark.parametrize("swaps", [True, False])
def test_preempted_sequences_and_shared_prefixes_are_answered_as_by_the_oracle(
    make_checkpoint: Any, swaps: bool
) -> None:
    checkpoint = make_checkpoint("jetmoe")
    engine = run_with_a_preemption(checkpoint, swaps=swaps)
    engine.submit(9, engine.prompts[0] + engine.answers[0] + tokens(checkpoint.vocab_size, 20, seed=9))
    engine.run()
    assert engine.finishes[9].num_cached_tokens > 80
    assert_answers_are_the_oracles(engine, checkpoint)


def test_layers_and_the_last_norm_have_epsilons_of_their_own(make_checkpoint: Any) -> None:
    spec = read_spec(make_checkpoint("jetmoe").folder)
    assert (spec.norm.eps, spec.norm.final_eps) == (1e-6, 1e-3)


def test_more_ranks_than_key_value_heads_are_refused(make_checkpoint: Any) -> None:
    spec = read_spec(make_checkpoint("jetmoe").folder)
    with pytest.raises(InvalidConfig, match=r"--tp 3 .*2 key-value heads"):
        own_spec(spec, RankPosition(Layout(tp=3), 0))


@pytest.mark.parametrize("kept", ["int8", "int4"])
def test_products_of_experts_of_attention_are_kept_in_few_bits(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any, kept: str
) -> None:
    family, settings = RECENT_VARIANTS["jetmoe"]
    wide = {"in few bits": (family, settings | {"intermediate_size": 64})}  # rows of whole groups
    checkpoint = make_checkpoint("in few bits", variants=wide)
    prompt = tokens(checkpoint.vocab_size, 60, seed=3)
    driver = make_driver(checkpoint.folder, quantization=kept)
    attention = driver.model._weights.layers[0].attention
    assert not any(isinstance(one, torch.Tensor) for one in (attention.query_EQD, attention.output_EDQ))
    error = driver.prefill(make_sequence(prompt), 7).log_softmax(-1) - checkpoint.logprobs(prompt)
    assert TOLERANCE < error.abs().mean() < {"int8": 0.1, "int4": 1.0}[kept]


def test_adapters_of_attention_are_refused(make_checkpoint: Any, tmp_path: Path) -> None:
    folder = make_checkpoint("jetmoe").folder
    adapter = write_adapter(tmp_path / "adapter", folder, modules=("kv_proj",), rank=3)
    with pytest.raises(AdapterError, match=r"unsupported modules: .*layers\.0\.self_attention\.kv_proj"):
        read_adapter(adapter, read_spec(folder), max_rank=8)
