"""Sampling in Triton: each program handles one row and finds its thresholds by search, without a sort.

L rows, V vocabulary. A token's weight is its probability over the best token's, in [0, 1]; its key is the weight's bits
as an integer, which have the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moiety_kernels.gpu.cases import CompileCase
from moiety_kernels.sample.reference import MIN_TEMPERATURE
from moiety_kernels.sample.rows import IN_PROMPT, Draws, Penalties

_BLOCK = 2048  # tokens of a row that are processed together
_NUM_WARPS = 16
MAX_TOKENS = 255 * _BLOCK
_STAGES = tl.constexpr(6)  # blocks in flight from memory, which determines a lone program's speed
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_IN_PROMPT = tl.constexpr(IN_PROMPT)
_ABOVE_ALL = tl.constexpr(0x3F800001)  # the key after that of weight 1
_COUNT, _MASS, _MORE_MASS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # quantity that a search compares


def fits(logits_LV: Tensor) -> bool:
    """Return whether `sample` supports these logits."""
    return logits_LV.stride(1) == 1 and logits_LV.shape[1] <= MAX_TOKENS


def sample(logits_LV: Tensor, draws: Draws, penalties: Penalties | None = None, *, block: int = _BLOCK) -> Tensor:
    """Return one token per row; of equally likely tokens the lower comes first. The logits are overwritten."""
    rows, size = logits_LV.shape
    token_L = torch.empty(rows, dtype=torch.int64, device=logits_LV.device)
    past: tuple[Tensor | None, ...] = (None,) * 5
    if penalties is not None:
        amounts = penalties.repetition_J, penalties.presence_J, penalties.frequency_J
        past = penalties.place_L, penalties.seen_JV, *amounts
    if rows:
        _sample[(rows,)](
            logits_LV,
            token_L,
            draws.temperature_L,
            draws.top_k_L,
            draws.top_p_L,
            draws.min_p_L,
            draws.uniform_L,
            *past,
            size,
            logits_LV.stride(0),
            0 if penalties is None else penalties.seen_JV.stride(0),
            PENALISED=penalties is not None,
            BLOCK=min(block, triton.next_power_of_2(size)),
            num_warps=_NUM_WARPS,
        )
    return token_L


@triton.jit
def _sample(
    p_logits,
    p_token,
    p_temperature,
    p_top_k,
    p_top_p,
    p_min_p,
    p_uniform,
    p_place,
    p_seen,
    p_repetition,
    p_presence,
    p_frequency,
    size,
    stride,
    seen_stride,
    PENALISED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + row * stride
    if PENALISED:
        place = tl.load(p_place + row).to(tl.int64)
        if place >= 0:
            _penalise(
                p_row, p_seen + place * seen_stride, size, p_repetition + place, p_presence + place,
                p_frequency + place, BLOCK,
            )  # fmt: skip
    highest, token = _best(p_row, size, BLOCK)
    temperature = tl.load(p_temperature + row)
    if temperature > 0:
        total = _weigh(p_row, size, highest, tl.maximum(temperature, _MIN_TEMPERATURE), BLOCK)
        top_k, top_p, min_p = tl.load(p_top_k + row), tl.load(p_top_p + row), tl.load(p_min_p + row)
        kept = total
        if (top_k > 0) & (top_k < size):
            key, above, mass = _search(p_row, size, top_k, 0.0, _COUNT, BLOCK)
            kept = mass + (top_k - above) * key.to(tl.float32, bitcast=True).to(tl.float64)
        if top_p < 1:
            target = top_p * kept
            key, above, mass = _search(p_row, size, 0, target, _MASS, BLOCK)
            weight = key.to(tl.float32, bitcast=True).to(tl.float64)
            kept = tl.minimum(kept, mass + weight * tl.maximum(tl.ceil((target - mass) / weight), 1.0))
        if min_p > 0:
            kept = tl.minimum(kept, _mass(p_row, size, min_p.to(tl.int32, bitcast=True), BLOCK))
        # below the kept sum, whatever its rounding
        target = tl.minimum(tl.load(p_uniform + row) * kept, kept * (1 - 1e-12))
        if (top_k > 0) | (top_p < 1) | (min_p > 0):
            key, above, mass = _search(p_row, size, 0, target, _MORE_MASS, BLOCK)
            weight = key.to(tl.float32, bitcast=True).to(tl.float64)
            token = _nth(p_row, size, key, ((target - mass) / weight).to(tl.int32), BLOCK)
        else:
            token = _invert(p_row, size, target, BLOCK)
    tl.store(p_token + row, token.to(tl.int64))


@triton.jit
def _penalise(p_row, p_seen, size, p_repetition, p_presence, p_frequency, BLOCK: tl.constexpr):
    repetition, presence, frequency = tl.load(p_repetition), tl.load(p_presence), tl.load(p_frequency)
    for first in range(0, size, BLOCK):
        i_token = first + tl.arange(0, BLOCK)
        logits = tl.load(p_row + i_token, mask=i_token < size, other=0.0)
        seen = tl.load(p_seen + i_token, mask=i_token < size, other=0)
        repeated = tl.where(logits > 0, logits / repetition, logits * repetition)
        logits = tl.where(seen > 0, repeated, logits)
        times = seen % _IN_PROMPT
        logits -= tl.where(times > 0, presence, 0.0) + times.to(tl.float32) * frequency
        tl.store(p_row + i_token, logits, mask=i_token < size)
    tl.debug_barrier()  # other threads of the program may read it next


@triton.jit
def _best(p_row, size, BLOCK: tl.constexpr):
    """Return the highest logit, and the lowest token that has it."""
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    token = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, size, BLOCK, num_stages=_STAGES):
        i_token = first + tl.arange(0, BLOCK)
        logits = tl.load(p_row + i_token, mask=i_token < size, other=-float("inf"))
        token = tl.where(logits > best, i_token, token)
        best = tl.maximum(logits, best)
    highest = tl.max(best, axis=0)
    return highest, tl.min(tl.where(best == highest, token, size - 1), axis=0)


@triton.jit
def _weigh(p_row, size, highest, temperature, BLOCK: tl.constexpr):
    """Replace the logits by weights; return their sum."""
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        i_token = first + tl.arange(0, BLOCK)
        logits = tl.load(p_row + i_token, mask=i_token < size, other=-float("inf"))
        weights = tl.exp(logits / temperature - highest / temperature)
        tl.store(p_row + i_token, weights, mask=i_token < size)
        mass += weights
    tl.debug_barrier()  # other threads of the program may read them next
    return tl.sum(mass.to(tl.float64), axis=0)


@triton.jit
def _keys(p_row, first, size, BLOCK: tl.constexpr):
    """Return the keys of a block, -1 beyond the vocabulary."""
    i_token = first + tl.arange(0, BLOCK)
    return tl.load(p_row + i_token, mask=i_token < size, other=-1.0).to(tl.int32, bitcast=True)


@triton.jit
def _search(p_row, size, num_wanted, mass_wanted, WANTED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the highest key for which the tokens at or above it reach the wanted count or mass.

    Also return the number and the mass of the tokens above it. All tokens together must reach the wanted value.

    Four keys are tried at once. The first four are far apart, like weights; then the gap is cut in five. The search
    ends when all tokens in the gap have one key, which is soon, since 16-bit logits are often equal.
    """
    low, high = tl.full([], 0, tl.int32), tl.full([], _ABOVE_ALL, tl.int32)  # the first suffices, the second does not
    num_high, mass_high = size * 0, tl.full([], 0.0, tl.float64)
    lowest, highest = low, high
    first_time = True
    while lowest < highest:
        gap = high - low
        step = tl.maximum(gap // 5, 1)
        a = tl.where(first_time, high - gap // 4, tl.minimum(low + step, high - 1))
        b = tl.where(first_time, high - gap // 16, tl.minimum(low + 2 * step, high - 1))
        c = tl.where(first_time, high - gap // 64, tl.minimum(low + 3 * step, high - 1))
        d = tl.where(first_time, high - gap // 256, tl.minimum(low + 4 * step, high - 1))
        first_time = False
        num, mass_a, mass_b, mass_c, mass_d, lowest, highest = _four(p_row, size, low, high, a, b, c, d, BLOCK)
        if lowest < highest:
            num_a, num_b = tl.sum(num & 255, axis=0), tl.sum((num >> 8) & 255, axis=0)
            num_c, num_d = tl.sum((num >> 16) & 255, axis=0), tl.sum((num >> 24) & 255, axis=0)
            enough_a = _suffices(num_a, mass_a, num_wanted, mass_wanted, WANTED)
            enough_b = _suffices(num_b, mass_b, num_wanted, mass_wanted, WANTED)
            enough_c = _suffices(num_c, mass_c, num_wanted, mass_wanted, WANTED)
            enough_d = _suffices(num_d, mass_d, num_wanted, mass_wanted, WANTED)
            low = tl.where(enough_a, a, low)
            low = tl.where(enough_b, b, low)
            low = tl.where(enough_c, c, low)
            low = tl.where(enough_d, d, low)
            high, num_high, mass_high = _lowered(enough_d, high, num_high, mass_high, d, num_d, mass_d)
            high, num_high, mass_high = _lowered(enough_c, high, num_high, mass_high, c, num_c, mass_c)
            high, num_high, mass_high = _lowered(enough_b, high, num_high, mass_high, b, num_b, mass_b)
            high, num_high, mass_high = _lowered(enough_a, high, num_high, mass_high, a, num_a, mass_a)
            low, high = tl.maximum(low, lowest), tl.minimum(high, highest + 1)
    return highest, num_high, mass_high


@triton.jit
def _suffices(num, mass, num_wanted, mass_wanted, WANTED: tl.constexpr):
    if WANTED == _COUNT:
        enough = num >= num_wanted
    elif WANTED == _MASS:
        enough = mass >= mass_wanted
    else:
        enough = mass > mass_wanted
    return enough


@triton.jit
def _lowered(enough, high, num_high, mass_high, key, num, mass):
    """Return the upper end of the gap, moved down to `key` unless that is enough."""
    return tl.where(enough, high, key), tl.where(enough, num_high, num), tl.where(enough, mass_high, mass)


@triton.jit
def _four(p_row, size, low, high, a, b, c, d, BLOCK: tl.constexpr):
    """Return how many tokens have keys of at least a, b, c and d, and their mass, for a block's counts of a byte each.

    Also return the lowest and the highest key in low … high - 1.
    """
    num = tl.zeros([BLOCK], tl.int32)
    mass_a, mass_b = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    mass_c, mass_d = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    lowest, highest = tl.full([BLOCK], _ABOVE_ALL, tl.int32), tl.full([BLOCK], -1, tl.int32)
    for first in tl.range(0, size, BLOCK, num_stages=_STAGES):
        keys = _keys(p_row, first, size, BLOCK)
        weights = keys.to(tl.float32, bitcast=True)
        num += tl.where(keys >= a, 1, 0) + tl.where(keys >= b, 1 << 8, 0)
        num += tl.where(keys >= c, 1 << 16, 0) + tl.where(keys >= d, 1 << 24, 0)
        mass_a += tl.where(keys >= a, weights, 0.0)
        mass_b += tl.where(keys >= b, weights, 0.0)
        mass_c += tl.where(keys >= c, weights, 0.0)
        mass_d += tl.where(keys >= d, weights, 0.0)
        lowest = tl.minimum(lowest, tl.where(keys >= low, keys, _ABOVE_ALL))
        highest = tl.maximum(highest, tl.where(keys < high, keys, -1))
    return (
        num,
        tl.sum(mass_a.to(tl.float64), axis=0),
        tl.sum(mass_b.to(tl.float64), axis=0),
        tl.sum(mass_c.to(tl.float64), axis=0),
        tl.sum(mass_d.to(tl.float64), axis=0),
        tl.min(lowest, axis=0),
        tl.max(highest, axis=0),
    )


@triton.jit
def _mass(p_row, size, key, BLOCK: tl.constexpr):
    """Return the mass of the tokens with at least `key`."""
    mass = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, size, BLOCK, num_stages=_STAGES):
        keys = _keys(p_row, first, size, BLOCK)
        mass += tl.where(keys >= key, keys.to(tl.float32, bitcast=True), 0.0)
    return tl.sum(mass.to(tl.float64), axis=0)


@triton.jit
def _nth(p_row, size, key, n, BLOCK: tl.constexpr):
    """Return the token with n lower ones of the same key; the last of the key if there are fewer."""
    block, before, passed = size * 0, size * 0, size * 0
    for first in tl.range(0, size, BLOCK, num_stages=_STAGES):
        count = tl.sum((_keys(p_row, first, size, BLOCK) == key).to(tl.int32), axis=0)
        here = (count > 0) & (passed <= n)
        block, before = tl.where(here, first, block), tl.where(here, passed, before)
        passed += count
    equal = (_keys(p_row, block, size, BLOCK) == key).to(tl.int32)
    place = tl.minimum(n - before, tl.sum(equal, axis=0) - 1)
    i_token = block + tl.arange(0, BLOCK)
    return tl.min(tl.where((equal == 1) & (tl.cumsum(equal, axis=0) > place), i_token, size - 1), axis=0)


@triton.jit
def _invert(p_row, size, target, BLOCK: tl.constexpr):
    """Return the first token at which the cumulative weight exceeds the target, else the last one with a weight."""
    block, before, passed = size * 0, target * 0, target * 0
    for first in tl.range(0, size, BLOCK, num_stages=_STAGES):
        i_token = first + tl.arange(0, BLOCK)
        mass = tl.sum(tl.load(p_row + i_token, mask=i_token < size, other=0.0).to(tl.float64), axis=0)
        here = (mass > 0) & (passed <= target)
        block, before = tl.where(here, first, block), tl.where(here, passed, before)
        passed += mass
    i_token = block + tl.arange(0, BLOCK)
    weights = tl.load(p_row + i_token, mask=i_token < size, other=0.0)
    over = (weights > 0) & (before + tl.cumsum(weights.to(tl.float64), axis=0) > target)
    last = tl.max(tl.where(weights > 0, i_token, 0), axis=0)
    return tl.min(tl.where(over, i_token, last), axis=0)


def compile_cases() -> list[CompileCase]:
    """Return the cases with and without penalties, for any vocabulary size and alignment of rows."""
    types = {"p_logits": "*fp32", "p_token": "*i64", "p_top_k": "*i32", "p_top_p": "*fp64", "p_uniform": "*fp64"}
    types |= dict.fromkeys(("p_temperature", "p_min_p", "p_repetition", "p_presence", "p_frequency"), "*fp32")
    types |= {"p_seen": "*i32", "p_place": "*i32"} | dict.fromkeys(("size", "stride", "seen_stride"), "i32")
    past = dict.fromkeys(("p_place", "p_seen", "p_repetition", "p_presence", "p_frequency"))
    plain, penalised = past | {"PENALISED": False, "BLOCK": _BLOCK}, {"PENALISED": True, "BLOCK": _BLOCK}
    odd = frozenset({"size", "stride", "seen_stride"})
    return [
        CompileCase("plain", _sample, types, plain, num_warps=_NUM_WARPS),
        CompileCase("penalised", _sample, types, penalised, num_warps=_NUM_WARPS),
        CompileCase("odd vocabulary", _sample, types, plain, num_warps=_NUM_WARPS, unaligned=odd),
    ]
