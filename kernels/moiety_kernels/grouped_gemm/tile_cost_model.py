"""Tile configurations of an expert layer's products: the candidates for a GPU, and a cost model that chooses one.

Handles no tensors and needs no GPU. The host knows the number of rows, not their experts; facts that depend on those
(each expert's number of tiles, the fill of its last tile) are computed on the device. So the choice assumes the rows
per expert of even routing.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from moiety_kernels.gpu.targets import DeviceModel

LATENCY_S = 1.0e-6  # memory latency; bandwidth × this must be in flight
FILL_S = 2.0e-6  # a tile's indices and first operands; only flat loops hide this time
LAUNCH_S = 2.5e-6  # of one kernel in a graph: its start, its first bytes and its last
L2_OVER_MEMORY = 1.7  # bandwidth of L2 over that of memory
LANES_PER_S = 128 * 1.7e9  # of one multiprocessor
SM_BYTES_PER_S = 64 * 1.7e9  # from L2 to one multiprocessor
WGMMA_ROWS = 64  # fewest rows of a warpgroup's product
OVERLAP = 4  # exponent of the power mean of compute, copy and memory time, which overlap
EIGHT_ROWS = 64  # per expert; with fewer, memory is the bound and rounding rows gains nothing
_MANY_ROWS = 512  # per expert; with more, the fill of last tiles is practically uniform
STORED_BYTES = 32 * 1024  # of a tile that the compiler rearranges at a time through shared memory to store it
INVARIANT_BK = 64  # step of a row's sum where its bits must not depend on the choice
MAX_ROW_TOKENS = 8  # most tokens whose rows are computed one by one; more where tiles have to widen four bits
MAX_ROW_TOKENS_OF_FOUR_BITS = 16
BLOCK_SCALED_ROWS = 64  # most rows of a tile with block scales: a step's sums are kept beside the totals
MMA_SHARE = 0.85  # share of the rate of large products that our loop reaches when nothing else binds it


Weights = Literal["wide", "int8", "fp8", "int4", "mxfp4"]
Scales = Literal["none", "row", "block", "group"]
Four = Literal["", "int4", "mxfp4"]
# Instructions per weight before a tensor core can use it.
WIDENING = {"wide": 0.0, "int8": 1.5, "fp8": 1.5, "int4": 4.0, "mxfp4": 8.0}
# Instructions per weight without tensor cores, in the loop over a row's steps on Hopper.
LANE_OPERATIONS = {"wide": 5.8, "int8": 5.9, "fp8": 5.6, "int4": 4.4, "mxfp4": 5.4}
BLOCK_LANE_OPERATIONS = 6.5  # for float8 with block scales


@dataclass(frozen=True, slots=True)
class Problem:
    """One expert layer's work in one step."""

    num_experts: int
    top_k: int
    width: int  # D, of the model
    hidden: int  # F, of an expert
    tokens: int
    element_bytes: int = 2  # of activations and of unquantized weights
    invariant: bool = False  # a row's bits must not depend on the other rows
    weights: Weights = "wide"
    scales: Scales = "none"  # of quantized weights: per row, per block of 128 × 128, or (4 bits) per 32 of a row

    @property
    def rows(self) -> int:
        """Number of token–expert pairs."""
        return self.tokens * self.top_k

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight, with its share of the scale that 32 weights have."""
        if self.scales == "group":
            return 0.5 + 4 / 32
        return self.element_bytes if self.weights == "wide" else 1

    @property
    def active_experts(self) -> float:
        """Expected number of experts with a row under even routing. A token never chooses one twice."""
        missed = (1.0 - self.top_k / self.num_experts) ** self.tokens
        return self.num_experts * (1.0 - missed)


@dataclass(frozen=True, slots=True)
class Block:
    """Tiling of one of the two products: a tile's rows by BN columns of the result at a time (BN of gate and up)."""

    BN: int
    BK: int
    warps: int
    stages: int
    per_sm: int = 1  # programs per multiprocessor; for BM 1, as many as registers and shared memory allow
    flat: bool = False  # tiles and steps as one loop: the next tile's operands are fetched during a store


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tiling of both products of a layer; they share the list of tiles, hence BM.

    BM 1 is the path for few tokens: one row per program, weights straight into registers, no grouping and no combine
    step.
    """

    BM: int
    up: Block
    down: Block
    swap_ab: bool = False  # weights are a tensor core's 64 rows, tokens its columns, so few suffice
    four: Four = ""  # 4-bit weights; a byte's two numbers are half a step apart
    eight: bool = False  # rows are rounded to float8 like the weights, for float8 products
    tail: int = 0  # tiles of at most this many rows are computed with this height; not with flat loops

    @property
    def name(self) -> str:
        kind = f"{'s' if self.swap_ab else ''}{'e' if self.eight else ''}{self.four}"
        tile = f"{self.BM}{kind}{f't{self.tail}' if self.tail else ''}"
        return f"{'rows' if self.BM == 1 else tile} up {_block_name(self.up)} down {_block_name(self.down)}"


def _block_name(block: Block) -> str:
    return f"{block.BN}x{block.BK}w{block.warps}s{block.stages}{'f' if block.flat else ''}"


ROWS = TileConfig(1, Block(4, 512, 4, 3, 6), Block(4, 512, 2, 5, 11))
ROWS_EIGHT = TileConfig(1, Block(4, 512, 4, 3, 6), Block(8, 512, 2, 8, 6))
ROWS_OF_BLOCKS = TileConfig(1, Block(4, 512, 4, 3, 5), Block(8, 512, 2, 8, 6))  # block scales take registers
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
NARROW = (  # 8-bit weights, widened in registers, which only swapped products can read
    ROWS_EIGHT,
    TileConfig(16, Block(64, 64, 4, 8, 2, flat=True), Block(128, 64, 4, 8, 2, flat=True), swap_ab=True),
    TileConfig(64, Block(64, 64, 4, 5, 2, flat=True), Block(128, 64, 4, 5, 2, flat=True), swap_ab=True),
    TileConfig(128, Block(128, 64, 8, 5), Block(128, 64, 8, 5), swap_ab=True),  # too many sums for block scales
)
FOUR = (  # 4-bit weights, widened in registers
    TileConfig(16, Block(64, 64, 4, 8, 2, flat=True), Block(128, 64, 4, 8, 2, flat=True), swap_ab=True),
    TileConfig(64, Block(64, 64, 4, 6, 2, flat=True), Block(128, 64, 4, 6, 2, flat=True), swap_ab=True),
    TileConfig(128, Block(128, 64, 8, 5), Block(128, 64, 8, 5), swap_ab=True),
)
ROWS_FOUR = TileConfig(1, Block(8, 1024, 4, 3, 5), Block(8, 1024, 2, 6, 5))
EIGHT = (  # float8 by float8: a step is the columns that share a row's scale, 64 of the second product, as many as
    # the first one's tiles have; a step's sums are kept beside the totals, so more would not fit in registers
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
    """Return the bytes of rows and weights that one step of a tile reads."""
    weights = block.BN * (2 if gated else 1)
    return round((config.BM * row_bytes(config, problem) + weights * problem.weight_bytes) * block.BK)


def row_bytes(config: TileConfig, problem: Problem) -> int:
    """Return the bytes of one number of a row in the product."""
    return 1 if config.eight else problem.element_bytes


def shared_bytes(config: TileConfig, block: Block, problem: Problem, *, gated: bool) -> int:
    """Return the most shared memory of one program: the stages, and with flat loops the tile that is being stored."""
    stages = block.stages * stage_bytes(config, block, problem, gated=gated)
    stored = min(config.BM * block.BN * problem.element_bytes, STORED_BYTES)
    return (stages + stored if block.flat else max(stages, stored)) + 1024


def candidates(problem: Problem, device: DeviceModel) -> tuple[TileConfig, ...]:
    """Return the configurations that support `problem`, never empty.

    Those for invariant results all sum in the same steps of BK.
    """
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
        most = MAX_ROW_TOKENS_OF_FOUR_BITS if config.four else MAX_ROW_TOKENS
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
    """Return the candidate with the lowest predicted time."""
    return min(candidates(problem, device), key=lambda config: seconds(problem, config, device))


def seconds(problem: Problem, config: TileConfig, device: DeviceModel) -> float:
    """Return the predicted time of a layer from grouping to combine, with weights in memory and not in L2."""
    if config.BM == 1:
        return 2 * LAUNCH_S + sum(_rows_seconds(problem, config, device, gated=gated) for gated in (True, False))
    up = _product_seconds(problem, config, device, gated=True)
    down = _product_seconds(problem, config, device, gated=False)
    combined_bytes = (problem.rows + problem.tokens) * problem.width * problem.element_bytes
    rounded_bytes = problem.tokens * problem.width * (problem.element_bytes + 1) if config.eight else 0
    launches = 5 if config.eight else 4
    return launches * LAUNCH_S + up + down + (combined_bytes + rounded_bytes) / device.memory_bytes_per_s


def expected_tiles(problem: Problem, height: int) -> float:
    """Return the expected tiles of `height` rows under even routing: an expert's rows are about Poisson distributed."""
    mean = problem.rows / problem.num_experts
    if mean > _MANY_ROWS:
        return problem.num_experts * (mean / height + 0.5)
    chance, below, total = math.exp(-mean), 0.0, 0.0  # probability of n rows; of fewer; the expected tiles per expert
    for n in range(int(mean + 8 * math.sqrt(mean) + 10)):
        if n % height == 0:  # one more tile for experts with more than n rows
            total += 1.0 - below - chance
        below += chance
        chance *= mean / (n + 1)
    return max(problem.active_experts, min(problem.num_experts * total, float(problem.rows)))


