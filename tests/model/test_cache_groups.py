"""Models with sliding windows answer as transformers does while the blocks behind their windows are freed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.poisoned_engine import PoisonedEngine

from moiety_engine.cache.table_layout import TableLayout
from moiety_engine.config import EngineConfig
from moiety_engine.kv_transfer.kv_layout import read, write
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.cache_groups import cache_groups
from moiety_engine.model.families import spec_from_config
from moiety_engine.model.kv_allocation import KvAllocation
from moiety_engine.model.recurrent_specs import RecurrentSpec
from moiety_engine.model.spec import LayerSpec
from moiety_engine.planning.models import PRESETS, find_model
from moiety_engine.scheduling.preemption.preemption_execution import SwapCost
from moiety_engine.startup import load_loop
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling

TOLERANCE = 1e-4
BLOCK_SIZE = 4
WINDOWED = ["gemma3", "gemma4_text", "gemma4_text, embeddings by layer", "gpt_oss", "llama4_text", "mimo_v2_flash"]
WINDOWED += ["mistral, sliding window"]


class Engine(PoisonedEngine):
    def check(self, oracle: Any, key: int, prompt: list[int]) -> None:
        answer, found = self.answers[key], self.logprobs[key]
        expected = oracle.logprobs(prompt + answer)[len(prompt) - 1 : -1]
        assert len(found) == len(answer) > 0
        for position, (token, one) in enumerate(zip(answer, found, strict=True)):
            assert abs(one.logprob - expected[position, token].item()) <= TOLERANCE
            assert abs(one.logprob - expected[position].max().item()) <= TOLERANCE


def make_engine(folder: Path, num_blocks: int, *, host_blocks: int = 0, **settings: Any) -> Engine:
    sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_batch_tokens": 64, "dtype": "float32"} | settings
    config = EngineConfig(model=str(folder), name="tiny", kv_memory_bytes=1 << 22, device="cpu", **sizes)
    block_bytes = load_loop(config).executor.model.kv_bytes_per_block(BLOCK_SIZE)
    memory = {"kv_memory_bytes": num_blocks * block_bytes, "host_kv_memory_bytes": host_blocks * block_bytes}
    config = EngineConfig(model=str(folder), name="tiny", device="cpu", **sizes, **memory)
    return Engine(load_loop(config))


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 380, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(params=WINDOWED)
def windowed(request: pytest.FixtureRequest, make_checkpoint: Any) -> Any:
    return make_checkpoint(request.param)


@pytest.mark.parametrize("chunk", [7, 64])
def test_prompts_beyond_the_window_are_answered_as_by_the_oracle_in_mixed_batches(windowed: Any, chunk: int) -> None:
    engine = make_engine(windowed.folder, 320, max_batch_tokens=chunk, max_running=4)
    prompts = {key: tokens(count, seed=key) for key, count in enumerate((300, 150, 41, 12))}
    for key, prompt in prompts.items():
        engine.submit(key, prompt)
    engine.run()
    for key, prompt in prompts.items():
        engine.check(windowed, key, prompt)
    assert engine.loop.scheduler.kv.pool.num_used == 0


def test_a_prefix_hit_needs_only_the_blocks_that_windows_reach(windowed: Any) -> None:
    engine = make_engine(windowed.folder, 400)
    first = tokens(300, seed=3)
    engine.submit(0, first)
    engine.run()
    again = first[:240] + tokens(30, seed=4)
    ledger = engine.loop.scheduler.kv
    for table, window in enumerate(ledger.layout.windows):
        if window is not None:  # of a freed block far behind the hit
            hashes = _hashes(again)
            ledger.pool.invalidate([hashes[10] + (bytes((table,)) if table else b"")])
    engine.submit(1, again)
    engine.run()
    assert engine.finishes[1].num_cached_tokens == 240
    engine.check(windowed, 1, again)


def _hashes(prompt: list[int]) -> list[bytes]:
    from moiety_engine.sequence import Sequence

    submit = CoreSubmit(0, "t", STANDARD, prompt, Sampling(), 1, 0, [], 1, b"s", 0)
    return Sequence(submit, order=0, seed=0).block_hashes.between(0, len(prompt) // BLOCK_SIZE, BLOCK_SIZE)


@pytest.mark.parametrize("swaps", [True, False])
def test_a_preempted_sequence_continues_as_by_the_oracle(windowed: Any, swaps: bool) -> None:
    engine = make_engine(windowed.folder, 200, host_blocks=400 if swaps else 0, prefix_caching=False, max_running=4)
    engine.loop.scheduler.swap_costs(SwapCost(0.0 if swaps else 1e6))
    prompts = {key: tokens(110 + key, seed=key) for key in range(3)}
    for key, prompt in prompts.items():
        engine.submit(key, prompt, num_output=40)
    engine.run(until=lambda: len(engine.answers[0]) > 4)
    scheduler = engine.loop.scheduler
    victim = scheduler.queues.by_key[1 if 1 in scheduler.queues.by_key else 2]
    preempt = partial(scheduler._preemptor.preempt, victim, take_blocks=True)
    from moiety_wire.trace_events import Reason

    preempt(Reason.DECODE_NEEDS_BLOCKS, 0, None)
    assert bool(victim.kv.host_blocks) == swaps
    engine.run()
    for key, prompt in prompts.items():
        engine.check(windowed, key, prompt)
    assert scheduler.kv.pool.num_used == 0
    assert (scheduler.kv.swapped_in_total > 0) == swaps


def test_a_long_sequence_of_gpt_oss_takes_hardly_more_than_half_of_the_blocks() -> None:
    spec = spec_from_config(PRESETS["gpt-oss-20b"])
    groups = cache_groups(spec)
    assert [(len(group.layers), group.window) for group in groups] == [(12, None), (12, 128)]
    layout = TableLayout(16, tuple(group.window for group in groups))
    whole = 2 * layout.blocks_for(32768)  # blocks of as many bytes, had both halves of the layers kept everything
    assert layout.held_for(32768) <= 0.55 * whole


def find_kept(layer: LayerSpec) -> int:
    assert not isinstance(layer.attention, RecurrentSpec)
    return layer.attention.cached_values


def test_layers_with_caches_of_different_shapes_form_groups_whose_blocks_have_one_size() -> None:
    spec = spec_from_config({"model_type": "mimo_v2_flash"})
    groups = cache_groups(spec)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(48))
    assert groups[0].layers == (0, 5, 11, 17, 23, 29, 35, 41, 47)
    assert {group.window for group in groups[1:]} == {129}
    of_layers = [find_kept(layer) for layer in spec.layers]
    values = [sum(of_layers[layer] for layer in group.layers) for group in groups]
    assert max(values) == 6 * 8 * (192 + 128) > values[0] == 9 * 4 * (192 + 128)
    held = TableLayout(16, tuple(group.window for group in groups)).held_for(32_768)
    assert held * max(values) <= 0.2 * 2048 * sum(of_layers)
    assert len(cache_groups(spec, one_shape=True)) == 1


def test_a_chunk_of_attention_frees_all_earlier_chunks_and_needs_none_of_them_for_a_prefix_hit() -> None:
    config = {"model_type": "llama4_text", "num_hidden_layers": 48, "max_position_embeddings": 10_485_760}
    groups = cache_groups(spec_from_config(config))
    assert [(len(group.layers), group.window, group.chunked) for group in groups] == [
        (12, None, False),
        *[(12, 8192, True)] * 3,
    ]
    layout = TableLayout(16, (None, 8192), frozenset({1}))
    assert [layout.first_kept(1, tokens) for tokens in (8191, 8192, 12_000, 16_384)] == [0, 512, 512, 1024]
    assert layout.first_kept(0, 16_384) == 0
    assert layout.held_for(1 << 20) < 65_536 + 600


def test_a_long_sequence_of_qwen_3_5_takes_less_than_a_third_of_what_attention_in_all_layers_takes() -> None:
    served = find_model("qwen3.5-35b-a3b")
    layers = served.spec.layers
    whole = len(layers) * max(served.kv_bytes(layer.attention) for layer in layers)
    assert served.kv_bytes_per_token(served.spec, 32768) <= 0.3 * whole


def test_groups_are_formed_only_where_they_save_memory() -> None:
    dense = spec_from_config(PRESETS["qwen3-30b-a3b"])
    (single,) = cache_groups(dense)
    assert single.window is None
    assert single.layers == tuple(range(48))
    (kept,) = cache_groups(spec_from_config(PRESETS["gpt-oss-20b"]), keep_everything=True)
    assert kept.window is None


def test_layers_that_read_the_keys_of_others_take_no_memory() -> None:
    settings = {"num_hidden_layers": 35, "num_kv_shared_layers": 20, "num_key_value_heads": 1, "hidden_size": 1536}
    kinds = {"layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7}
    spec = spec_from_config({"model_type": "gemma4_text", **settings, **kinds})  # E2B
    groups = cache_groups(spec)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(15))
    assert {spec.layers[index].attention.kv_layer for index in range(15, 35)} == {13, 14}
    allocation = KvAllocation(spec.layers, 0, groups, torch.float32, torch.float32, None)
    kv = allocation.allocate(2, BLOCK_SIZE, 0, 0, torch.device("cpu"), "")
    assert list(kv.token_caches) == list(range(15))
    assert kv.layers[15:20] == (*[kv.layers[13]] * 4, kv.layers[14])
    assert kv.groups[15:20] == (*[kv.groups[13]] * 4, kv.groups[14])


def test_layers_of_different_shapes_share_blocks_and_are_sent_token_by_token() -> None:
    settings = {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "v_head_dim": 8,
    }
    spec = spec_from_config({"model_type": "mimo_v2_flash", "sliding_window": 20, **settings})
    groups = cache_groups(spec)
    assert len(groups) > 1
    allocation = KvAllocation(spec.layers, 0, groups, torch.float32, torch.float32, None)
    ours, theirs = (allocation.allocate(6, BLOCK_SIZE, 0, 0, torch.device("cpu"), "") for _ in range(2))
    for kv in (ours, theirs):
        (place,) = kv.places
        place.rows_NPL.fill_(float("nan"))
    block_of, sent = dict(enumerate([5, 2, 4, 1, 3][: len(groups)])), []
    for layer, group in zip(ours.everything, ours.groups, strict=True):
        slots = block_of[group] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
        rows = [torch.randn(BLOCK_SIZE, part.shape[1], part.shape[3]) for part in layer.parts]
        write(layer, rows, slots)
        sent.append(rows)
    for mine, yours, rows, group in zip(ours.everything, theirs.everything, sent, ours.groups, strict=True):
        found = read(mine, torch.tensor([block_of[group]]), 0, BLOCK_SIZE)
        write(yours, found, block_of[group] * BLOCK_SIZE + torch.arange(BLOCK_SIZE))
        again = read(yours, torch.tensor([block_of[group]]), 0, BLOCK_SIZE)
        assert all(torch.equal(one, row) for one, row in zip(again, rows, strict=True))
    unused = [block for block in range(6) if block not in block_of.values()]
    assert ours.places[0].parts[0][unused].isnan().all()
