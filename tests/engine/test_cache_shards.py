"""Shards of a cache between engines of different layouts: each rank receives all that it needs, once."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from moiety_engine.distribution.layout import Layout, RankPosition
from moiety_engine.kv_transfer.cache_shards import (
    EVENLY,
    MAX_RANKS,
    WHOLE,
    WHOLE_STATE,
    WITH_STATE,
    CacheShare,
    share_on_rank,
)
from moiety_engine.kv_transfer.kv_layout import ShardViews, read, token_bytes
from moiety_engine.kv_transfer.messages import Begin, CacheShard, KvChunk, TensorLayout
from moiety_engine.kv_transfer.staging_buffer import STALLED_S, Progress, StagingBuffer
from moiety_engine.model.batch import KvCache
from moiety_engine.model.cache_groups import cache_groups
from moiety_engine.model.families import read_spec
from moiety_engine.model.kv_allocation import KvAllocation
from moiety_engine.model.spec import ModelSpec
from moiety_engine.model.tensor_shards import own_spec
from moiety_kernels.kv_store.caches import LayerCache
from moiety_wire.roles import KvRanks

from .rank_processes import FAMILIES as SETTINGS
from .rank_processes import SMALL

UNITS = (4, WHOLE, EVENLY, 2, None, 8, WITH_STATE, WHOLE_STATE)  # of eight layers
DIVISIONS = [KvRanks(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 3)]
NUM_TOKENS, BLOCK_SIZE = 11, 4


def share_of(ranks: KvRanks, rank: int, units: tuple[int | None, ...] = UNITS) -> CacheShare:
    return CacheShare(ranks, rank, len(units), units)


@pytest.mark.parametrize(("senders", "receivers"), list(itertools.product(DIVISIONS, DIVISIONS)))
def test_each_rank_gets_each_unit_of_its_layers_once(senders: KvRanks, receivers: KvRanks) -> None:
    for rank in range(receivers.tp * receivers.pp):
        own = share_of(receivers, rank)
        position = RankPosition(Layout(tp=receivers.tp, pp=receivers.pp), rank)
        expected = [layer for layer in position.layers_of(len(UNITS)) if UNITS[layer] is not None]
        got: dict[int, list[int]] = {layer: [] for layer in expected}
        for sender, shards in own.shards_from(senders).items():
            assert share_of(senders, sender).shards_to(receivers)[rank] == shards
            for shard in shards:
                held = share_of(senders, sender).range_of(shard)
                assert held[0] <= shard.first < shard.end <= held[1]
                first, end = own.range_of(shard)
                got[shard.layer] += [unit - first for unit in range(shard.first, shard.end)]
                assert max(got[shard.layer]) < end - first
        for layer, units in got.items():
            twice = 2 if UNITS[layer] == WITH_STATE else 1  # entries and a state
            each = sorted(units)[::twice]
            assert sorted(units) == sorted(each * twice), f"layer {layer} has as many entries as states"
            assert each == list(range(len(each))) and each, f"layer {layer} must be complete"


@pytest.mark.parametrize("ranks", DIVISIONS)
def test_engines_of_one_layout_send_from_each_rank_to_the_same(ranks: KvRanks) -> None:
    for rank in range(ranks.tp * ranks.pp):
        assert list(share_of(ranks, rank).shards_to(ranks)) == [rank]


def test_ranks_with_the_same_heads_divide_the_receivers_among_them() -> None:
    senders, receivers = KvRanks(tp=4), KvRanks(tp=2)
    found = {rank: list(share_of(senders, rank, (2, WHOLE)).shards_to(receivers)) for rank in range(4)}
    assert found == {0: [0], 1: [], 2: [1], 3: []}
    wider = {rank: list(share_of(receivers, rank, (WHOLE,)).shards_to(KvRanks(tp=4))) for rank in range(2)}
    assert wider == {0: [0, 1], 1: [2, 3]}


def test_layouts_without_a_common_division_are_refused_with_the_reason() -> None:
    share = share_of(KvRanks(), 0)
    assert share.why_incompatible(KvRanks(tp=2, pp=3)) == ""
    assert "does not divide the model's 2 key-value heads" in share.why_incompatible(KvRanks(tp=3))
    assert "more than the model's 8 layers" in share.why_incompatible(KvRanks(pp=9))
    for none in (KvRanks(tp=0), KvRanks(tp=1 << 20, pp=1 << 20), KvRanks(dcp=0)):
        assert "no numbers of ranks" in share.why_incompatible(none)
    for few in (KvRanks(tp=2, dcp=2), KvRanks(tp=4, dcp=3)):
        assert "needs as many copies" in share_of(KvRanks(), 0, (2, WHOLE)).why_incompatible(few)


DIVIDED_UNITS = (2, WHOLE, EVENLY, None, WHOLE)  # of four layers, and of hidden states
DIVIDED = [KvRanks(), KvRanks(tp=2), *(KvRanks(tp, pp, 1, dcp) for tp, pp, dcp in [(4, 1, 2), (4, 2, 2), (8, 1, 4)])]


@pytest.mark.parametrize(("senders", "receivers"), list(itertools.product(DIVIDED, DIVIDED)), ids=str)
def test_each_rank_gets_each_of_its_positions_once(senders: KvRanks, receivers: KvRanks) -> None:
    for rank in range(receivers.tp * receivers.pp):
        own = CacheShare(receivers, rank, 4, DIVIDED_UNITS)
        got: dict[tuple[int, int, int], list[int]] = {}  # positions by layer, unit and the number of all units
        for sender, shards in own.shards_from(senders).items():
            for shard in shards:
                place, held = sender % senders.tp, range(0, 24)
                if DIVIDED_UNITS[shard.layer] != EVENLY and shard.layer < 4:
                    held = range(place % senders.dcp, 24, senders.dcp)
                sent = shard.positions(0, 24)
                assert set(sent) <= set(held), "a rank sends positions that it has"
                for unit in range(shard.first, shard.end):
                    got.setdefault((shard.layer, unit, shard.num_units), []).extend(sent)
        stage, place = divmod(rank, receivers.tp)
        layers = [one for one in (0, 1, 2, 4) if one // 2 == stage or receivers.pp == 1 or (one == 4 and stage == 1)]
        assert {layer for layer, *_ in got} == set(layers)
        for (layer, *_), positions in got.items():
            is_divided = layer < 2
            expected = range(place % receivers.dcp, 24, receivers.dcp) if is_divided else range(24)
            assert sorted(positions) == list(expected)


def test_ranks_with_the_same_positions_divide_the_receivers_among_them() -> None:
    senders = KvRanks(tp=4, dcp=2)
    found = {rank: list(CacheShare(senders, rank, 1, (WHOLE,)).shards_to(KvRanks(tp=2))) for rank in range(4)}
    assert found == {0: [0], 1: [0], 2: [1], 3: [1]}


@pytest.mark.parametrize(("first", "end"), [(0, 0), (0, 1), (3, 4), (5, 17), (6, 6)])
def test_positions_of_a_shard_are_those_of_its_phase(first: int, end: int) -> None:
    for stride, phase in [(1, 0), (2, 1), (6, 4)]:
        shard = CacheShard(0, 0, 1, 1, stride, phase)
        assert list(shard.positions(first, end)) == [p for p in range(first, end) if p % stride == phase]


class Rank:
    """One rank's cache of a model, and its share."""

    def __init__(self, spec: ModelSpec, ranks: KvRanks, rank: int) -> None:
        position = RankPosition(Layout(tp=ranks.tp, pp=ranks.pp, dcp=ranks.dcp), rank)
        self.share = share_on_rank(spec, position, keeps_hidden=False)
        groups = cache_groups(spec, keep_everything=True, one_shape=False)
        first = position.layers_of(len(spec.layers)).start
        layers = own_spec(spec, position).layers
        allocation = KvAllocation(layers, first, groups, torch.float32, torch.float32, None, num_shards=ranks.dcp)
        self.num_tokens = len(range(position.dcp_rank, NUM_TOKENS, ranks.dcp))
        self.kv = allocation.allocate(4, BLOCK_SIZE, 2, 0, torch.device("cpu"), "")
        for part in self.parts():
            part.zero_()

    def parts(self) -> list[torch.Tensor]:
        caches = [*self.kv.token_caches.values(), *self.kv.state_caches.values()]
        return [part for cache in caches for part in cache.parts]


