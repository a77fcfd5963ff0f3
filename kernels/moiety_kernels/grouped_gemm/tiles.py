"""Which tiles an expert layer's products are computed in: the candidates for a GPU, and the one that a model of their
cost prefers. Knows no tensors and needs no GPU.

The host knows how many rows there are, not whose; what depends on that (how many tiles each expert has, how full its
last one is) is settled on the device. So a choice is made for the rows per expert that even routing would give.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from moiety_kernels.gpu.targets import DeviceModel

LATENCY_S = 1.0e-6  # from asking for memory to having it, so bandwidth × this must be on its way
FILL_S = 2.0e-6  # a tile's indices and first operands, which nothing hides unless the loops are flattened
LAUNCH_S = 2.5e-6  # of one kernel in a graph: its start, its first bytes and its last
L2_OVER_MEMORY = 1.7  # how much faster than memory L2 hands out what it holds
LANES_PER_S = 128 * 1.7e9  # of one multiprocessor
SM_BYTES_PER_S = 64 * 1.7e9  # that L2 hands one multiprocessor
WGMMA_ROWS = 64  # that a warpgroup's product has at least
OVERLAP = 4  # computing, copying and memory hide each other so well that the sum of their powers counts
EIGHT_ROWS = 64  # an expert, below which memory is the bound, and rounding rows would gain nothing
_MANY_ROWS = 512  # an expert; from here on how full last tiles are is as good as uniform
STORED_BYTES = 32 * 1024  # of a tile that the compiler rearranges at a time, through shared memory, to store it
INVARIANT_BK = 64  # the steps in which a row is summed where its bits must not depend on the choice
MOST_ROW_TOKENS = 8  # whose rows are computed one by one, at most; more where tiles have to widen four bits
MOST_ROW_TOKENS_OF_FOUR_BITS = 16
BLOCK_SCALED_ROWS = 64  # of a tile, at most, where blocks have scales: sums of a step are kept beside those of all
MMA_SHARE = 0.85  # of the rate of large products that a loop like ours keeps, when nothing else binds it


Weights = Literal["wide", "int8", "fp8", "int4", "mxfp4"]
Scales = Literal["none", "row", "block", "group"]
Four = Literal["", "int4", "mxfp4"]
# Instructions a weight costs before a tensor core takes it.
WIDENING = {"wide": 0.0, "int8": 1.5, "fp8": 1.5, "int4": 4.0, "mxfp4": 8.0}
# And where none takes it: those of the loop over a row's steps for Hopper, by its weights.
LANE_OPERATIONS = {"wide": 5.8, "int8": 5.9, "fp8": 5.6, "int4": 4.4, "mxfp4": 5.4}
BLOCK_LANE_OPERATIONS = 6.5  # of float8 whose scales are of blocks


@dataclass(frozen=True, slots=True)
class Problem:
    """One expert layer's work in one step."""

    num_experts: int
    top_k: int
    width: int  # D, of the model
    hidden: int  # F, of an expert
    tokens: int
    element_bytes: int = 2  # of activations, and of wide weights
    invariant: bool = False  # a row's bits must not depend on what other rows are there
    weights: Weights = "wide"
    scales: Scales = "none"  # what narrow weights have, a row, a block of 128 × 128, or (of 4 bits) 32 of a row

    @property
    def rows(self) -> int:
        """Token–expert pairs."""
        return self.tokens * self.top_k

    @property
    def weight_bytes(self) -> float:
        """Of one weight, and its share of the scale that 32 have."""
        if self.scales == "group":
            return 0.5 + 4 / 32
        return self.element_bytes if self.weights == "wide" else 1

    @property
    def active_experts(self) -> float:
        """Experts that get a row, expected of even routing. A token never chooses one twice."""
        missed = (1.0 - self.top_k / self.num_experts) ** self.tokens
        return self.num_experts * (1.0 - missed)


