"""Compressed convolutional attention: the layers of ZAYA1.

T tokens, D model width, H query heads, G key-value heads, d head width, C = (H + G) · d, V = G · d / 2, R runs,
N blocks, P slots of a block.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_engine.model.batch import CompressedCache
from moiety_kernels.attention_input import AttentionInputPlan, attention_input
from moiety_kernels.head_linear import head_linear
from moiety_kernels.linear import linear
from moiety_kernels.paged_attention import paged_attention
from moiety_kernels.paged_attention.inputs import AttentionParameters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moiety_engine.distribution.collectives import RankCollectives
    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.batch import Batch, Cache, RecurrentRows, RecurrentStateCache
    from moiety_engine.model.conv_attention_spec import ConvAttentionSpec
    from moiety_engine.model.conv_attention_weights import ConvAttentionWeights
    from moiety_engine.model.rotary import RotaryTable

_LEAST_SQUARE = 1e-16  # mean square of a head, below which it counts as zero


class _Before(NamedTuple):
    """Rows of the tokens before each token: of queries and keys one and two tokens before, and values one before."""

    first_TC: Tensor
    second_TC: Tensor
    delayed_TV: Tensor


class ConvAttention:
    """Causal attention whose queries and keys are convolved, and whose values are in part those of the token before."""

    def __init__(
        self,
        spec: ConvAttentionSpec,
        weights: ConvAttentionWeights,
        rotary: RotaryTable,
        arithmetic: Arithmetic,
        *,
        group: RankCollectives,
    ) -> None:
        """Create the layer. `group`: the ranks that divide the query heads they attend with."""
        per_kv_head, first = spec.num_heads // spec.num_kv_heads, group.rank * spec.num_attending_heads
        self._attending = slice(first, first + spec.num_attending_heads)
        self._attended = first // per_kv_head, -(-self._attending.stop // per_kv_head)
        self._spec, self._weights, self._rotary = spec, weights, rotary
        self._linear = partial(linear, invariant=arithmetic.invariant)
        self._head_linear = partial(head_linear, invariant=arithmetic.invariant)
        unit_d = torch.ones(spec.head_dim, device=rotary.device)
        self._plan = AttentionInputPlan(unit_d, unit_d, _LEAST_SQUARE, None)
        self._parameters = AttentionParameters(spec.head_dim**-0.5, spec.window)
        per_query = weights.key_scale_G.repeat_interleave(spec.num_heads // spec.num_kv_heads)
        self._key_scale_H1 = per_query.unsqueeze(1)

    def __call__(self, x_TD: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """Store the tokens' keys and values, advance the states, and return the output, [T, D]."""
        spec, weights, rows = self._spec, self._weights, batch.states
        assert isinstance(cache, CompressedCache)
        assert rows is not None, "layers with a state need its slots"
        widths = [spec.conv_channels, spec.delayed_width, spec.delayed_width]
        mixed_TC, current_TV, delayed_TV = torch.split(self._linear(x_TD, weights.input_CD), widths, dim=1)
        cache.state.record(rows, mixed_TC, delayed_TV)
        before = _before(mixed_TC, delayed_TV, rows, cache.state)
        convolved_TC = self._convolve(mixed_TC, before)
        _advance(mixed_TC, delayed_TV, before, rows, cache.state)
        qkv_TC = torch.cat((convolved_TC, current_TV, before.delayed_TV), dim=1)
        pages = cache.pages
        q_THd = attention_input(qkv_TC, self._plan, self._rotary.of_batch(batch), pages, batch.slots_T)
        q_THd = q_THd * self._key_scale_H1.to(q_THd.dtype)  # of the keys, which scores are linear in
        own_THd, own_pages = q_THd[:, self._attending].contiguous(), pages.of_heads(*self._attended)
        out_THd = paged_attention(own_THd, own_pages, batch.attention, self._parameters)
        return self._linear(out_THd.view(len(x_TD), -1), weights.output_DC)

    def replay(self, inputs_TC: Sequence[Tensor], rows: RecurrentRows, cache: RecurrentStateCache) -> None:
        """Advance states by tokens whose inputs were recorded; their keys and values are in blocks already."""
        mixed_TC, delayed_TV = inputs_TC
        _advance(mixed_TC, delayed_TV, _before(mixed_TC, delayed_TV, rows, cache), rows, cache)

    def _convolve(self, mixed_TC: Tensor, before: _Before) -> Tensor:
        """Return queries and keys after both convolutions, plus the means of each query and its key before them."""
        spec, weights, tokens = self._spec, self._weights, len(mixed_TC)
        older_C, newer_C = weights.channel_taps_2C.to(mixed_TC.dtype).unbind()
        bias_C = weights.channel_bias_C.to(mixed_TC.dtype)
        last_TC = before.first_TC * older_C + mixed_TC * newer_C + bias_C
        former_TC = before.second_TC * older_C + before.first_TC * newer_C + bias_C
        both_TXd = torch.cat([one.view(tokens, -1, spec.head_dim) for one in (former_TC, last_TC)], dim=2)
        convolved_TC = self._head_linear(both_TXd, weights.head_taps_Xdd).view(tokens, -1)
        convolved_TC = convolved_TC + weights.head_bias_C.to(mixed_TC.dtype)
        query_TC, key_TC = torch.split(mixed_TC, [spec.query_width, spec.num_kv_heads * spec.head_dim], dim=1)
        query_TGHd = query_TC.view(tokens, spec.num_kv_heads, -1, spec.head_dim)
        mean_TGHd = (query_TGHd + key_TC.view(tokens, spec.num_kv_heads, 1, spec.head_dim)) * 0.5
        per_group = mean_TGHd.shape[2]
        of_keys_TGd = mean_TGHd[:, :, 0]
        for index in range(1, per_group):  # one by one, so that bits do not depend on the number of tokens
            of_keys_TGd = of_keys_TGd + mean_TGHd[:, :, index]
        added_TC = torch.cat((mean_TGHd.reshape(tokens, -1), (of_keys_TGd / per_group).reshape(tokens, -1)), dim=1)
        return convolved_TC + added_TC