def send(senders: list[Rank], receiver: Rank) -> None:
    """Send the first tokens of the senders' blocks to the receiver's, and the state in slot 1 to slot 0."""
    staging_buffer = StagingBuffer(1 << 24, receiver.share)
    staging_buffer.serve(receiver.kv)
    blocks = torch.tensor([2, 0, 3])
    for sender in senders:
        shards = sender.share.shards_to(receiver.share.ranks).get(receiver.share.rank)
        if shards is None:
            continue
        views, by = ShardViews(sender.kv, sender.share, shards), bytes([sender.share.rank])
        form, states, num_bytes = views.form, views.state_form, views.num_bytes(NUM_TOKENS)
        ranks, rank = sender.share.ranks, sender.share.rank
        division: dict[str, Any] = {"ranks": ranks, "rank": rank, "shards": shards}
        begin = Begin("a", NUM_TOKENS, num_bytes, b"", form, transport="tcp", states=states, **division)
        assert staging_buffer.begin(begin, by) == ""
        offset = 0
        for layer in range(len(shards)):
            state = layer - len(form)
            rows = views.read_state(state, 1) if state >= 0 else views.read_rows(layer, blocks, 0, NUM_TOKENS)
            first = NUM_TOKENS - 1 if state >= 0 else 0
            frames = [row.contiguous().view(-1).view(torch.uint8).numpy().data for row in rows]
            staging_buffer.put(KvChunk("a", layer, first, NUM_TOKENS, offset), frames, by)
            offset += sum(row.nbytes for row in rows)
        assert staging_buffer.claim("a") is Progress.COMING
        assert staging_buffer.end("a", by)
    assert staging_buffer.claim("a") is Progress.THERE
    arrival = staging_buffer.arrival("a", b"")
    assert arrival is not None and arrival.num_tokens == NUM_TOKENS
    staging_buffer.load("a", 0, [[2, 0, 3]] * receiver.kv.num_groups, [0] * receiver.kv.num_groups, 0)


