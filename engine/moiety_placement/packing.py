"""Greedy parts of a plan: the number of replicas of each expert, and the pack of each item.

After DeepSeek's EPLB (https://github.com/deepseek-ai/EPLB), for all layers at once. X is any number of independent
rows.
"""

from __future__ import annotations

import numpy as np

from moiety_placement.placement_table import Floats, Ints


def pack(weight_XI: Floats, num_packs: int) -> Ints:
    """Return [X, packs, I / packs]: the items of each pack, of equal number.

    The heaviest remaining item goes to the lightest pack with a free slot.
    """
    num_rows, num_items = weight_XI.shape
    size = num_items // num_packs
    order_XI = np.argsort(-weight_XI, axis=1, kind="stable")
    sorted_XI = np.take_along_axis(weight_XI, order_XI, axis=1)
    filled, loads = np.zeros(num_rows * num_packs, dtype=np.int64), np.zeros(num_rows * num_packs)
    loads_XP = loads.reshape(num_rows, num_packs)
    first_X = np.arange(num_rows) * num_packs
    places_XI = np.empty((num_rows, num_items), dtype=np.int64)
    for item in range(num_items):
        at_X = loads_XP.argmin(axis=1) + first_X
        taken_X = filled[at_X]
        places_XI[:, item] = at_X * size + taken_X
        filled[at_X] = taken_X + 1
        loads[at_X] += np.where(taken_X == size - 1, np.inf, sorted_XI[:, item])
    packed = np.empty(num_rows * num_items, dtype=np.int64)
    packed[places_XI] = order_XI
    return packed.reshape(num_rows, num_packs, size)


def replicate(load_XE: Floats, num_replicas: int, head_start: float = 0.0) -> Ints:
    """Return [X, E]: replicas of each expert.

    One more replica goes, repeatedly, to the largest load ÷ (replicas + `head_start`). With 0, the largest load of a
    replica is as small as possible. With more, the hottest experts get fewer and the warm ones more, which packs better
    where a rank has many slots (as divisor methods of apportionment differ).
    """
    rows = np.arange(len(load_XE))
    counts_XE = np.ones(load_XE.shape, dtype=np.int64)
    claims_XE = load_XE / (1 + head_start)
    for _ in range(num_replicas - load_XE.shape[1]):
        hottest_X = claims_XE.argmax(axis=1)
        counts_XE[rows, hottest_X] += 1
        claims_XE[rows, hottest_X] = load_XE[rows, hottest_X] / (counts_XE[rows, hottest_X] + head_start)
    return counts_XE