def _before(mixed_TC: Tensor, delayed_TV: Tensor, rows: RecurrentRows, state: RecurrentStateCache) -> _Before:
    """Return the rows before each token, from the step's tokens or from the states, which begin with zeros."""
    token_T = torch.arange(len(mixed_TC), device=mixed_TC.device)
    run_T = torch.searchsorted(rows.run_start_R1, token_T.int(), right=True) - 1
    place_T1 = (token_T - rows.run_start_R1[run_T])[:, None]
    has_state_R11 = rows.has_state_R.bool()[:, None, None]
    kept_R2C, kept_R1V = (
        torch.where(has_state_R11, part.index_select(0, rows.slots_R), 0).to(mixed_TC.dtype) for part in state.parts
    )
    of_state_T2C = kept_R2C.index_select(0, run_T)
    first_TC = torch.where(place_T1 > 0, mixed_TC.roll(1, 0), of_state_T2C[:, 1])
    second_TC = torch.where(place_T1 > 1, mixed_TC.roll(2, 0), of_state_T2C[:, 0])
    second_TC = torch.where(place_T1 == 1, of_state_T2C[:, 1], second_TC)
    before_TV = torch.where(place_T1 > 0, delayed_TV.roll(1, 0), kept_R1V.squeeze(1).index_select(0, run_T))
    return _Before(first_TC, second_TC, before_TV)


def _advance(
    mixed_TC: Tensor, delayed_TV: Tensor, before: _Before, rows: RecurrentRows, state: RecurrentStateCache
) -> None:
    """Write the states after the last token of each run."""
    last_R = rows.run_start_R1[1:].long() - 1
    rows_NKC, delayed_N1V = state.parts
    pair_R2C = torch.stack((before.first_TC.index_select(0, last_R), mixed_TC.index_select(0, last_R)), dim=1)
    rows_NKC.index_copy_(0, rows.slots_R, pair_R2C.to(rows_NKC.dtype))
    delayed_N1V.index_copy_(0, rows.slots_R, delayed_TV.index_select(0, last_R).unsqueeze(1).to(delayed_N1V.dtype))