def all_values(ranks: list[Rank], slot: int) -> list[torch.Tensor]:
    """Return the tokens and states of all ranks, part by part."""
    blocks, found = torch.tensor([2, 0, 3]), []
    for rank in ranks:
        for cache in rank.kv.token_caches.values():
            found += read(cache, blocks, 0, rank.num_tokens)
        for state in rank.kv.state_caches.values():
            found += [part[slot] for part in state.parts]
    return found


LAYOUTS = [
    (KvRanks(tp=2), KvRanks()),
    (KvRanks(tp=2), KvRanks(tp=4)),
    (KvRanks(tp=4), KvRanks(tp=2)),
    (KvRanks(pp=2), KvRanks()),
    (KvRanks(tp=2), KvRanks(pp=2)),
]
DIVIDED_LAYOUTS = [
    (KvRanks(tp=2, dcp=2), KvRanks()),
    (KvRanks(tp=4, dcp=2), KvRanks(tp=4, dcp=4)),
    (KvRanks(tp=2, pp=2, dcp=2), KvRanks(tp=2)),
]
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "deepseek_v3": {},
    "qwen3_next": {"linear_num_key_heads": 4, "num_attention_heads": 4},
    "kimi_linear": {"linear_num_heads": 4},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_n_groups": 4},
    "granitemoehybrid, one group": {},
    "jamba": {},
}


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [
        *((family, *layouts) for layouts in LAYOUTS for family in FAMILIES),
        *((family, *layouts) for layouts in DIVIDED_LAYOUTS for family in ("deepseek_v3", "kimi_linear")),
        ("qwen3_moe", KvRanks(tp=4, dcp=2), KvRanks(tp=2)),
    ],
    ids=str,
)
def test_a_cache_returns_unchanged_from_another_layout(
    tmp_path: Path, family: str, first: KvRanks, second: KvRanks
) -> None:
    spec = spec_of(tmp_path, family)
    there = [Rank(spec, second, rank) for rank in range(second.tp * second.pp)]
    sources = [Rank(spec, first, rank) for rank in range(first.tp * first.pp)]
    back = [Rank(spec, first, rank) for rank in range(first.tp * first.pp)]
    whole = Rank(spec, KvRanks(), 0)
    generator = torch.Generator().manual_seed(0)
    for part in whole.parts():
        part.copy_(torch.rand(part.shape, generator=generator))
    for rank in sources:
        send([whole], rank)
        for state in rank.kv.state_caches.values():
            for part in state.parts:
                part[1].copy_(part[0])
    for rank in there:
        send(sources, rank)
        for state in rank.kv.state_caches.values():
            for part in state.parts:
                part[1].copy_(part[0])
    for rank in back:
        send(there, rank)
    for sent, got in zip(all_values(sources, 0), all_values(back, 0), strict=True):
        assert sent.any() and torch.equal(sent, got)


