"""Assignment of tokens to expert replicas, chosen for each step from the step's token counts.

A quota is the number of tokens of each slot. It is a pure function of the counts over all ranks, so ranks that know
these agree without another message. Where ranks are bound by arithmetic (prefill), `spread` balances their tokens;
where they are bound by reading weights (decode), `concentrate` balances their active experts, after METRO (arXiv
2512.09277).

Dimension besides the package's: M experts of a layer that have a choice. The rank of a slot is slot // S.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moiety_placement.errors import BadLoad
from moiety_placement.placement_table import EMPTY, Floats, Ints, Placement, check_load, sum_by_rank

_ROUNDS = 12  # of descent; later rounds change less than a token


def spread(placement: Placement, counts_LE: ArrayLike) -> Ints:
    """Return [L, R]: quotas that balance the ranks' tokens.

    The largest rank has no more than if every expert's tokens were split evenly over its ranks, except for rounding:
    one token per slot. Raises BadLoad if counts are not whole numbers, or tokens have an expert without a replica.
    """
    counts_LE = _check_counts(placement, counts_LE)
    open_ = _Open.of(placement, counts_LE)
    quota_LMC = _balance(open_, open_.loads_without_choice(counts_LE))
    upto_LMC = np.rint(np.cumsum(quota_LMC, axis=2)).astype(np.int64)  # round the sums, so that no token is lost
    return open_.quotas(counts_LE, np.diff(upto_LMC, axis=2, prepend=0))


def concentrate(placement: Placement, counts_LE: ArrayLike) -> Ints:
    """Return [L, R]: quotas that give all tokens of an expert to one replica and balance active experts.

    So no weight is read twice. Experts with the fewest replicas are assigned first, each to the rank with the fewest
    active experts, and among these with the fewest tokens; then each is assigned once more, given the others. Raises as
    `spread`.
    """
    counts_LE = _check_counts(placement, counts_LE)
    open_ = _Open.of(placement, counts_LE)
    layers, layers_L1 = np.arange(placement.num_layers), np.arange(placement.num_layers)[:, None]
    total_L1 = counts_LE.sum(axis=1, keepdims=True) + 1
    weight_LM = (open_.tokens_LM > 0) + open_.tokens_LM / total_L1  # tokens break ties
    load_LG = open_.loads_without_choice((counts_LE > 0) + counts_LE / total_L1)
    place_LM = np.zeros_like(open_.tokens_LM)
    order_LM = np.lexsort((-open_.tokens_LM, open_.may_LMC.sum(axis=2)), axis=1)
    for sweep in range(2):
        for at_L in order_LM.T:
            ranks_LC, weight_L = open_.ranks_LMC[layers, at_L], weight_LM[layers, at_L]
            if sweep:
                load_LG[layers, ranks_LC[layers, place_LM[layers, at_L]]] -= weight_L
            load_LC = np.where(open_.may_LMC[layers, at_L], load_LG[layers_L1, ranks_LC], np.inf)
            place_LM[layers, at_L] = chosen_L = load_LC.argmin(axis=1)
            load_LG[layers, ranks_LC[layers, chosen_L]] += weight_L
    chosen_LMC = place_LM[:, :, None] == np.arange(open_.may_LMC.shape[2])
    return open_.quotas(counts_LE, chosen_LMC * open_.tokens_LM[:, :, None])


def distribute(
    placement: Placement, layer: int, expert_TK: Ints, quota_R: Ints, before_E: ArrayLike | None = None
) -> Ints:
    """Return [T, K]: the slot that computes each pair of a token and an expert.

    An expert's pairs go, in order, to its replicas according to the quota. `before_E`: pairs of each expert that other
    ranks assign before these, where the quota covers several ranks. Raises BadLoad if there are more pairs than the
    quota has.
    """
    slots_R, num_experts = placement.physical_to_logical_LR[layer], placement.num_experts
    experts = expert_TK.ravel()
    if quota_R.shape != slots_R.shape or (experts.size and not 0 <= experts.min() <= experts.max() < num_experts):
        raise BadLoad(f"a quota is for {len(slots_R)} slots, and experts are 0 to {num_experts - 1}")
    order_R = np.argsort(np.where(slots_R == EMPTY, num_experts, slots_R), kind="stable")
    upto_R = np.cumsum(quota_R[order_R])
    tokens_E = np.bincount(slots_R[slots_R >= 0], quota_R[slots_R >= 0], num_experts).astype(np.int64)
    first_E = np.cumsum(tokens_E) - tokens_E
    pairs_E = np.bincount(experts, minlength=num_experts)
    earlier_E = np.zeros(num_experts, dtype=np.int64) if before_E is None else np.asarray(before_E)
    if (over_E := earlier_E + pairs_E > tokens_E).any():
        expert = int(np.argmax(over_E))
        raise BadLoad(
            f"expert {expert} has {earlier_E[expert] + pairs_E[expert]} tokens, but its quota is "
            f"{tokens_E[expert]}: compute the quota from the counts of all tokens that are assigned"
        )
    by_expert = np.argsort(experts, kind="stable")
    sorted_ = experts[by_expert]
    nth = np.arange(len(experts)) - (np.cumsum(pairs_E) - pairs_E)[sorted_]
    slots = np.empty_like(experts)
    slots[by_expert] = order_R[np.searchsorted(upto_R, (first_E + earlier_E)[sorted_] + nth, side="right")]
    return slots.reshape(expert_TK.shape)


@dataclass(frozen=True, eq=False)
class _Open:
    """Experts that have tokens and replicas on more than one rank.

    Rows of layers with fewer are padded with experts of 0 tokens. `may_LMC`: allowed targets of tokens, one slot per
    rank.
    """

    placement: Placement
    open_LE: NDArray[np.bool_]
    tokens_LM: Ints
    slots_LMC: Ints
    ranks_LMC: Ints
    may_LMC: NDArray[np.bool_]

    @classmethod
    def of(cls, placement: Placement, counts_LE: Ints) -> _Open:
        open_LE = (counts_LE > 0) & (placement.counts_LE > 1)
        most = int(open_LE.sum(axis=1).max(initial=0))
        expert_LM = np.argsort(~open_LE, axis=1, kind="stable")[:, :most]
        layers_L1 = np.arange(placement.num_layers)[:, None]
        tokens_LM = np.where(open_LE, counts_LE, 0)[layers_L1, expert_LM]
        slots_LMC = placement.logical_to_physical_LEC[layers_L1, expert_LM]
        ranks_LMC = slots_LMC // (placement.num_slots // placement.num_ranks)
        again_LMCC = np.tril(ranks_LMC[:, :, :, None] == ranks_LMC[:, :, None, :], -1)
        may_LMC = (slots_LMC != EMPTY) & ~again_LMCC.any(axis=3)
        return cls(placement, open_LE, tokens_LM, slots_LMC, ranks_LMC, may_LMC)

    def loads_without_choice(self, load_LE: Floats | Ints) -> Floats:
        """Return [L, G]: the load of each rank from experts without a choice."""
        return sum_by_rank(self._of_first_slot(load_LE), self.placement.num_ranks)

    def quotas(self, counts_LE: Ints, quota_LMC: Ints) -> Ints:
        """Return [L, R]: the quotas of all slots."""
        quota_LR = self._of_first_slot(counts_LE).astype(np.int64)
        layers, rows, places = np.nonzero(quota_LMC)
        quota_LR[layers, self.slots_LMC[layers, rows, places]] = quota_LMC[layers, rows, places]
        return quota_LR

    def _of_first_slot(self, load_LE: Floats | Ints) -> Floats:
        """Return [L, R]: the load of experts without a choice, at their first slot."""
        fixed_LE = np.where(self.open_LE, 0, load_LE)
        load_LR = np.zeros((len(load_LE), self.placement.num_slots))
        layers, experts = np.nonzero(fixed_LE)
        load_LR[layers, self.placement.logical_to_physical_LEC[layers, experts, 0]] = fixed_LE[layers, experts]
        return load_LR

    def loads_by_choice(self, quota_LMC: Floats) -> Floats:
        """Return [L, G]: the load of each rank from the other experts."""
        num_layers, num_ranks = len(quota_LMC), self.placement.num_ranks
        flat = np.arange(num_layers)[:, None, None] * num_ranks + self.ranks_LMC
        sums = np.bincount(flat[self.may_LMC], quota_LMC[self.may_LMC], num_layers * num_ranks)
        return sums.astype(np.float64, copy=False).reshape(num_layers, num_ranks)


def _balance(open_: _Open, fixed_LG: Floats) -> Floats:
    """Return [L, M, C]: the best quotas of a descent on the sum of the squared rank loads.

    Every expert proposes to fill its ranks to one level, given the current quotas of the others; all move towards their
    proposals together as far as it helps.
    """
    tokens_LM1 = open_.tokens_LM[:, :, None]
    quota_LMC: Floats = open_.may_LMC * (tokens_LM1 / np.maximum(open_.may_LMC.sum(axis=2, keepdims=True), 1))
    load_LG = fixed_LG + open_.loads_by_choice(quota_LMC)
    best_LMC, largest_L = quota_LMC.copy(), load_LG.max(axis=1)
    layers_L11 = np.arange(len(load_LG))[:, None, None]
    for _ in range(_ROUNDS):
        others_LMC = np.where(open_.may_LMC, load_LG[layers_L11, open_.ranks_LMC] - quota_LMC, np.inf)
        change_LMC = _fill(others_LMC, tokens_LM1) - quota_LMC
        change_LG = open_.loads_by_choice(change_LMC)
        squares_L = (change_LG**2).sum(axis=1)
        downhill_L = np.maximum(-(load_LG * change_LG).sum(axis=1), 0)
        far_L = np.divide(downhill_L, squares_L, out=np.zeros_like(squares_L), where=squares_L > 0).clip(0, 1)
        quota_LMC = quota_LMC + far_L[:, None, None] * change_LMC
        load_LG = load_LG + far_L[:, None] * change_LG
        better_L = load_LG.max(axis=1) < largest_L
        best_LMC[better_L] = quota_LMC[better_L]
        largest_L = np.minimum(largest_L, load_LG.max(axis=1))
    return best_LMC


def _fill(level_LMC: Floats, tokens_LM1: Ints) -> Floats:
    """Return [L, M, C]: the tokens that fill the given levels up to one common level (water filling)."""
    rising_LMC = np.sort(level_LMC, axis=2)
    finite_LMC = np.where(np.isfinite(rising_LMC), rising_LMC, 0.0)
    upto_LMC = (tokens_LM1 + np.cumsum(finite_LMC, axis=2)) / np.arange(1, rising_LMC.shape[2] + 1)
    wet_LM1 = (upto_LMC > rising_LMC).sum(axis=2, keepdims=True)
    surface_LM1 = np.take_along_axis(upto_LMC, np.maximum(wet_LM1 - 1, 0), axis=2)
    return np.maximum(surface_LM1 - level_LMC, 0.0)


def _check_counts(placement: Placement, counts_LE: ArrayLike) -> Ints:
    loads_LE = check_load(counts_LE, (placement.num_layers, placement.num_experts))
    counts = loads_LE.astype(np.int64)
    if (counts != loads_LE).any():
        raise BadLoad("token counts must be integers")
    if (nowhere := (counts > 0) & (placement.counts_LE == 0)).any():
        layer, expert = np.argwhere(nowhere)[0].tolist()
        raise BadLoad(f"tokens of layer {layer} need expert {expert}, which has no slot: rebalance to place it")
    return counts