def _weight_bytes(problem: Problem) -> float:
    """Return the bytes of one expert's weights."""
    return 3.0 * problem.width * problem.hidden * problem.weight_bytes


def num_pieces(problem: Problem, config: TileConfig, *, gated: bool) -> float:
    """Return the number of pieces of one of the two products.

    A piece is a block of columns of a tile, of a pair, or of a token with all its experts.
    """
    block, columns = (config.up, problem.hidden) if gated else (config.down, problem.width)
    if config.BM == 1:
        return (problem.rows if gated else problem.tokens) * math.ceil(columns / block.BN)
    return expected_tiles(problem, config.BM) * math.ceil(columns / block.BN)


def bytes_on_their_way(problem: Problem, config: TileConfig, device: DeviceModel, *, gated: bool) -> float:
    """Return the bytes that the concurrent programs of one of the two products have requested at a time."""
    block, inner = (config.up, problem.width) if gated else (config.down, problem.hidden)
    running = min(num_pieces(problem, config, gated=gated), device.num_sms * block.per_sm)
    step_bytes = stage_bytes(config, block, problem, gated=gated)
    if config.BM > 1:
        return running * (block.stages - 1) * step_bytes
    steps = math.ceil(inner / block.BK)
    ahead = min(block.stages - 1, steps if gated else steps * problem.top_k)
    return running * ahead * step_bytes * inner / (steps * block.BK)  # an expert's last step requests less