def spec_of(folder: Path, family: str) -> ModelSpec:
    from transformers import AutoConfig

    settings: dict[str, Any] = SMALL | SETTINGS[family] | FAMILIES[family]
    AutoConfig.for_model(family.partition(",")[0], **settings).save_pretrained(folder)
    return read_spec(folder)


def two_senders(dtype: torch.dtype, clock: Any = lambda: 0.0) -> tuple[StagingBuffer, KvCache, list[Begin]]:
    """Return a rank with a layer of two heads of 8, its cache, and what two ranks with one head each announce."""
    kv = KvCache((layer_of(dtype, 2),), 4, BLOCK_SIZE)
    staging_buffer = StagingBuffer(1 << 20, share_of(KvRanks(), 0, (2,)), clock=clock)
    staging_buffer.serve(kv)
    begins, two = [], KvRanks(tp=2)
    for rank in range(2):
        share, half = share_of(two, rank, (2,)), KvCache((layer_of(torch.float32, 1),), 4, BLOCK_SIZE)
        (shards,) = share.shards_to(KvRanks()).values()
        form = ShardViews(half, share, shards).form
        num_bytes = NUM_TOKENS * token_bytes(form)
        division: dict[str, Any] = {"ranks": two, "rank": rank, "shards": shards}
        begins.append(Begin("a", NUM_TOKENS, num_bytes, b"", form, transport="tcp", **division))
    return staging_buffer, kv, begins


def layer_of(dtype: torch.dtype, num_heads: int) -> LayerCache:
    both = torch.zeros(2, 4, num_heads, BLOCK_SIZE, 8, dtype=dtype)
    scales = torch.zeros(2, 4, num_heads, BLOCK_SIZE) if dtype is torch.int8 else (None, None)
    return LayerCache(both[0], both[1], scales[0], scales[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_heads_of_several_ranks_are_joined_in_a_cache_of_any_type(dtype: torch.dtype) -> None:
    staging_buffer, kv, begins = two_senders(dtype)
    sent_2TGd = torch.rand(2, NUM_TOKENS, 2, 8, generator=torch.Generator().manual_seed(0))
    for rank, begin in enumerate(begins):
        by = bytes([rank])
        assert staging_buffer.begin(begin, by) == ""
        frames = [one[:, rank].contiguous().view(-1).view(torch.uint8).numpy().data for one in sent_2TGd]
        staging_buffer.put(KvChunk("a", 0, 0, NUM_TOKENS, 0), frames, by)
        assert staging_buffer.end("a", by)
    staging_buffer.load("a", 0, [[2, 0, 3]], [0])
    rows = read(kv.layers[0], torch.tensor([2, 0, 3]), 0, NUM_TOKENS)
    scales = [row[..., None] for row in rows[2:]] or [1.0, 1.0]
    for got, scale, sent in zip(rows[:2], scales, sent_2TGd, strict=True):
        torch.testing.assert_close(got.float() * scale, sent, rtol=0, atol=0 if dtype is torch.float32 else 0.005)


def test_a_transfer_is_complete_when_the_parts_of_all_ranks_are() -> None:
    now_s = [0.0]
    staging_buffer, _, begins = two_senders(torch.float32, lambda: now_s[0])
    assert staging_buffer.begin(begins[0], b"0") == ""
    assert staging_buffer.begin(begins[0], b"1") == "a transfer with this id has begun already"
    staging_buffer.put(KvChunk("a", 0, 0, NUM_TOKENS, 0), [memoryview(bytes(begins[0].num_bytes))], b"0")
    assert staging_buffer.end("a", b"0")
    assert staging_buffer.claim("a") is Progress.COMING
    now_s[0] += STALLED_S + 1
    assert staging_buffer.claim("a") is Progress.LOST, "the other part never came"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_hash": b"other"}, "different prompts"),
        ({"num_tokens": 1, "num_bytes": 64}, "different prompts"),
        ({"shards": ()}, "other layers, heads or widths"),
        ({"rank": 2}, "other layers, heads or widths"),
        ({"ranks": KvRanks(tp=3)}, "does not divide"),
        ({"transport": ""}, "transport '' is unknown"),
        ({"transport": "auto"}, "transport 'auto' is unknown"),
        ({"transport": "memory"}, "transport 'memory' is unknown"),
        ({"form": ((TensorLayout("complex64", (1, 8)),) * 2,)}, "unknown dtype 'complex64'"),
        ({"form": ((TensorLayout("quint8", (1, 8)),) * 2,)}, "unknown dtype 'quint8'"),
    ],
    ids=str,
)
def test_a_part_that_does_not_belong_to_the_others_is_refused_alone(changes: dict[str, Any], reason: str) -> None:
    staging_buffer, _, begins = two_senders(torch.float32)
    foreign = msgspec.structs.replace(begins[1], **changes)
    assert staging_buffer.begin(begins[0], b"0") == ""
    assert reason in staging_buffer.begin(foreign, b"x")
    complete(staging_buffer, begins[0], b"0", has_begun=True)
    assert staging_buffer.claim("a") is Progress.COMING
    complete(staging_buffer, begins[1], b"1")
    assert staging_buffer.claim("a") is Progress.THERE