@dataclass(frozen=True, slots=True)
class Block:
    """How one of the two products is cut: a tile's rows by BN columns of the result at a time (BN of gate and up)."""

    BN: int
    BK: int
    warps: int
    stages: int
    per_sm: int = 1  # programs that share a multiprocessor; of rows, as many as registers and shared memory allow
    flat: bool = False  # tiles and steps as one loop: the next tile's operands are fetched while one is stored


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Both products of a layer; they share the list of tiles, hence BM.

    BM 1 is the way of few tokens: a row a program, weights straight into registers, no grouping and no combining.
    """

    BM: int
    up: Block
    down: Block
    swap_ab: bool = False  # weights are the 64 rows of a tensor core's product, tokens columns, of which few will do
    four: Four = ""  # weights are of four bits, a byte's two numbers half a step apart
    eight: bool = False  # rows are rounded to float8 like weights, and multiplied so
    tail: int = 0  # tiles of at most so many rows are computed as such of this height; not with flat loops

    @property
    def name(self) -> str:
        kind = f"{'s' if self.swap_ab else ''}{'e' if self.eight else ''}{self.four}"
        tile = f"{self.BM}{kind}{f't{self.tail}' if self.tail else ''}"
        return f"{'rows' if self.BM == 1 else tile} up {_block_name(self.up)} down {_block_name(self.down)}"


def _block_name(block: Block) -> str:
    return f"{block.BN}x{block.BK}w{block.warps}s{block.stages}{'f' if block.flat else ''}"


ROWS = TileConfig(1, Block(4, 512, 4, 3, 6), Block(4, 512, 2, 5, 11))
ROWS_EIGHT = TileConfig(1, Block(4, 512, 4, 3, 6), Block(8, 512, 2, 8, 6))
ROWS_OF_BLOCKS = TileConfig(1, Block(4, 512, 4, 3, 5), Block(8, 512, 2, 8, 6))  # whose scales take registers
HOPPER = (
    ROWS,
    TileConfig(16, Block(64, 64, 4, 6, 2, flat=True), Block(128, 64, 4, 6, 2, flat=True), swap_ab=True),
    TileConfig(16, Block(64, 128, 4, 3, 2, flat=True), Block(128, 128, 4, 3, 2, flat=True), swap_ab=True),
    TileConfig(32, Block(64, 64, 4, 5, 2, flat=True), Block(128, 64, 4, 5, 2, flat=True), swap_ab=True),
    TileConfig(64, Block(64, 64, 4, 4, 2, flat=True), Block(128, 64, 4, 4, 2, flat=True), swap_ab=True),
    TileConfig(128, Block(64, 64, 4, 3, 2), Block(128, 64, 4, 3, 2)),
    TileConfig(128, Block(128, 64, 8, 4), Block(256, 64, 8, 4, flat=True), tail=64),
    TileConfig(128, Block(128, 64, 8, 4, flat=True), Block(256, 64, 8, 4, flat=True)),
)
NARROW = (  # weights of 8 bits, widened in registers, from where only swapped products take them
    ROWS_EIGHT,
    TileConfig(16, Block(64, 64, 4, 8, 2, flat=True), Block(128, 64, 4, 8, 2, flat=True), swap_ab=True),
    TileConfig(64, Block(64, 64, 4, 5, 2, flat=True), Block(128, 64, 4, 5, 2, flat=True), swap_ab=True),
    TileConfig(128, Block(128, 64, 8, 5), Block(128, 64, 8, 5), swap_ab=True),  # too many sums for blocks' scales
)
FOUR = (  # bits, widened in registers
    TileConfig(16, Block(64, 64, 4, 8, 2, flat=True), Block(128, 64, 4, 8, 2, flat=True), swap_ab=True),
    TileConfig(64, Block(64, 64, 4, 6, 2, flat=True), Block(128, 64, 4, 6, 2, flat=True), swap_ab=True),
    TileConfig(128, Block(128, 64, 8, 5), Block(128, 64, 8, 5), swap_ab=True),
)
ROWS_FOUR = TileConfig(1, Block(8, 1024, 4, 3, 5), Block(8, 1024, 2, 6, 5))
EIGHT = (  # float8 by float8: a step is the columns that share a row's scale, 64 of the second product, as many as
    # the first one's tiles have; with sums of a step beside those of all, more would not fit in registers
    TileConfig(64, Block(64, 128, 4, 4, 2, flat=True), Block(128, 64, 4, 6, 2, flat=True), eight=True),
    TileConfig(128, Block(64, 128, 8, 6), Block(128, 64, 8, 8), eight=True),
    TileConfig(128, Block(64, 128, 8, 5, flat=True), Block(128, 64, 8, 8, flat=True), eight=True),
)
PORTABLE = (  # no copy engine, less shared memory
    ROWS,
    TileConfig(16, Block(64, 64, 4, 3), Block(128, 64, 4, 3), swap_ab=True),
    TileConfig(64, Block(64, 64, 4, 2), Block(128, 64, 4, 2)),
    TileConfig(128, Block(64, 64, 8, 2), Block(128, 64, 8, 2)),
)
SINGLE = (  # float32, without tensor cores: for exactness, not for speed
    TileConfig(16, Block(32, 16, 4, 2), Block(32, 16, 4, 2)),
    TileConfig(64, Block(32, 16, 8, 2), Block(64, 16, 8, 2)),
)


def stage_bytes(config: TileConfig, block: Block, problem: Problem, *, gated: bool) -> int:
    """What one step of a tile reads of rows and of weights."""
    weights = block.BN * (2 if gated else 1)
    return round((config.BM * row_bytes(config, problem) + weights * problem.weight_bytes) * block.BK)


def row_bytes(config: TileConfig, problem: Problem) -> int:
    """Of one of a row's numbers as it is multiplied."""
    return 1 if config.eight else problem.element_bytes


