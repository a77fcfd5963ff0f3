"""Invariants of how slots are shared among batches, and of the rate at which one batch runs."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.batches.claims import OpenBatch
from moiety_platform.batches.input_lines import Splitter
from moiety_platform.batches.pacing import LINES_PER_ROUND, BatchPacing
from moiety_platform.batches.sharing import next_batch, share

MOST = 32


def batch(name: str, tenant: Any) -> Any:
    return OpenBatch(name, tenant, "key", "/v1/completions", "file", "in_progress", is_due=False, is_free=True)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), min_size=1, max_size=8))
def test_free_places_go_evenly_to_the_tenants_that_can_use_them(asked: Any) -> None:
    """`asked` is (tenant, lines) of each batch, oldest first."""
    left = {f"b{number}": lines for number, (_, lines) in enumerate(asked)}
    candidates = [batch(f"b{number}", str(tenant)) for number, (tenant, _) in enumerate(asked)]
    running: Counter[Any] = Counter()
    free = MOST
    while free and (chosen := next_batch(candidates, running)) is not None:
        wanted = share(free, candidates, running, chosen.tenant_id)
        assert 1 <= wanted <= free
        got = min(wanted, left[chosen.id])
        left[chosen.id] -= got
        free -= got
        running[chosen.tenant_id] += got
        if got < wanted:
            candidates.remove(chosen)
    total = sum(lines for _, lines in asked)
    wanted_by: Counter[Any] = Counter()
    for tenant, lines in asked:
        wanted_by[str(tenant)] += lines
    assert sum(running.values()) == min(MOST, total)
    for tenant, lines in wanted_by.items():
        if running[tenant] < lines:  # it would have liked more, so nobody has more than one place beyond it
            assert all(count <= running[tenant] + 1 for count in running.values())


@given(st.integers(1, MOST), st.integers(0, 400))
def test_a_batch_comes_to_use_what_its_limit_leaves(limit: Any, num_rounds: Any) -> None:
    """A limit that lets so many lines run at a time, and a worker that keeps to its pace."""
    pace, running, now_s, tried_in_vain = BatchPacing.full(MOST), 0, 0.0, 0
    for _ in range(num_rounds):
        now_s += 1.0
        begun = pace.may_begin(running, now_s)
        refused = max(0, running + begun - limit)
        running += begun - refused
        for _ in range(refused):
            pace.refused(by_limit=True, num_running=running, wait_s=0.5, now_s=now_s)
            tried_in_vain += 1
        assert 1 <= pace.places <= MOST
        if running:
            running -= 1
            pace.answered(now_s)
    if num_rounds == 400:
        assert pace.places >= min(limit, MOST) - 1
    assert tried_in_vain <= MOST + num_rounds * LINES_PER_ROUND


def test_a_pause_lasts_and_grows_only_with_refusals_after_it() -> None:
    pace = BatchPacing.full(8)
    pace.refused(by_limit=False, num_running=0, wait_s=2.0, now_s=10.0)
    pace.refused(by_limit=False, num_running=0, wait_s=9.0, now_s=10.1)
    assert (pace.num_refusals, pace.may_begin(0, 11.9), pace.may_begin(0, 12.0)) == (1, 0, 8)
    pace.answered(12.1)
    assert pace.num_refusals == 0


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=6), st.integers(1, 20))
def test_lines_are_the_same_however_the_file_is_cut_into_pieces(content: Any, cuts: Any, longest: Any) -> None:
    content = content.replace(b"\x00", b"\n")
    edges = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    splitter = Splitter(longest)
    lines = [line for first, last in pairwise(edges) for line in splitter.take(content[first:last])]
    lines += splitter.finish()
    expected = [(n, part) for n, part in enumerate(content.split(b"\n"), 1) if part.strip() or len(part) > longest]
    assert [line.number for line in lines] == [number for number, _ in expected]
    for line, (_, part) in zip(lines, expected, strict=True):
        assert line.text == (part if len(part) <= longest else None)
        assert content[line.start : line.start + len(part)] == part
