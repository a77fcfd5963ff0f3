"""Dispatch and combine by DeepEP's kernels (https://github.com/deepseek-ai/DeepEP, `ElasticBuffer` of version 2).

DeepEP is an optional package for Hopper GPUs and later. It sends bfloat16 rows, needs whole experts on each rank, and
sends no adapter slots.

S tokens that this rank dispatches, D model width, K slots per token, R ranks, M rows with room.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moiety_engine.distribution.expert_all_to_all import ExpertRows
from moiety_engine.errors import InvalidConfig

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.distribution.collectives import RowExchange

_LEAST_TOKENS = 128  # room of the first buffer, in tokens per rank; a larger step replaces it


def require_deep_ep(device: torch.device, dtype: torch.dtype) -> None:
    """Raise InvalidConfig with the reason if DeepEP cannot be used for a model of this type on this device."""
    instead = "use --expert-all2all auto"
    if device.type != "cuda":
        raise InvalidConfig(f"--expert-all2all deepep needs a CUDA device, not {device.type}: {instead}")
    if dtype is not torch.bfloat16:
        raise InvalidConfig(f"--expert-all2all deepep sends bfloat16 rows, not {dtype}: {instead}, or --dtype bfloat16")
    try:
        found = importlib.import_module("deep_ep")
    except (ImportError, AssertionError, OSError) as exc:  # it asserts that CUDA and NCCL are found
        raise InvalidConfig(
            f"--expert-all2all deepep needs the package deep_ep, which cannot be imported ({exc}): install DeepEP, "
            f"or {instead}"
        ) from exc
    if not hasattr(found, "ElasticBuffer"):
        raise InvalidConfig(
            f"--expert-all2all deepep needs version 2 of DeepEP, with ElasticBuffer: install a later one, or {instead}"
        )


class DeepEpAllToAll:
    """Implementation of ExpertAllToAll on DeepEP. The host waits for no counts: rows have room for all tokens."""

    may_repeat = False

    def __init__(self, exchange: RowExchange, buffer_type: Any = None) -> None:
        """Create it. `buffer_type`: ElasticBuffer; None: that of the package, which must be installed."""
        self._exchange = exchange
        self._buffer_type = buffer_type or importlib.import_module("deep_ep").ElasticBuffer
        self._buffers: dict[tuple[int, int], tuple[Any, int]] = {}  # by D and K: the buffer and its tokens per rank
        self._replaced: list[Any] = []  # buffers with too little room, which micro-batches of this pass may still use
        self.bound: int | None = None

    def begin_pass(self, *, repeatable: bool, repeats: bool) -> None:
        """Destroy the buffers that the previous pass has replaced, on all ranks together. No pass is repeated."""
        while self._replaced:
            self._replaced.pop().destroy()

    def repeat_needed(self) -> bool:
        """Return False."""
        return False

    def dispatch(self, layer: int, rows: ExpertRows, num_held: int) -> _DeepEpDispatch:
        """Send each row to its ranks; see ExpertAllToAll. `bound` must be known, and rows must have no adapters."""
        assert self.bound is not None, "DeepEP needs the largest number of tokens of a rank"
        assert rows.adapter_S1 is None, "DeepEP sends no adapter slots"
        buffer, num_tokens = self._buffer_of(rows, self.bound)
        received = buffer.dispatch(
            rows.x_SD.contiguous(),
            topk_idx=rows.slot_SK.long().contiguous(),
            topk_weights=rows.weight_SK.contiguous(),
            num_experts=num_held * self._exchange.size,
            num_max_tokens_per_rank=num_tokens,
            async_with_compute_stream=True,
            do_cpu_sync=False,
        )
        return _DeepEpDispatch(buffer, received, first_slot=num_held * self._exchange.rank)

    def _buffer_of(self, rows: ExpertRows, bound: int) -> tuple[Any, int]:
        """Return a buffer with room for `bound` tokens of each rank, and its room; all ranks create it together."""
        key = rows.x_SD.shape[1], rows.slot_SK.shape[1]
        found = self._buffers.get(key)
        if found is None or found[1] < bound:
            num_tokens = max(_LEAST_TOKENS, 1 << (bound - 1).bit_length())
            if found is not None:
                self._replaced.append(found[0])
            buffer = self._buffer_type(
                self._exchange.handle,
                num_max_tokens_per_rank=num_tokens,
                hidden=key[0],
                num_topk=key[1],
                explicitly_destroy=True,
            )
            found = self._buffers[key] = buffer, num_tokens
        return found


class _DeepEpDispatch:
    def __init__(self, buffer: Any, received: tuple[Any, ...], *, first_slot: int) -> None:
        self._buffer, self._first_slot = buffer, first_slot
        self._x_MD, self._slot_MK, self._weight_MK, self._handle, self._event = received

    def wait(self) -> ExpertRows:
        self._event.current_stream_wait()
        num_rows = self._handle.psum_num_recv_tokens_per_scaleup_rank[-1]  # on the device; the rows after are void
        is_row_M1 = torch.arange(len(self._x_MD), device=self._x_MD.device).unsqueeze(1) < num_rows
        slot_MK = torch.where(is_row_M1 & (self._slot_MK >= 0), self._slot_MK + self._first_slot, -1)
        weight_MK = torch.where(slot_MK >= 0, self._weight_MK, 0.0)
        x_MD = torch.where(is_row_M1, self._x_MD, 0)  # void rows may hold no numbers
        return ExpertRows(x_MD, weight_MK, slot_MK.int())

    def combine(self, given_MD: Tensor) -> _DeepEpCombine:
        out_SD, _, event = self._buffer.combine(
            given_MD.contiguous(), handle=self._handle, async_with_compute_stream=True
        )
        return _DeepEpCombine(given_MD, out_SD, event)


@dataclass(frozen=True, slots=True)
class _DeepEpCombine:
    _given_MD: Tensor  # kept alive until sent
    _out_SD: Tensor
    _event: Any

    def add_to(self, out_SD: Tensor) -> None:
        self._event.current_stream_wait()
        out_SD += self._out_SD