def shared_bytes(config: TileConfig, block: Block, problem: Problem, *, gated: bool) -> int:
    """Shared memory of one program, at most: the stages, and where loops are flat the tile that is being stored."""
    stages = block.stages * stage_bytes(config, block, problem, gated=gated)
    stored = min(config.BM * block.BN * problem.element_bytes, STORED_BYTES)
    return (stages + stored if block.flat else max(stages, stored)) + 1024


def candidates(problem: Problem, device: DeviceModel) -> tuple[TileConfig, ...]:
    """What may be chosen for `problem`, never empty. Those for invariant results all sum in the same steps of BK."""
    return tuple(config for config in _configs(problem, device) if _takes(config, problem, device))


def _configs(problem: Problem, device: DeviceModel) -> tuple[TileConfig, ...]:
    if problem.element_bytes == 4:
        return SINGLE
    portable = device.target.backend != "cuda" or int(device.target.arch) < 90
    if problem.scales == "group":
        four: Four = "mxfp4" if problem.weights == "mxfp4" else "int4"
        tiles = PORTABLE[1:] if portable else FOUR
        return tuple(replace(config, four=four) for config in (ROWS_FOUR, *tiles))
    if portable:
        return PORTABLE
    if problem.weights == "wide":
        return HOPPER
    narrow = (ROWS_OF_BLOCKS, *NARROW[1:]) if problem.scales == "block" else NARROW
    return (*narrow, *EIGHT) if problem.weights == "fp8" and not problem.invariant else narrow


def _takes(config: TileConfig, problem: Problem, device: DeviceModel) -> bool:
    if config.BM == 1:
        most = MOST_ROW_TOKENS_OF_FOUR_BITS if config.four else MOST_ROW_TOKENS
        return problem.tokens <= most and not problem.invariant
    if config.eight and problem.rows < EIGHT_ROWS * problem.num_experts:
        return False
    if problem.scales == "block" and config.BM > BLOCK_SCALED_ROWS and not config.eight:
        return False
    blocks = (config.up, True), (config.down, False)
    return all(
        block.per_sm * shared_bytes(config, block, problem, gated=gated) <= device.target.max_shared_bytes
        and not (problem.invariant and problem.element_bytes == 2 and block.BK != INVARIANT_BK)
        for block, gated in blocks
    )


