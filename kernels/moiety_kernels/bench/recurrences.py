"""The operations of recurrent layers as timed calls.

They are those of gated DeltaNet, Kimi Delta Attention, Mamba-2 and lightning attention.

T tokens, H key heads of width K, M value heads of width V, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from moiety_kernels.bench import work
from moiety_kernels.bench.operation import Operation, Point, dtype_name, dtype_on
from moiety_kernels.bench.shapes import DELTA_RULES, RECURRENCES, LayerShape
from moiety_kernels.gated_delta import gated_delta_rule
from moiety_kernels.linear_attention import linear_attention
from moiety_kernels.recurrent.inputs import RecurrentHeads, RecurrentSequences

_MOST_DECODES, _FEWEST_PROMPT_TOKENS = 256, 256


def recurrent_operations() -> Iterator[Operation]:
    """Yield a decode of one token per sequence and the prompt of one sequence, for each recurrence."""
    for kind in RECURRENCES:
        yield Operation(
            f"{kind}_decode", partial(_decodes, kind), partial(_bytes, kind, decodes=True), partial(_decode, kind)
        )
        yield Operation(
            f"{kind}_prefill", partial(_prefills, kind), partial(_bytes, kind, decodes=False), partial(_prefill, kind)
        )


def _decodes(kind: str, shape: LayerShape, sequences: int) -> bool:
    return kind in shape.recurrences and sequences <= _MOST_DECODES


def _prefills(kind: str, shape: LayerShape, tokens: int) -> bool:
    return kind in shape.recurrences and tokens >= _FEWEST_PROMPT_TOKENS


def _decode(kind: str, shape: LayerShape, sequences: int, device: torch.device) -> Point:
    return _recurrence(kind, shape, [1] * sequences, device)


def _prefill(kind: str, shape: LayerShape, tokens: int, device: torch.device) -> Point:
    return _recurrence(kind, shape, [tokens], device)


def _recurrence(kind: str, shape: LayerShape, lengths: list[int], device: torch.device) -> Point:
    """Return a point whose calls replace the states; decays keep their values bounded."""
    r, tokens, dtype = shape.recurrences[kind], sum(lengths), dtype_on(device)

    def drawn(heads: int, width: int) -> Tensor:
        return torch.randn(tokens, heads, width, device=device).to(dtype)

    heads = RecurrentHeads(drawn(r.heads, r.width), drawn(r.heads, r.width), drawn(r.value_heads, r.value_width))
    states = torch.randn(len(lengths), r.value_heads, r.width, r.value_width, device=device)
    sequences = RecurrentSequences(
        torch.arange(len(lengths), device=device),
        torch.ones(len(lengths), dtype=torch.int32, device=device),
        torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32),
        max_query=max(lengths),
        num_decode=lengths.count(1),
    )
    name = dtype_name(heads.v_TMV)
    least = work.recurrence(kind, shape, tokens, len(lengths), name)
    if kind in DELTA_RULES:
        decay_TMG = -torch.rand(tokens, r.value_heads, r.gates, device=device)
        strength_TM = torch.rand(tokens, r.value_heads, device=device)
        return Point(lambda: gated_delta_rule(heads, decay_TMG, strength_TM, states, sequences), {}, least, name)
    decay_TM = -torch.rand(tokens, r.value_heads, device=device)
    return Point(lambda: linear_attention(heads, decay_TM, states, sequences), {}, least, name)


def _bytes(kind: str, shape: LayerShape, tokens: int, *, decodes: bool) -> int:
    """Return the bytes of rows, decays and states, as they are drawn and in the type of the rows."""
    r = shape.recurrences[kind]
    rows = tokens * (2 * r.heads * r.width + 2 * r.value_heads * r.value_width + r.value_heads * (r.gates + 1))
    return 8 * rows + 8 * (tokens if decodes else 1) * r.state_entries
