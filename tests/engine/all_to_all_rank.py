"""One rank of `test_expert_all_to_all`: `python all_to_all_rank.py IMPLEMENTATION LAYOUT RANK STORE`.

It runs passes of one or two layers through an all-to-all, checks its own tokens' results, and writes a line of JSON
with the numbers of collectives. LAYOUT is DPxTPxEP. `fake-deepep` runs the DeepEP implementation on a buffer that
behaves as DeepEP's documentation says, over gloo."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moiety_engine.distribution.collectives import PendingRows, RowExchange
from moiety_engine.distribution.deep_ep_all_to_all import DeepEpAllToAll
from moiety_engine.distribution.expert_all_to_all import (
    ExactAllToAll,
    ExpertAllToAll,
    ExpertRows,
    PaddedAllToAll,
    run_complete_pass,
)
from moiety_engine.distribution.layout import Layout, RankPosition

WIDTH, TOP_K, NUM_HELD = 12, 3, 4


class CountingExchange(RowExchange):
    """Exchange that counts its collectives, and the rows that this rank sends."""

    def __init__(self, handle: dist.ProcessGroup) -> None:
        super().__init__(handle)
        self.calls: Counter[str] = Counter()

    def exchange_counts(self, num_sent_R: Tensor) -> tuple[list[int], list[int]]:
        self.calls["counts"] += 1
        return super().exchange_counts(num_sent_R)

    def exchange_rows(self, rows_NB: Tensor, num_sent: list[int], num_received: list[int]) -> PendingRows:
        self.calls["rows"] += 1
        self.calls["sent"] += sum(num_sent)
        return super().exchange_rows(rows_NB, num_sent, num_received)


class FakeElasticBuffer:
    """ElasticBuffer of DeepEP without a GPU: received rows have local experts' numbers, and void rows after them."""

    num_open = 0  # of all buffers

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        explicitly_destroy: bool,
    ) -> None:
        assert explicitly_destroy
        FakeElasticBuffer.num_open += 1
        self._group, self._room, self._shape, self._is_open = group, num_max_tokens_per_rank, (hidden, num_topk), True

    def destroy(self) -> None:
        assert self._is_open
        FakeElasticBuffer.num_open -= 1
        self._is_open = False

    def dispatch(
        self,
        x: Tensor,
        *,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_experts: int,
        num_max_tokens_per_rank: int,
        async_with_compute_stream: bool,
        do_cpu_sync: bool,
    ) -> tuple[Any, ...]:
        assert self._is_open and len(x) <= num_max_tokens_per_rank <= self._room
        assert (x.shape[1], topk_idx.shape[1]) == self._shape and topk_idx.dtype is torch.int64
        assert async_with_compute_stream and not do_cpu_sync
        size, rank = self._group.size(), self._group.rank()
        each = num_experts // size
        of_ranks = self._gather((x, topk_idx, topk_weights))
        room = size * num_max_tokens_per_rank
        recv_x, recv_weights = torch.full((room, x.shape[1]), torch.nan), torch.full((room, self._shape[1]), torch.nan)
        recv_idx, sources = torch.full((room, self._shape[1]), 77), list[tuple[int, int]]()
        for source, (its_x, its_idx, its_weights) in enumerate(of_ranks):
            for token in ((its_idx >= 0) & (its_idx // each == rank)).any(1).nonzero()[:, 0].tolist():
                is_here = (its_idx[token] >= 0) & (its_idx[token] // each == rank)
                recv_x[len(sources)] = its_x[token]
                recv_idx[len(sources)] = torch.where(is_here, its_idx[token] - rank * each, -1)
                recv_weights[len(sources)] = torch.where(is_here, its_weights[token], 0.0)
                sources.append((source, token))
        counts = torch.tensor([len(sources)], dtype=torch.int32)
        handle = SimpleNamespace(psum_num_recv_tokens_per_scaleup_rank=counts, sources=sources, num_tokens=len(x))
        return recv_x, recv_idx, recv_weights, handle, self._event()

    def combine(self, x: Tensor, *, handle: Any, async_with_compute_stream: bool) -> tuple[Tensor, None, Any]:
        assert self._is_open and async_with_compute_stream and x.is_contiguous()
        out = torch.zeros(handle.num_tokens, self._shape[0])
        for sources, given in self._gather((handle.sources, x)):
            for (source, token), row in zip(sources, given, strict=False):
                if source == self._group.rank():
                    out[token] += row
        return out, None, self._event()

    def _gather(self, one: Any) -> list[Any]:
        found: list[Any] = [None] * self._group.size()
        dist.all_gather_object(found, one, group=self._group)
        return found

    def _event(self) -> Any:
        return SimpleNamespace(current_stream_wait=lambda: None)


@dataclass(frozen=True)
class Case:
    """Tokens of one pass. `slots`: all that tokens choose from; None: any."""

    num_tokens: tuple[int, ...]  # by rank, repeated
    slots: tuple[int, ...] | None = None
    adapters: bool = False
    repeatable: bool = True
    bounded: bool = True


def rows_of(case: Case, number: int, rank: int, position: RankPosition) -> ExpertRows:
    """Return the rows of a rank, which follow from the number of the case."""
    random = torch.Generator().manual_seed(1000 * number + rank)
    num_tokens, num_slots = case.num_tokens[rank % len(case.num_tokens)], NUM_HELD * position.layout.ep
    x_SD = torch.randn(num_tokens, WIDTH, generator=random)
    weight_SK = torch.rand(num_tokens, TOP_K, generator=random)
    known = torch.tensor(case.slots or range(-1, num_slots), dtype=torch.int32)
    slot_SK = known[torch.randint(len(known), (num_tokens, TOP_K), generator=random)]
    adapter_S1 = torch.randint(5, (num_tokens, 1), generator=random).int() if case.adapters else None
    return ExpertRows(x_SD, weight_SK, slot_SK, adapter_S1)


def given(rows: ExpertRows, position: RankPosition, *, everywhere: bool) -> Tensor:
    """Return the weighted sum of the slots' outputs, of this rank's slots or of all; a shard has an equal part."""
    first = NUM_HELD * position.ep_rank
    is_own = (rows.slot_SK >= first) & (rows.slot_SK < first + NUM_HELD)
    is_used = rows.slot_SK >= 0 if everywhere else is_own
    factor_SK = torch.where(is_used, rows.weight_SK * (rows.slot_SK + 1), 0.0)
    factor_S1 = factor_SK.sum(1, keepdim=True) / (1 if everywhere else position.expert_cuts)
    if rows.adapter_S1 is not None:
        factor_S1 = factor_S1 * (rows.adapter_S1 + 2)
    return factor_S1 * rows.x_SD


EVEN, MANY = (5, 3), (200, 150)
CASES = [
    Case(EVEN),
    Case((0, 7)),
    Case((0,)),
    Case(EVEN, bounded=False),
    Case(EVEN, slots=(-1,)),
    Case(EVEN, adapters=True),
    *[Case(MANY, slots=(1, 2))] * 80,  # tokens go to the first rank, whose capacity the others' shrinks beside
    Case(MANY, slots=(NUM_HELD + 1,)),  # all tokens to one expert on another rank
    Case(MANY, slots=(NUM_HELD + 1,)),
    Case(MANY, slots=(1,), repeatable=False),
    Case(MANY, adapters=True),
]


def one_pass(
    all_to_all: ExpertAllToAll, case: Case, number: int, position: RankPosition, *, overlapped: bool
) -> tuple[Tensor, Tensor]:
    """Return the result of this rank's rows, and what it must be."""
    rows = rows_of(case, number, position.rank, position)
    bound = max(case.num_tokens) if case.bounded else None

    def run(x_SD: Tensor) -> Tensor:
        first = ExpertRows(x_SD, rows.weight_SK, rows.slot_SK, rows.adapter_S1)
        out = torch.zeros_like(x_SD)
        all_to_all.bound = bound
        sent = [all_to_all.dispatch(layer, first, NUM_HELD) for layer in range(2 if overlapped else 1)]
        back = []
        for one in sent:
            received = one.wait()
            back.append(one.combine(given(received, position, everywhere=False)))
        for results in back:
            results.add_to(out)
        x_SD.fill_(-1)  # layers may overwrite their input
        return out

    expected = given(rows, position, everywhere=True) * (2 if overlapped else 1)
    return run_complete_pass(all_to_all, run, rows.x_SD.clone(), repeatable=case.repeatable), expected


def overlap_halves(all_to_all: DeepEpAllToAll, position: RankPosition) -> list[int]:
    """Run passes in two halves of which the second needs a larger buffer; return the open buffers after each."""
    num_open = []
    for number, bounds in enumerate(((128, 129), (256, 257), (3, 4))):
        all_to_all.begin_pass(repeatable=True, repeats=False)
        sent, halves = [], [rows_of(Case((bound,)), number, position.rank, position) for bound in bounds]
        for rows, bound in zip(halves, bounds, strict=True):
            all_to_all.bound = bound
            sent.append(all_to_all.dispatch(0, rows, NUM_HELD))
        for rows, one in zip(halves, sent, strict=True):
            out, received = torch.zeros_like(rows.x_SD), one.wait()
            one.combine(given(received, position, everywhere=False)).add_to(out)
            torch.testing.assert_close(out, given(rows, position, everywhere=True), rtol=1e-5, atol=1e-5)
        num_open.append(FakeElasticBuffer.num_open)
    return num_open


def main() -> None:
    implementation, layout, rank, store = sys.argv[1:]
    torch.set_num_threads(1)
    dp, tp, ep = map(int, layout.split("x"))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=dp * tp)
    handle = dist.group.WORLD
    assert handle is not None
    position = RankPosition(Layout(tp=tp, dp=dp, ep=ep), int(rank))
    exchange = CountingExchange(handle)
    all_to_all: ExpertAllToAll
    if implementation == "torch":
        all_to_all = ExactAllToAll(exchange, position)
    elif implementation == "torch-padded":
        all_to_all = PaddedAllToAll(exchange, position)
    else:
        all_to_all = DeepEpAllToAll(exchange, FakeElasticBuffer)
    num_open = overlap_halves(all_to_all, position) if isinstance(all_to_all, DeepEpAllToAll) else []
    counts: list[dict[str, int]] = []
    for number, case in enumerate(CASES):
        if implementation == "fake-deepep" and (case.adapters or not case.bounded):
            continue
        for overlapped in (False, True) if number < 6 else (False,):
            exchange.calls.clear()
            ours, expected = one_pass(all_to_all, case, number, position, overlapped=overlapped)
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        counts.append(dict(exchange.calls))
    repeats = all_to_all.repeats_total if isinstance(all_to_all, PaddedAllToAll) else 0
    sys.stdout.write(json.dumps({"counts": counts, "repeats": repeats, "num_open": num_open}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