@functools.lru_cache(maxsize=4096)
def choose(problem: Problem, device: DeviceModel) -> TileConfig:
    """The candidate of the lowest predicted time."""
    return min(candidates(problem, device), key=lambda config: seconds(problem, config, device))


def seconds(problem: Problem, config: TileConfig, device: DeviceModel) -> float:
    """Predicted time of a layer from grouping to combining, with weights in memory and not in L2."""
    if config.BM == 1:
        return 2 * LAUNCH_S + sum(_rows_seconds(problem, config, device, gated=gated) for gated in (True, False))
    up = _product_seconds(problem, config, device, gated=True)
    down = _product_seconds(problem, config, device, gated=False)
    combined_bytes = (problem.rows + problem.tokens) * problem.width * problem.element_bytes
    rounded_bytes = problem.tokens * problem.width * (problem.element_bytes + 1) if config.eight else 0
    launches = 5 if config.eight else 4
    return launches * LAUNCH_S + up + down + (combined_bytes + rounded_bytes) / device.memory_bytes_per_s


def expected_tiles(problem: Problem, height: int) -> float:
    """Tiles of `height` rows under even routing: an expert's rows are as good as Poisson distributed."""
    mean = problem.rows / problem.num_experts
    if mean > _MANY_ROWS:
        return problem.num_experts * (mean / height + 0.5)
    chance, below, total = math.exp(-mean), 0.0, 0.0  # of n rows; of at most n rows
    for n in range(int(mean + 8 * math.sqrt(mean) + 10)):
        if n % height == 0:  # one more tile for whoever has more than n rows
            total += 1.0 - below - chance
        below += chance
        chance *= mean / (n + 1)
    return max(problem.active_experts, min(problem.num_experts * total, float(problem.rows)))


def _weight_bytes(problem: Problem) -> float:
    """Of one expert."""
    return 3.0 * problem.width * problem.hidden * problem.weight_bytes


def num_pieces(problem: Problem, config: TileConfig, *, gated: bool) -> float:
    """What one of the two products is cut into: blocks of columns of tiles, of pairs, or of tokens with all experts."""
    block, columns = (config.up, problem.hidden) if gated else (config.down, problem.width)
    if config.BM == 1:
        return (problem.rows if gated else problem.tokens) * math.ceil(columns / block.BN)
    return expected_tiles(problem, config.BM) * math.ceil(columns / block.BN)


def bytes_on_their_way(problem: Problem, config: TileConfig, device: DeviceModel, *, gated: bool) -> float:
    """What the programs of one of the two products that run at once have asked memory for, at a time."""
    block, inner = (config.up, problem.width) if gated else (config.down, problem.hidden)
    running = min(num_pieces(problem, config, gated=gated), device.num_sms * block.per_sm)
    step_bytes = stage_bytes(config, block, problem, gated=gated)
    if config.BM > 1:
        return running * (block.stages - 1) * step_bytes
    steps = math.ceil(inner / block.BK)
    ahead = min(block.stages - 1, steps if gated else steps * problem.top_k)
    return running * ahead * step_bytes * inner / (steps * block.BK)  # an expert's last step asks for less


def _rows_seconds(problem: Problem, config: TileConfig, device: DeviceModel, *, gated: bool) -> float:
    """Every pair reads its expert's weights; what two share comes from L2 the second time, if it is still there."""
    moved = problem.rows * _weight_bytes(problem) * (2 if gated else 1) / 3
    on_their_way = bytes_on_their_way(problem, config, device, gated=gated)
    each = BLOCK_LANE_OPERATIONS if problem.scales == "block" else LANE_OPERATIONS[problem.weights]
    operations = moved / problem.weight_bytes * each
    rate = min(device.memory_bytes_per_s, on_their_way / LATENCY_S)
    return max(moved / rate, operations / (device.num_sms * LANES_PER_S))


