"""Placement of expert replicas by class: the best class's steps with and without `--expert-rank-weights`.

    python benchmarks/class_placement.py [--steps 400]      # simulated
    python benchmarks/class_placement.py --real             # on ranks in real processes (class_placement_ranks.py)

Each part keeps the figures of the other one in the result file.

Simulated: in the shape of DeepSeek-V3 (256 experts, 288 slots, top-8) on 32 ranks, with a few of its layers. Two
classes prefer other experts (Zipf's law, independent orders); the best class has a tenth of the tokens. The engine's
own balancer places experts by the load of an interval, with the weight of the best class's tokens as given; 1 is the
ablation. Then steps are drawn: of the best class alone, as when its TPOT makes other classes take turns, and of both
classes in the proportion of their tokens. An expert's tokens are spread over its replicas as in the engine, and a
layer takes a constant time plus that of its most loaded rank. The SLO is a step's time: what a perfectly balanced
step takes, times a factor.

Real: a random Qwen3-MoE on two and four ranks over gloo, with a thread each. Streams of the best class and of another
one run until the engine has rebalanced once. Then steps of the best class alone and of all streams are measured: their
time, the processor time of the busiest rank, and the rows and experts of the most loaded rank, which the engine's own
choice of replicas gives for the counted picks. Medians are over checkpoints with other random weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import numpy as np
from class_placement_ranks import measured
from on_checkpoint import loaded_run, make_parser, write_report

from moiety_engine.moe.balancer import Balancer
from moiety_placement.placement_planner import plan
from moiety_placement.placement_table import Ints, Placement, balancedness
from moiety_placement.replicas import spread

LAYERS, EXPERTS, SLOTS, RANKS, TOP_K = 8, 256, 288, 32, 8
EVERY_S, MOVE_COST = 60.0, 0.006
WEIGHTS = (1, 2, 4, 8, 16)
EXPONENTS = (0.4, 0.8, 1.2)
INTERVAL_TOKENS, BEST_PART = 200_000, 0.1
BEST_TOKENS, ALL_TOKENS = 256, 2560  # of a step
CONSTANT_ROWS = 16  # a layer's constant time, in rows of a rank
SLO_FACTOR = 1.5


def main() -> None:
    parser = make_parser(__doc__, "class_placement.json")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--real", action="store_true", help="measure on ranks in real processes")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of these ranks")
    options = parser.parse_args()
    before = json.loads(options.output.read_text()) if options.output.exists() else {}
    if options.real:
        write_report(before | {"real": loaded_run(options) | measured(options)}, options.output)
        return
    report = loaded_run(options) | {
        "cases": [
            case | {"exponent": exponent, "weight": weight}
            for exponent in EXPONENTS
            for weight, case in cases(exponent, options).items()
        ]
    }
    write_report(report | {"real": before["real"]} if "real" in before else report, options.output)


def cases(exponent: float, options: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """Return the figures by weight, means over seeds."""
    found: dict[int, list[dict[str, float]]] = {weight: [] for weight in WEIGHTS}
    for seed in range(options.seeds):
        rng = np.random.default_rng(seed)
        best_LE, other_LE = popularity(rng, exponent), popularity(rng, exponent)
        counts = [
            np.stack([rng.multinomial(int(tokens * TOP_K), row_E) for row_E in each_LE])
            for each_LE, tokens in (
                (best_LE, BEST_PART * INTERVAL_TOKENS),
                (other_LE, (1 - BEST_PART) * INTERVAL_TOKENS),
            )
        ]
        for weight in WEIGHTS:
            placement = placed(counts[0], counts[1], weight)
            found[weight].append(
                {
                    f"best_{name}": value
                    for name, value in steps(placement, rng, best_LE, other_LE, options, 1.0).items()
                }
                | {
                    f"all_{name}": value
                    for name, value in steps(placement, rng, best_LE, other_LE, options, BEST_PART).items()
                }
                | {"balancedness_of_all": balancedness(placement, counts[0] + counts[1])}
            )
    return {
        weight: {name: round(statistics.mean(one[name] for one in ours), 4) for name in ours[0]}
        for weight, ours in found.items()
    }


def popularity(rng: np.random.Generator, exponent: float) -> np.ndarray:
    """Return the share of each expert in the picks of a class, [L, E]."""
    by_rank_E = np.arange(1, EXPERTS + 1) ** -exponent
    return np.stack([rng.permutation(by_rank_E / by_rank_E.sum()) for _ in range(LAYERS)])


def placed(best_LE: Ints, other_LE: Ints, weight: int) -> Placement:
    """Return the placement after one interval, from one planned for an even load."""
    even_LE = np.ones_like(best_LE)
    first = plan(even_LE, num_replicas=SLOTS, num_groups=1, num_nodes=1, num_ranks=RANKS)
    balancer = Balancer(first, every_s=EVERY_S, most_writes=4, now_s=0.0)
    balancer.count(best_LE + other_LE, weight * best_LE + other_LE)
    assert balancer.evaluate(EVERY_S, MOVE_COST)
    while balancer.is_moving:
        balancer.next_move()
    return balancer.placement


def steps(
    placement: Placement,
    rng: np.random.Generator,
    best_LE: np.ndarray,
    other_LE: np.ndarray,
    options: argparse.Namespace,
    best_part: float,
) -> dict[str, float]:
    """Return the times of steps with this part of the best class, relative to a perfectly balanced step."""
    tokens = BEST_TOKENS if best_part == 1.0 else ALL_TOKENS
    num_best = round(tokens * best_part)
    balanced = LAYERS * (CONSTANT_ROWS + tokens * TOP_K / RANKS)
    times = []
    for _ in range(options.steps):
        counts_LE = np.stack([
            rng.multinomial(num_best * TOP_K, best_E) + rng.multinomial((tokens - num_best) * TOP_K, other_E)
            for best_E, other_E in zip(best_LE, other_LE, strict=True)
        ])  # fmt: skip
        quota_LR = spread(placement, counts_LE)
        rows = np.stack([np.bincount(placement.rank_R, weights=quota_R, minlength=RANKS) for quota_R in quota_LR])
        times.append(float(LAYERS * CONSTANT_ROWS + rows.max(axis=1).sum()) / balanced)
    times.sort()
    return {
        "step_p50": statistics.median(times),
        "step_p99": times[int(0.99 * len(times))],
        "slo_attained": statistics.mean(time <= SLO_FACTOR for time in times),
    }


if __name__ == "__main__":
    main()
