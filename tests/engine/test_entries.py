"""The heap of queued sequences skips invalid entries, and they do not accumulate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moiety_engine.scheduling.queues.entry_heap import EntryHeap


@given(st.lists(st.tuples(st.sampled_from(["push", "push", "void", "pop", "until", "rekey"]), st.integers(0, 9))))
def test_it_gives_the_valid_entries_by_key_and_then_by_arrival(actions: list[tuple[str, int]]) -> None:
    heap = EntryHeap()
    valid: dict[int, tuple[int, Any]] = {}  # by order: (key, who)
    for number, (action, value) in enumerate(actions):
        best = min(((key, order) for order, (key, _) in valid.items()), default=None)
        if action == "push":
            who: Any = SimpleNamespace(request=SimpleNamespace(order=number), entry=0)
            heap.push(value, who)
            valid[number] = (value, who)
        elif action == "void" and valid:
            order = list(valid)[value % len(valid)]
            valid.pop(order)[1].entry += 1
        elif action == "pop":
            popped = heap.pop()
            assert (popped is None) == (best is None)
            if best is not None:
                assert popped is valid.pop(best[1])[1]
        elif action == "until":
            popped = heap.pop_until(value)
            assert (popped is None) == (best is None or best[0] > value)
            if popped is not None:
                del valid[popped.request.order]
        elif action == "rekey" and heap.first() is not None and best is not None:
            heap.rekey_first(value)
            valid[best[1]] = (value, valid[best[1]][1])
        first = heap.first()
        assert (first is None) == (not valid)


def test_void_entries_do_not_pile_up() -> None:
    heap = EntryHeap()
    who: Any = SimpleNamespace(request=SimpleNamespace(order=0), entry=0)
    for number in range(10_000):
        who.entry += 1
        heap.push(10_000 - number, who)
    assert len(heap.entries) <= 128
    assert heap.pop() is who
    assert heap.pop() is None
