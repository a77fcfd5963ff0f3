# ruff: noqa: F811  fixtures are imported
"""Compressed attention: answers are those of each prompt alone.

Compressed entries are in blocks; the window and the tokens of the next entries are in states. Prompts are chunked,
batched, found in the prefix cache, swapped and recomputed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moiety_engine.config import Speculate
from moiety_engine.errors import InvalidConfig
from moiety_engine.model.batch import CompressedCache, RecurrentStateCache
from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.loading import load_model
from moiety_engine.model.transformer import Transformer
from moiety_engine.planning.model_support import features_of
from moiety_engine.planning.models import find_model
from moiety_wire.engine_choices import Batching, LoadFormat

from .test_recurrent_states import (
    PROMPTS,
    Engine,
    alone,  # noqa: F401  a fixture
    ask_next_turn,
    assert_batched_as_alone,
    assert_preempted_as_alone,
    assert_same,
    make_engine,
    submit_repetitive,
    tokens,
)

BLOCK_SIZE = 8  # two entries of four tokens, or a fourth of one of 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.model.conftest import write_checkpoint

    made = tmp_path_factory.mktemp("compressed")
    write_checkpoint(made, "deepseek_v4")
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> Transformer:
    return load_model(folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def narrow(folder: Path) -> Transformer:
    """The model with entries in bfloat16; states are float32."""
    return load_model(folder, device="cpu", dtype="bfloat16", kv_dtype="bf16")


@pytest.fixture
def engine(folder: Path, model: Transformer) -> Any:
    def make(num_blocks: int = 200, num_snapshots: int = 12, served: Transformer = model, **settings: Any) -> Engine:
        return make_engine(folder, served, BLOCK_SIZE, num_blocks, num_snapshots, **settings)

    return make


@pytest.mark.parametrize("chunk", [7, 64])
def test_mixed_batches_of_chunks_answer_as_each_prompt_alone(engine: Any, alone: Engine, chunk: int) -> None:
    assert_batched_as_alone(engine(max_batch_tokens=chunk), alone)


def test_prompts_continue_from_snapshots_within_windows_and_entries(engine: Any, alone: Engine) -> None:
    """The hits end at 56 and 40 tokens, between the borders of the entries of 32."""
    ours = engine()
    again, num_cached = ask_next_turn(ours)
    assert num_cached == 56
    shared = tokens(40, seed=7)
    prompts = {1: again} | {10 + key: shared + tokens(40, seed=10 + key) for key in range(3)}
    assert [ours.ask(key, prompt) for key, prompt in prompts.items() if key > 1] == [0, 0, 40]
    for key, prompt in prompts.items():
        alone.ask(key, prompt)
    assert_same(ours, alone, prompts)


@pytest.mark.parametrize(("swaps", "is_narrow"), [(True, False), (False, False), (True, True)])
def test_a_preempted_sequence_continues_from_its_state_or_is_computed_anew(
    engine: Any, model: Transformer, narrow: Transformer, swaps: bool, is_narrow: bool
) -> None:
    served = narrow if is_narrow else model
    alone = engine(served=served, max_batch_tokens=512, prefix_caching=False)
    ours = engine(served=served, prefix_caching=False, host_kv_memory_bytes=4 << 20 if swaps else 0)
    assert_preempted_as_alone(ours, alone, swaps=swaps)


def test_rejected_drafts_leave_no_trace_in_windows_and_entries(engine: Any, alone: Engine) -> None:
    """Drafts of up to seven tokens cross the borders of blocks, and of the entries of 4 and of 32."""
    ours = engine(num_snapshots=40, speculate=Speculate.NGRAM)
    keys = submit_repetitive(ours, alone)
    ours.run()
    alone.run()
    load = ours.loop.load()
    assert 0 < load.accepted_tokens_total < load.drafted_tokens_total
    assert_same(ours, alone, keys)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"batching": Batching.PADDED}, "use another --batching"),
        ({"block_size": 12}, "entries of 32 tokens, and --block-size 12 is neither"),
    ],
)
def test_what_is_not_available_is_refused_at_the_start(engine: Any, settings: Any, match: str) -> None:
    with pytest.raises(InvalidConfig, match=match):
        engine(**settings)


def test_gpus_are_refused_before_anything_is_loaded(folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="deepseek_v4 model is served on a CPU only"):
        load_model(folder, device="cuda", dtype="bfloat16")


def test_a_block_has_the_entries_that_end_in_it(folder: Path, model: Transformer) -> None:
    """Two layers have an entry and an index key for 4 tokens, one has an entry for 32, in blocks of 8 or of 64."""
    of_two, entry = 2 * (32 + 32), 32
    assert model.kv_bytes_per_block(8) == 4 * (2 * of_two + entry)
    assert model.kv_bytes_per_block(64) == 4 * (16 * of_two + 2 * entry)
    kv = model.allocate_kv(5, 64, 3)
    kinds = [type(layer) for layer in kv.layers]
    assert kinds == [RecurrentStateCache, *[CompressedCache] * 3]
    assert len(kv.places) == 3
    assert len(kv.states) == 4
    window = 24 * 32
    sparse, heavy = window + 8 * 4 * (32 + 32), window + 32 * 2 * 32
    assert model.state_bytes == 4 * (window + 2 * sparse + heavy)
    served = find_model(str(folder), "auto", "auto")
    states = 2 * (window + 2 * sparse + heavy)
    assert served.kv_bytes_per_token(served.spec, states) == 2 * of_two // 4 + 2 * entry // 32 + 1


def test_by_default_blocks_have_no_unused_places(engine: Any) -> None:
    assert engine(block_size=None).loop.executor.awake().kv.block_size == 32


def test_the_table_of_features_says_what_is_missing(model: Transformer) -> None:
    features = features_of(model.spec)
    assert (features.tensor_parallel, features.expert_parallel, features.pipeline_parallel) == ("yes",) * 3
    assert features.speculation == "yes"
    assert features.roles == "yes"
    assert (features.lora, features.mtp) == ("feed-forward only", "yes")


def test_bits_are_the_same_when_a_prompt_is_computed_anew(engine: Any) -> None:
    one, other = engine(max_batch_tokens=5), engine(max_batch_tokens=300)
    for key, prompt in PROMPTS.items():
        one.submit(key, prompt)
        other.submit(key, prompt)
    one.run()
    other.run()
    for key in PROMPTS:
        assert torch.tensor([x.logprob for x in one.logprobs[key]]).equal(
            torch.tensor([x.logprob for x in other.logprobs[key]])
        )


def test_random_weights_of_a_configuration_have_experts_for_each_token(engine: Any, folder: Path) -> None:
    drawn = load_model(folder, device="cpu", dtype="float32", load_format=LoadFormat.DUMMY)
    ours = engine(served=drawn)
    assert ours.ask(0, PROMPTS[1]) == 0
    assert len(ours.answers[0]) == 8