def _rows_seconds(problem: Problem, config: TileConfig, device: DeviceModel, *, gated: bool) -> float:
    """Return the time of one product for few tokens, where every pair reads its expert's weights.

    The second read of shared weights comes from L2, if they are still there.
    """
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
    missing = config.BM - problem.rows / tiles if gated else 0.0  # missing rows of a tile are not fetched by a gather
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
    """Return the copy rate of one of `running` programs: its share of L2's rate, at most that of its multiprocessor."""
    of_all = device.memory_bytes_per_s * L2_OVER_MEMORY / max(running, 1.0)
    return min(of_all, SM_BYTES_PER_S / math.ceil(max(running, 1.0) / device.num_sms))


def _lane_operations(problem: Problem, config: TileConfig, block: Block, weight_rows: int) -> float:
    """Return the operations of a step that its products wait for: widening weights, or scaling and adding its sums."""
    if config.eight:
        return float(config.BM * weight_rows)
    widening = WIDENING[problem.weights] * weight_rows * block.BK
    return widening + (config.BM * weight_rows if problem.scales == "block" else 0)


def _together(*seconds: float) -> float:
    """Return the time of overlapping operations, a little more than the longest."""
    return math.pow(math.fsum(math.pow(part_s, OVERLAP) for part_s in seconds), 1.0 / OVERLAP)


def _mma_share(config: TileConfig, block: Block) -> float:
    """Return the share of the tensor cores' rate that the operands' reads from shared memory allow.

    One product of 64 rows, n columns and 16 steps reads (64 + n) · 32 bytes at 128 per cycle, against n / 2 cycles of
    multiplication.
    """
    n = config.BM if config.swap_ab else block.BN
    return min(1.0, (n / 2) / (16 + n / 4))


def _tail_share(problem: Problem, config: TileConfig, tiles: float) -> float:
    """Return the share of the work that remains where tiles with few rows cost less."""
    if not config.tail:
        return 1.0
    spare = 1.0 - problem.rows / (tiles * config.BM)  # unused rows of all tiles
    return 1.0 - spare / 2
