"""Expert load as it is counted, against counts done by hand from what transformers' own routers choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moiety_engine.config import EngineConfig, Overlap
from moiety_engine.loop import EngineLoop
from moiety_engine.loop_setup import build_loop
from moiety_engine.messages import CoreSubmit
from moiety_engine.moe.history import ExpertPace, LoadHistory
from moiety_engine.moe.load_watch import REPORT_INTERVAL_S, TAKE_S
from moiety_engine.moe.shape import ExpertShape
from moiety_engine.moe.tenants import NO_TENANT, OTHER_SLOT, TenantSlots
from moiety_engine.offline import run_all
from moiety_kernels.expert_count import ExpertSums, count_picks, owner_code, reference
from moiety_wire.classes import STANDARD
from moiety_wire.engine_choices import Batching
from moiety_wire.experts import OTHER_TENANTS, ExpertLoad, ExpertLoadQuery, pack_counts, unpack_counts, unpack_shares
from moiety_wire.messages import Sampling

SHAPE = ExpertShape(layers=(1, 2, 4), num_experts=8, top_k=2, expert_bytes=100)
START_S = 1_800_000_000
ALL = ExpertLoadQuery(1, 0)


class Clock:
    """A clock that a test moves, in seconds."""

    def __init__(self) -> None:
        self.now_s = float(START_S)

    def __call__(self) -> int:
        return int(self.now_s * 1e9)


def submit(key: int, tenant: str, prompt: list[int], output: int = 6) -> CoreSubmit:
    return CoreSubmit(key, tenant, STANDARD, prompt, Sampling(temperature=0.0), output, 0, [], output, b"s", 0)


def matrix(load: ExpertLoad) -> np.ndarray:
    return np.array(unpack_counts(load.picks_LE)).reshape(len(load.layers), load.num_experts)


def make_loop(loops: Any, clock: Clock, **settings: Any) -> EngineLoop:
    return build_loop(loops.model, EngineConfig(model=str(loops.folder), name="tiny", **settings), clock_ns=clock)


def settle(loop: EngineLoop, clock: Clock) -> None:
    """Wait until all counts have been read."""
    clock.now_s += TAKE_S
    for _ in range(3):
        loop.step()


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Any:
    """picks(tokens, first): of tokens from `first` on, how many went to each expert of each layer."""
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def picks(tokens: list[int], first: int = 0) -> np.ndarray:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
        chosen = [layer_TE[first:].topk(model.config.num_experts_per_tok).indices.flatten() for layer_TE in logits]
        return np.stack([torch.bincount(one, minlength=model.config.num_experts).numpy() for one in chosen])

    return picks


@pytest.mark.parametrize("strategy", [Batching.CONTINUOUS, Batching.PADDED])
@pytest.mark.parametrize("overlap", [Overlap.OFF, Overlap.ON])
def test_expert_counts_of_each_tenant_equal_the_choices_of_transformers_routers(
    loops: Any, oracle: Any, strategy: Batching, overlap: Overlap
) -> None:
    clock = Clock()
    loop = make_loop(loops, clock, batching=strategy, overlap=overlap, prefix_caching=False, static_batch_size=3)
    loop.warm_up()  # padding rows, whose tokens belong to no request
    prompts = {0: ("a", [5, 9, 77, 31, 8]), 1: ("b", list(range(20, 60))), 2: ("a", [300, 4, 4, 4, 17, 80, 2, 9, 9])}
    results = run_all(loop, [submit(key, *one) for key, one in prompts.items()])
    settle(loop, clock)
    expected: dict[str, np.ndarray] = {}
    for key, (tenant, prompt) in prompts.items():
        computed = (prompt + results[key].token_ids)[:-1]  # the last one was sampled, and nothing came after it
        expected[tenant] = expected.get(tenant, 0) + oracle(computed)
    if overlap is Overlap.OFF:
        assert (matrix(loop.expert_load(ALL)) == expected["a"] + expected["b"]).all()
        for tenant, picks_LE in expected.items():
            assert (matrix(loop.expert_load(ExpertLoadQuery(1, 0, tenant))) == picks_LE).all(), tenant
    told = {one.tenant_id: one.tokens for one in loop.expert_load(ALL).tenants}
    more = {tenant: told[tenant] - expected[tenant].sum() // 4 for tenant in ("a", "b")}  # of 2 layers and 2 experts
    assert set(told) == {"a", "b"}
    assert all(0 <= extra <= 3 * (overlap is Overlap.ON) for extra in more.values()), more


def test_a_slow_decode_that_is_replayed_counts_as_one_that_is_not(loops: Any, oracle: Any) -> None:
    clock = Clock()
    loop = make_loop(loops, clock, prefix_caching=False, overlap=Overlap.OFF)
    results = run_all(loop, [submit(1, "a", [9, 8, 7], 40)])  # steps of one sequence are recorded, and then replayed
    settle(loop, clock)
    load = loop.expert_load(ALL)
    assert (matrix(load) == oracle([9, 8, 7, *results[1].token_ids[:-1]])).all()
    minute = load.intervals[-1]
    of_prompt = (oracle([9, 8, 7]) > 0).sum()
    assert sum(unpack_counts(minute.active_L)) == of_prompt + 39 * 2 * 2  # two experts a token and layer
    assert minute.steps == 40


def empty_sums(num_experts: int = 8, parts: int = 800) -> ExpertSums:
    shapes = (4, 3, num_experts), (3,), (3, num_experts), (parts,), (parts, 3, -(-num_experts // 64))
    return ExpertSums(*(torch.zeros(shape, dtype=torch.int64) for shape in shapes))


@pytest.mark.parametrize("num_experts", [8, 130])
def test_kernel_and_reference_count_the_same(num_experts: int) -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = {"expert_bytes": 1001, "num_with_weights": num_experts - 1}
    for rows in (1, 3, 700):
        chosen = [torch.rand(rows, num_experts, generator=generator).topk(2).indices.int() for _ in SHAPE.layers]
        slots = torch.randint(0, 4, (rows,), generator=generator).tolist()
        owner_T = torch.tensor([slot and owner_code(slot, 1 + slot % 2, t // 3) for t, slot in enumerate(slots)])
        ours, theirs = empty_sums(num_experts), empty_sums(num_experts)
        for _ in range(2):  # sums are added to, bits are replaced
            count_picks(chosen, owner_T, ours, **sizes)
            reference.count_picks(chosen, owner_T, theirs, **sizes)
        for name, one, other in zip(ExpertSums._fields, ours, theirs, strict=True):
            assert torch.equal(one, other), name
        active = [{e for t in range(rows) if slots[t] for e in layer[t].tolist()} for layer in chosen]
        assert ours.active_L.tolist() == [2 * len(one) for one in active]
        assert ours.picks_SLE.sum() == 2 * 3 * 2 * rows
        assert ours.weighted_LE.sum() == 2 * 3 * 2 * sum(1 + slot % 2 for slot in slots if slot)
        with_weights = sum(len(one - {num_experts - 1}) for one in active)
        assert ours.bytes_P.sum() == 2 * 1001 * with_weights, "each active expert is read once, and nothing is lost"
        for part in range(-(-rows // 3)):
            mine = [t for t in range(3 * part, min(3 * part + 3, rows)) if slots[t]]
            words = ours.bits_PLW[part].numpy().astype("<i8").tobytes() if ours.bits_PLW is not None else b""
            found = int.from_bytes(words, "little")
            width = 64 * -(-num_experts // 64)
            last = [(layer, e) for layer in range(3) for e in chosen[layer][mine[-1]].tolist()] if mine else []
            assert found == sum(1 << (layer * width + e) for layer, e in last)


def test_tokens_of_an_expert_share_its_bytes_in_whole_bytes() -> None:
    chosen = [torch.tensor([[0, 1], [0, 2], [0, 3]], dtype=torch.int32)]
    owner_T = torch.tensor([owner_code(1, 1, 0), owner_code(2, 1, 1), owner_code(2, 1, 1)])
    sums = ExpertSums(*(one[:, :1] if one.dim() > 2 else one[:1] if one.shape[0] == 3 else one for one in empty_sums()))
    sums = ExpertSums(*(one.contiguous() for one in sums))
    count_picks(chosen, owner_T, sums, expert_bytes=100, num_with_weights=8)
    assert sums.bytes_P[:2].tolist() == [33 + 100 + 1, 33 + 100 + 33 + 100], "the remainder goes to the first token"


def even(count: int) -> np.ndarray:
    return np.full((3, 8), count, dtype=np.int64)


def test_an_even_load_is_balanced_and_one_hot_expert_is_not() -> None:
    history = LoadHistory(SHAPE, START_S)
    history.add({"a": even(40), "b": even(2)}, np.full(3, 8 * 5), 5, START_S)
    told = history.balance(START_S)
    assert told.balancedness == 1
    assert list(unpack_shares(told.balancedness_L)) == [1, 1, 1]
    assert list(unpack_shares(told.quantiles_LQ)) == [1] * 12
    assert list(unpack_shares(told.active_L)) == [8, 8, 8]
    hot = even(0)
    hot[1, 3] = 42 * 8  # the layer's expert 3 has as many again as all of them together
    history.add({"a": hot}, np.zeros(3, dtype=np.int64), 0, START_S)
    told = history.balance(START_S)
    assert list(unpack_shares(told.balancedness_L)) == pytest.approx([1, 84 / (42 * 9), 1])
    assert told.balancedness == pytest.approx((42 + 84 + 42) / (42 + 42 * 9 + 42))
    assert told.picks_total == 42 * 24 + 42 * 8


def test_minutes_are_kept_for_an_hour_and_sums_since_the_start() -> None:
    history = LoadHistory(SHAPE, START_S)
    for minute in range(90):
        history.add({"a": even(2)}, np.full(3, 8), 1, START_S + 60 * minute + 5)
    now_s = START_S + 60 * 89 + 30
    sums = {minutes: history.load(1, minutes, None, now_s) for minutes in (0, 1, 15, 60)}
    assert [sums[minutes].tenants[0].tokens for minutes in sums] == [90 * 8, 8, 15 * 8, 60 * 8]
    assert [len(sums[minutes].intervals) for minutes in sums] == [60, 1, 15, 60]
    assert [sums[minutes].since_unix_s - START_S for minutes in sums] == [0, 60 * 89, 60 * 75, 60 * 30]
    last = sums[15].intervals[-1]
    assert last.at_unix_s == START_S + 60 * 89
    assert [list(unpack_counts(one)) for one in (last.picks_L, last.busiest_L, last.active_L)] == [
        [16] * 3,
        [2] * 3,
        [8] * 3,
    ]
    of_nobody = history.load(1, 15, "stranger", now_s)
    assert (of_nobody.tenants, of_nobody.intervals, matrix(of_nobody).sum()) == ([], [], 0)
    assert unpack_counts(history.load(1, 15, "a", now_s).intervals[0].active_L).tolist() == []  # steps are everybody's


def test_the_busiest_tenants_are_told_apart_and_the_others_are_one() -> None:
    slots = TenantSlots(num_slots=4)  # padding, other tenants, and two tenants
    assert slots.slots_of(["", "a", "b", "c", "a"], [9, 1, 1, 90, 1]) == [NO_TENANT, 2, 3, OTHER_SLOT, 2]
    slots.weigh({"a": 2, "b": 50})
    slots.reassign()
    assert slots.slots_of(["a", "b", "c"], [1, 1, 1]) == [OTHER_SLOT, 3, 2]
    assert slots.names() == {OTHER_SLOT: OTHER_TENANTS, 2: "c", 3: "b"}
    assert slots.take_steps() == 2
    for _ in range(20):
        slots.weigh({"c": 1})
        slots.reassign()  # no other tenant comes, so each keeps its slot
    assert slots.names() == {OTHER_SLOT: OTHER_TENANTS, 2: "c", 3: "b"}
    history = LoadHistory(SHAPE, START_S)
    history.add({"a": even(2), OTHER_TENANTS: even(4)}, np.zeros(3, dtype=np.int64), 1, START_S)
    history.keep_only_tenants(slots.names().values())
    told = {one.tenant_id: one.tokens for one in history.load(1, 0, None, START_S).tenants}
    assert told == {OTHER_TENANTS: 6 * 24 // 6}


def test_the_balance_is_told_a_few_times_a_minute_and_only_where_there_is_news(loops: Any) -> None:
    clock = Clock()
    loop = make_loop(loops, clock, overlap=Overlap.OFF)
    assert loop.take_expert_balance() is None
    run_all(loop, [submit(1, "a", [9, 8, 7])])
    settle(loop, clock)
    assert loop.take_expert_balance() is not None
    assert loop.take_expert_balance() is None
    run_all(loop, [submit(2, "a", [9, 8, 7])])
    settle(loop, clock)
    assert loop.take_expert_balance() is None
    clock.now_s += REPORT_INTERVAL_S
    told = loop.take_expert_balance()
    assert told is not None
    assert told.picks_total == 2 * (3 + 5) * 2 * 2


def test_a_step_that_is_looked_at_tells_how_the_experts_did_of_late(loops: Any) -> None:
    clock = Clock()
    loop = make_loop(loops, clock, overlap=Overlap.OFF, traced_steps_per_s=1000)
    run_all(loop, [submit(1, "a", [9, 8, 7])])
    settle(loop, clock)
    loop.take_outputs()
    clock.now_s += 1
    loop.submit(submit(2, "a", [9, 8, 7]))
    loop.step()
    found = loop.take_outputs()
    assert found is not None
    (traced,) = found.traced
    assert traced.step.balancedness is not None and 1 / 8 <= traced.step.balancedness < 1
    assert traced.step.active_experts is not None and 2 <= traced.step.active_experts <= 8, "as many as a token has"


def test_the_pace_of_some_steps_is_of_a_layer_and_a_step() -> None:
    picks_LE = np.array([[4, 4, 4, 4], [8, 4, 2, 2]])
    assert ExpertPace.of(picks_LE, np.array([8, 6]), steps=2) == ExpertPace(active=3.5, balancedness=8 / 12)
    assert ExpertPace.of(0 * picks_LE, np.array([0, 0]), steps=0) == ExpertPace(active=0, balancedness=0)


@pytest.mark.parametrize("counts", [[], [0, 255], [0, 256], [65536], [2**32, 1]])
def test_counts_travel_in_the_smallest_numbers_that_hold_them(counts: list[int]) -> None:
    packed = pack_counts(counts)
    assert unpack_counts(packed).tolist() == counts
    size = next(size for size in (1, 2, 4, 8) if max(counts, default=0) < 256**size)
    assert len(packed) == 1 + size * len(counts)
    with pytest.raises(ValueError, match="counts begin with"):
        unpack_counts(b"x123")
