"""Block tables of decodes, kept from step to step, equal those that are built anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moiety_engine.runner.block_tables import BlockTables

BLOCK_SIZE = 2


class Blocks:
    """What block tables read of a sequence. A list of blocks grows; after a preemption there is another list."""

    def __init__(self, blocks: list[int]) -> None:
        self.kv = SimpleNamespace(blocks=blocks, further_blocks=())


@given(st.data())
def test_tables_of_decodes_follow_sequences_that_grow_come_and_go(data: st.DataObject) -> None:
    tables, blocks = BlockTables(), iter(range(100_000))
    everyone: list[Any] = [Blocks([next(blocks)]) for _ in range(4)]
    for _ in range(data.draw(st.integers(1, 12))):
        for one in everyone:
            change = data.draw(st.sampled_from(["none", "grow", "replace"]))
            if change == "grow":
                one.kv.blocks += [next(blocks) for _ in range(data.draw(st.integers(1, 40)))]
            elif change == "replace":
                one.kv.blocks = [next(blocks), next(blocks)]
        chosen = data.draw(st.lists(st.sampled_from(everyone), min_size=1, unique_by=id))
        positions = [len(one.kv.blocks) * BLOCK_SIZE - 1 for one in chosen]
        table = tables.of_decodes(chosen, positions, BLOCK_SIZE)
        width = max(len(one.kv.blocks) for one in chosen)
        expected = [one.kv.blocks + [0] * (width - len(one.kv.blocks)) for one in chosen]
        np.testing.assert_array_equal(table.block_table_SB, expected)
        assert table.slots_T.tolist() == [one.kv.blocks[-1] * BLOCK_SIZE + BLOCK_SIZE - 1 for one in chosen]