def complete(staging_buffer: StagingBuffer, begin: Begin, by: bytes, *, has_begun: bool = False) -> None:
    assert has_begun or staging_buffer.begin(begin, by) == ""
    staging_buffer.put(KvChunk("a", 0, 0, NUM_TOKENS, 0), [memoryview(bytes(begin.num_bytes))], by)
    assert staging_buffer.end("a", by)


@pytest.mark.parametrize("changes", [{"rank": 99}, {"rank": -1}, {"shards": ()}, {"num_bytes": 1 << 40}], ids=str)
def test_complete_kv_stays_until_its_request_has_loaded_it(changes: dict[str, Any]) -> None:
    staging_buffer, kv, begins = two_senders(torch.float32)
    for rank, begin in enumerate(begins):
        complete(staging_buffer, begin, bytes([rank]))
    assert staging_buffer.claim("a") is Progress.THERE
    arrival = staging_buffer.arrival("a", b"")
    assert arrival is not None
    assert staging_buffer.begin(msgspec.structs.replace(begins[0], **changes), b"x")
    staging_buffer.cancel("a", b"\0")
    assert staging_buffer.end("a", b"\1"), "a second end changes nothing"
    assert staging_buffer.arrival("a", b"") == arrival
    for part in kv.layers[0].parts:
        part.fill_(1)
    staging_buffer.load("a", 0, [[2, 0, 3]], [0])
    assert not any(row.any() for row in read(kv.layers[0], torch.tensor([2, 0, 3]), 0, NUM_TOKENS))
    assert staging_buffer.claim("a") is Progress.LOST, "its memory is free again"


def test_more_ranks_than_an_engine_has_are_refused() -> None:
    share = share_of(KvRanks(), 0, (8,) * 60)
    assert share.why_incompatible(KvRanks(tp=MAX_RANKS)) == ""
    assert "no numbers of ranks" in share.why_incompatible(KvRanks(tp=4096))
    assert share.shards_from_rank(KvRanks(tp=2), 2) == share.shards_from_rank(KvRanks(tp=2), -1) == ()


@pytest.mark.parametrize("ranges", [[(0, 4), (0, 4), (8, NUM_TOKENS)], [(4, NUM_TOKENS), (0, 4)], [(0, 5), (4, 10)]])
def test_chunks_with_a_gap_or_twice_the_same_tokens_lose_the_transfer(ranges: list[tuple[int, int]]) -> None:
    staging_buffer, _, begins = two_senders(torch.float32)
    assert staging_buffer.begin(begins[0], b"0") == ""
    each = begins[0].num_bytes // NUM_TOKENS
    for first, end in ranges:
        staging_buffer.put(KvChunk("a", 0, first, end, 0), [memoryview(bytes((end - first) * each))], b"0")
    assert staging_buffer.claim("a") is Progress.LOST
    assert not staging_buffer.end("a", b"0")
