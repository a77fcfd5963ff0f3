"""Layout-independent access to the cache's content, token by token.

KV is read on one engine and written on another, whose blocks may have another size and data type.

n blocks, P token slots a block, T tokens, G key-value heads, d head width, L width of a latent row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moiety_engine.kv_transfer.messages import Form, TensorLayout
from moiety_engine.model.batch import KvCache, RecurrentStateCache
from moiety_kernels.kv_store import kv_store
from moiety_kernels.kv_store.caches import LatentCache, LayerCache
from moiety_kernels.latent_input.reference import scale_of, to_whole

_NUM_SCALED_PARTS = 4  # keys, values, and one scale per key and per value
_NUM_LATENT_SCALES = 2  # one for each of a row's two parts


def form_of(kv: KvCache) -> Form:
    """Return the parts that each layer without a recurrent state stores for a token."""
    return tuple(tuple(_form_of(layer, part) for part in layer.parts) for layer in kv.token_caches.values())


def states_of(kv: KvCache) -> Form:
    """Return the parts of a sequence's state in each recurrent layer."""
    return tuple(
        tuple(TensorLayout(_name(part), tuple(part.shape[1:])) for part in layer.parts)
        for layer in kv.state_caches.values()
    )


def read_state(layer: RecurrentStateCache, slot: int) -> list[Tensor]:
    """Return a copy of the state in a slot, part by part."""
    return [part[slot].clone() for part in layer.parts]


def write_state(layer: RecurrentStateCache, slot: int, values: Sequence[Tensor]) -> None:
    """Write a state into a slot, converted to the cache's data types."""
    for part, value in zip(layer.parts, values, strict=True):
        part[slot].copy_(value)


def token_bytes(form: Form) -> int:
    """Return the bytes of one token over all layers."""
    return sum(layer_bytes(layer) for layer in form)


def layer_bytes(parts: Sequence[TensorLayout]) -> int:
    """Return the bytes of one token in one layer."""
    return sum(math.prod(part.shape) * _dtype(part).itemsize for part in parts)


def fits(form: Form, states: Form, kv: KvCache) -> bool:
    """Return whether KV and states of that layout are of the same model as the cache; the data types may differ."""
    own = form_of(kv)
    if _shapes(states) != _shapes(states_of(kv)):
        return False
    return len(form) == len(own) and all(_matches(layer, mine) for layer, mine in zip(form, own, strict=True))


def read(layer: LayerCache | LatentCache, blocks_n: Tensor, offset: int, num_tokens: int) -> list[Tensor]:
    """Return tokens of each part of the layer's cache, from place `offset` of the first of these blocks on.

    The returned tensors are contiguous.
    """
    rows = []
    for part in layer.parts:
        by_token = part.index_select(0, blocks_n).movedim(_token_dim(layer), 1)
        rows.append(by_token.flatten(0, 1)[offset : offset + num_tokens].contiguous())
    return rows


def write(layer: LayerCache | LatentCache, rows: Sequence[Tensor], slots_T: Tensor) -> None:
    """Write token t's rows into slot slots_T[t] = block · P + place, converted to the cache's data types."""
    if [part.dtype for part in layer.parts] == [part.dtype for part in rows]:
        for part, values in zip(layer.parts, rows, strict=True):
            by_token = part.movedim(_token_dim(layer), 1)
            places = by_token.shape[1]
            by_token[slots_T // places, slots_T % places] = values
    elif isinstance(layer, LatentCache):
        _write_latent(layer, rows, slots_T)
    else:
        k_TGd, v_TGd = _plain(rows)
        kv_store(k_TGd, v_TGd, layer, slots_T)


def _write_latent(layer: LatentCache, rows: Sequence[Tensor], slots_T: Tensor) -> None:
    values_TL, *others = rows
    if layer.index_keys_NPI is not None:
        keys_TI, *others = others
        layer.index_keys_NPI.flatten(0, 1)[slots_T] = keys_TI.to(layer.index_keys_NPI.dtype)
    scales = others
    parts = values_TL.float().tensor_split([layer.latent_width], dim=1)
    if scales:
        parts = tuple(part * scale_T[:, None] for part, scale_T in zip(parts, scales, strict=True))
    if layer.latent_scale_NP is not None and layer.rotated_scale_NP is not None:
        own = tuple(scale_of(part) for part in parts)
        parts = tuple(to_whole(part, scale_T1) for part, scale_T1 in zip(parts, own, strict=True))
        for scale_NP, scale_T1 in zip((layer.latent_scale_NP, layer.rotated_scale_NP), own, strict=True):
            scale_NP.view(-1)[slots_T] = scale_T1.squeeze(1)
    layer.rows_NPL.flatten(0, 1)[slots_T] = _within(torch.cat(parts, dim=1), layer.rows_NPL.dtype)


def views(buffer_B: Tensor, parts: Sequence[TensorLayout], num_tokens: int) -> list[Tensor]:
    """Return the parts of the chunk at the start of the buffer as tensors."""
    found, begin = [], 0
    for part in parts:
        end = begin + num_tokens * math.prod(part.shape) * _dtype(part).itemsize
        found.append(_typed(buffer_B[begin:end], _dtype(part)).view(num_tokens, *part.shape))
        begin = end
    return found


def _typed(bytes_B: Tensor, dtype: torch.dtype) -> Tensor:
    aligned = bytes_B.data_ptr() % dtype.itemsize == 0
    return (bytes_B if aligned else bytes_B.clone()).view(dtype)


def _plain(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return keys and values in float32, with their scales applied."""
    if len(rows) == _NUM_SCALED_PARTS:
        k_TGd, v_TGd, k_scale_TG, v_scale_TG = rows
        return k_TGd.float() * k_scale_TG[..., None], v_TGd.float() * v_scale_TG[..., None]
    k_TGd, v_TGd = rows
    return k_TGd.float(), v_TGd.float()


def _shapes(form: Form) -> list[list[tuple[int, ...]]]:
    return [[part.shape for part in layer] for layer in form]


def _is_latent(parts: Sequence[TensorLayout]) -> bool:
    return len(parts[0].shape) == 1


def _matches(parts: Sequence[TensorLayout], own: Sequence[TensorLayout]) -> bool:
    """Return whether a layer's parts are values of the same shapes, followed by no scales or by those of int8."""
    if _is_latent(own):
        values, num_scales = [part for part in own if part.shape], _NUM_LATENT_SCALES
    else:
        values, num_scales = list(own[:2]), _NUM_SCALED_PARTS - 2
    shapes, scales = [part.shape for part in values], [own[0].shape[:-1]] * num_scales
    return [part.shape for part in parts] in (shapes, shapes + scales)


def _within(values: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is torch.float8_e4m3fn:
        largest = torch.finfo(dtype).max
        values = values.clamp(-largest, largest)
    return values.to(dtype)


def _form_of(layer: LayerCache | LatentCache, part: Tensor) -> TensorLayout:
    shape = list(part.shape[1:])
    del shape[_token_dim(layer) - 1]
    return TensorLayout(_name(part), tuple(shape))


def _name(part: Tensor) -> str:
    return str(part.dtype).removeprefix("torch.")


def _token_dim(layer: LayerCache | LatentCache) -> int:
    return 1 if isinstance(layer, LatentCache) else 2


def _dtype(part: TensorLayout) -> torch.dtype:
    found = getattr(torch, part.dtype, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown dtype {part.dtype!r}")
    return found
