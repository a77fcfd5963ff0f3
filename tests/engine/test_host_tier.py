"""The host tier restores bytes exactly: blocks are copied out, overwritten and copied in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import examples
from torch import Tensor

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.cache.host import HostTier
from moiety_engine.errors import OutOfMemory
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.batch import KvCache
from moiety_engine.model.transformer import Transformer
from moiety_engine.runner.inputs import BatchBuilder
from moiety_engine.runner.kv_swap import HostKv
from moiety_engine.runner.memory import num_host_blocks
from moiety_engine.scheduling.kv.kv_ledger import KvLedger
from moiety_engine.scheduling.plan import Chunk, Plan
from moiety_engine.sequence import Sequence
from moiety_kernels.kv_store.caches import LatentCache, LayerCache
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling

BLOCK_SIZE = 4
NUM_BLOCKS = 12


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def uneven_cache(num_blocks: int, device: str = "cpu") -> KvCache:
    """Layers of different heads and widths, one of them of latent rows, every element different."""

    def layer(heads: int, width: int, base: float) -> LayerCache:
        shape = (2, num_blocks, heads, BLOCK_SIZE, width)
        both = torch.arange(base, base + torch.Size(shape).numel(), dtype=torch.float32, device=device).reshape(shape)
        return LayerCache(both[0], both[1])

    rows = torch.arange(3e5, 3e5 + num_blocks * BLOCK_SIZE * 6, device=device).reshape(num_blocks, BLOCK_SIZE, 6)
    layers = layer(2, 8, 0.0), layer(1, 16, 1e5), LatentCache(rows, 4), layer(4, 2, 2e5)
    return KvCache(layers, num_blocks, BLOCK_SIZE)


def parts(kv: KvCache) -> list[Tensor]:
    return [part for layer in kv.layers for part in layer.parts]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=examples(60), deadline=None)
@given(
    sources=st.lists(st.integers(0, 7), unique=True, min_size=1),
    data=st.data(),
    rows_per_slab=st.integers(1, 5),
    staging_rows=st.integers(1, 5),
)
def test_any_blocks_come_back_into_any_blocks_through_any_slabs_and_portions(
    device: str, sources: list[int], data: st.DataObject, rows_per_slab: int, staging_rows: int
) -> None:
    hosts = data.draw(st.permutations(range(10)))[: len(sources)]
    targets = data.draw(st.permutations(range(8)))[: len(sources)]
    kv = uneven_cache(8, device)
    block_bytes = sum(part[0].numel() * 4 for part in parts(kv))
    host = HostKv(kv, 10, slab_bytes=rows_per_slab * block_bytes, staging_bytes=staging_rows * block_bytes)
    assert host.block_bytes == block_bytes
    before = [part.clone() for part in parts(kv)]
    host.run(list(zip(sources, hosts, strict=True)), [])
    for part in parts(kv):
        part.fill_(torch.nan)
    host.run([], list(zip(hosts, targets, strict=True)))
    for part, was in zip(parts(kv), before, strict=True):
        assert torch.equal(part[targets], was[sources])
        others = [block for block in range(8) if block not in targets]
        assert part[others].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_scales_go_with_the_whole_numbers_that_they_are_of(device: str) -> None:
    shape = 2, 5, 3, BLOCK_SIZE, 8
    numbers = torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
    scales = torch.rand(shape[:-1], device=device)
    kv = KvCache((LayerCache(numbers[0], numbers[1], scales[0], scales[1]),), 5, BLOCK_SIZE)
    host, before = HostKv(kv, 5), [part.clone() for part in parts(kv)]
    assert host.block_bytes == 2 * 3 * BLOCK_SIZE * (8 + 4)
    host.run([(1, 4), (3, 0)], [(4, 0), (0, 2)])
    for part, was in zip(parts(kv), before, strict=True):
        assert torch.equal(part, was[[1, 1, 3, 3, 4]])


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_go_out_before_blocks_come_in(device: str) -> None:
    kv = uneven_cache(2, device)
    host = HostKv(kv, 2)
    first, second = (parts(kv)[0][block].clone() for block in (0, 1))
    host.run([(0, 0)], [])
    host.run([(1, 1)], [(0, 1), (1, 0)])
    assert torch.equal(parts(kv)[0][1], first)
    assert torch.equal(parts(kv)[0][0], second)


def test_measuring_the_bandwidth_leaves_the_cache_as_it_was() -> None:
    kv = uneven_cache(4)
    before = [part.clone() for part in parts(kv)]
    assert HostKv(kv, 3).measure_bandwidth() > 0
    assert all(torch.equal(part, was) for part, was in zip(parts(kv), before, strict=True))


class Bench:
    """The real model over ledger, host tier and their bytes, stepped by hand."""

    def __init__(self, model: Transformer) -> None:
        self.kv = model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
        self.ledger = KvLedger(BlockPool(NUM_BLOCKS), BLOCK_SIZE, prefix_caching=True, host=HostTier(NUM_BLOCKS))
        self.host = HostKv(self.kv, NUM_BLOCKS)
        self._model = model
        self._builder = BatchBuilder(BLOCK_SIZE, model.device)

    def start(self, sequence: Sequence) -> None:
        assert self.ledger.start(sequence, self.ledger.find_prefix(sequence), len(sequence.tokens))

    @torch.inference_mode()
    def step(self, sequence: Sequence) -> Tensor:
        """Compute what the sequence lacks, as the loop does, and append the likeliest token."""
        num_tokens = sequence.num_uncomputed
        assert self.ledger.grow(sequence, len(sequence.tokens))
        self.host.run(*self.ledger.take_copies())
        plan = Plan([Chunk(sequence, num_tokens, samples=True)], int(num_tokens == 1), num_tokens, [])
        logits_LV = self._model.forward(self._builder.build(plan), self.kv)
        sequence.kv.num_computed += num_tokens
        self.ledger.seal(sequence)
        sequence.tokens.append(int(logits_LV[0].argmax()))
        return logits_LV[0].clone()


def make_sequence(seed: int, length: int) -> Sequence:
    prompt = torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Sequence(CoreSubmit(0, "t", STANDARD, prompt, Sampling(), 64, 0, [], 64, b"s", 0), order=0, seed=0)


def run_alone(model: Transformer, sequence: Sequence, num_steps: int) -> list[Tensor]:
    bench = Bench(model)
    bench.start(sequence)
    return [bench.step(sequence) for _ in range(num_steps)]


def test_a_swapped_sequence_goes_on_with_bit_identical_logits_after_others_overwrote_its_blocks(loops: Any) -> None:
    expected = run_alone(loops.model, make_sequence(1, 17), 8)
    bench, victim, other = Bench(loops.model), make_sequence(1, 17), make_sequence(2, NUM_BLOCKS * BLOCK_SIZE)
    bench.start(victim)
    got = [bench.step(victim) for _ in range(3)]
    assert bench.ledger.swap_out(victim)
    bench.start(other)
    bench.step(other)  # takes every block
    bench.ledger.release(other)
    assert victim.kv.num_computed == 19
    assert bench.ledger.swap_in(victim, 20)
    got += [bench.step(victim) for _ in range(5)]
    assert bench.ledger.swapped_in_total == 5
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_a_prefix_hit_on_the_host_gives_the_logits_of_a_prefix_hit_on_the_device(loops: Any) -> None:
    logits = []
    for evict in (False, True):
        bench = Bench(loops.model)
        for sequence in [make_sequence(3, 18), make_sequence(4, NUM_BLOCKS * BLOCK_SIZE)][: 1 + evict]:
            bench.start(sequence)
            bench.step(sequence)
            bench.ledger.release(sequence)
        again = make_sequence(3, 18)
        assert [hit.on_host for hit in bench.ledger.find_prefix(again).hits] == [evict] * 4
        bench.start(again)
        assert again.num_uncomputed == 2
        logits.append(bench.step(again))
    assert torch.equal(*logits)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("device", "wanted", "kv_bytes", "host_bytes", "expected"),
    [
        ("cuda", None, 100 * GIB, 100 * GIB, 25 * 1024),
        ("cuda", None, 2 * GIB, 100 * GIB, 4 * 1024),
        ("cpu", None, 2 * GIB, 100 * GIB, 0),
        ("cpu", GIB, 2 * GIB, 100 * GIB, 1024),
        ("cuda", 0, 2 * GIB, 100 * GIB, 0),
    ],
)
def test_the_host_tier_takes_a_quarter_of_memory_or_twice_the_devices_beside_a_gpu_and_else_what_it_is_told(
    device: str, wanted: int | None, kv_bytes: int, host_bytes: int, expected: int
) -> None:
    count = num_host_blocks(
        device=torch.device(device),
        wanted_bytes=wanted,
        kv_bytes=kv_bytes,
        block_bytes=1 << 20,
        host_bytes=host_bytes,
    )
    assert count == expected


@pytest.mark.parametrize("wanted", [1, 3 * GIB])
def test_a_host_tier_smaller_than_a_block_or_larger_than_memory_is_refused(wanted: int) -> None:
    with pytest.raises(OutOfMemory, match="--host-kv-memory-bytes"):
        num_host_blocks(
            device=torch.device("cpu"), wanted_bytes=wanted, kv_bytes=GIB, block_bytes=1 << 20, host_bytes=2 * GIB
        )


def evict_all(host: HostTier, hashes: tuple[bytes, ...]) -> None:
    """Evict blocks with these contents from a device pool, in this order, in one allocation."""
    device = BlockPool(len(hashes))
    host.attach(device)
    blocks = device.allocate(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        device.seal(block, block_hash)
    device.free(blocks)
    device.allocate(len(hashes))


def on_host(host: HostTier, *hashes: bytes) -> set[bytes]:
    return {block_hash for block_hash in hashes if host.pool.find(block_hash) is not None}


def test_a_large_allocation_leaves_retained_blocks_on_the_host() -> None:
    host = HostTier(4)
    evict_all(host, (b"r1", b"r2", b"r3"))
    host.pool.evict_last(kept := {b"r1", b"r2", b"r3"}, kept)
    evict_all(host, (b"p1", b"p2", b"p3"))
    assert on_host(host, b"r1", b"r2", b"r3", b"p1", b"p2", b"p3") == {b"r1", b"r2", b"r3", b"p3"}


def test_a_block_that_leaves_host_and_device_in_one_allocation_is_kept_again() -> None:
    host = HostTier(2)
    evict_all(host, (b"a", b"x"))
    evict_all(host, (b"b", b"a"))  # a place for b is that of a
    assert on_host(host, b"a", b"b", b"x") == {b"a", b"b"}