def _product_seconds(problem: Problem, config: TileConfig, device: DeviceModel, *, gated: bool) -> float:
    block = config.up if gated else config.down
    columns, inner = (problem.hidden, problem.width) if gated else (problem.width, problem.hidden)
    weight_rows, steps = block.BN * (2 if gated else 1), math.ceil(inner / block.BK)
    tiles = expected_tiles(problem, config.BM)
    pieces, slots = num_pieces(problem, config, gated=gated), device.num_sms * block.per_sm
    step_bytes = stage_bytes(config, block, problem, gated=gated)
    peak = device.flops_fp8 if config.eight else device.flops_bf16
    rate = peak * MMA_SHARE * _mma_share(config, block) / slots
    height = config.BM if config.swap_ab else max(config.BM, WGMMA_ROWS)
    computing = 2.0 * height * weight_rows * block.BK * steps / rate * _tail_share(problem, config, tiles)
    computing += _lane_operations(problem, config, block, weight_rows) * steps * block.per_sm / LANES_PER_S
    missing = config.BM - problem.rows / tiles if gated else 0.0  # rows that a tile lacks are not fetched, if gathered
    fetched_bytes = step_bytes - missing * block.BK * row_bytes(config, problem)
    copying = fetched_bytes * steps / _copy_rate(min(pieces, slots), device)
    piece = _together(computing, copying) + FILL_S / (4 if block.flat else block.per_sm)
    rounds = max(pieces / slots, 1.0)
    if pieces / slots < 4:  # a last round with few pieces takes as long as a full one
        rounds = (rounds + math.ceil(rounds)) / 2
    on_their_way = bytes_on_their_way(problem, config, device, gated=gated)
    memory_rate = min(device.memory_bytes_per_s, on_their_way / LATENCY_S)
    moved = problem.active_experts * _weight_bytes(problem) * (2 if gated else 1) / 3
    read, written = row_bytes(config, problem), row_bytes(config, problem) if gated else problem.element_bytes
    moved += problem.rows * (columns * written + inner * read)
    return _together(rounds * piece, moved / memory_rate)


def _copy_rate(running: float, device: DeviceModel) -> float:
    """Of one program of so many: its share of what L2 gives out, and no more than of its multiprocessor's."""
    of_all = device.memory_bytes_per_s * L2_OVER_MEMORY / max(running, 1.0)
    return min(of_all, SM_BYTES_PER_S / math.ceil(max(running, 1.0) / device.num_sms))


def _lane_operations(problem: Problem, config: TileConfig, block: Block, weight_rows: int) -> float:
    """Of a step, which its products wait for: weights are widened, or its sums scaled and added to all."""
    if config.eight:
        return float(config.BM * weight_rows)
    widening = WIDENING[problem.weights] * weight_rows * block.BK
    return widening + (config.BM * weight_rows if problem.scales == "block" else 0)


def _together(*seconds: float) -> float:
    """Of things that go on at once: a little more than the longest."""
    return math.pow(math.fsum(math.pow(one, OVERLAP) for one in seconds), 1.0 / OVERLAP)


def _mma_share(config: TileConfig, block: Block) -> float:
    """Of the tensor cores' rate, by what one product of 64 rows, n columns and 16 steps reads of shared memory:
    (64 + n) · 32 bytes at 128 a cycle, against n / 2 cycles of multiplying."""
    n = config.BM if config.swap_ab else block.BN
    return min(1.0, (n / 2) / (16 + n / 4))


def _tail_share(problem: Problem, config: TileConfig, tiles: float) -> float:
    """What is left of the work where tiles with few rows cost less."""
    if not config.tail:
        return 1.0
    spare = 1.0 - problem.rows / (tiles * config.BM)  # of all tiles' rows, none of which is anybody's
    return 1.0 - spare / 2
