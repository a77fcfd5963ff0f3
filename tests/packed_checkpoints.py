"""Writers of quantized checkpoints in the layouts of other tools, and the weights that the numbers stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output in each place of a word, the lowest bits first


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Unsigned numbers of the last dimension as int32 words, lowest bits first."""
    parts = numbers.long().unflatten(-1, (-1, 32 // bits))
    words = sum(parts[..., place] << bits * place for place in range(32 // bits))
    assert isinstance(words, Tensor)
    return words.to(torch.int32)  # the highest bit becomes the sign


@dataclass
class Integers:
    """Random-free rounding of a matrix to unsigned integers with scales and zero points of groups."""

    weight: Tensor
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    order: Tensor | None = None  # group of each input
    numbers: Tensor = field(init=False)
    scales: Tensor = field(init=False)
    zeros: Tensor = field(init=False)
    stands_for: Tensor = field(init=False)

    def __post_init__(self) -> None:
        rows, width = self.weight.shape
        order = torch.arange(width) // self.group if self.order is None else self.order
        most, num_groups = 2**self.bits - 1, width // self.group
        self.scales = torch.empty(rows, num_groups)
        self.zeros = torch.full((rows, num_groups), 2 ** (self.bits - 1))
        self.numbers = torch.empty(rows, width, dtype=torch.long)
        for group in range(num_groups):
            part = self.weight[:, order == group]
            least, greatest = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            if self.symmetric:
                scale = torch.maximum(greatest, -least) * 2 / most
            else:
                scale = (greatest - least) / most
                self.zeros[:, group] = (-least / scale).round()
            self.scales[:, group] = scale = scale.half().float()
            rounded = (part / scale[:, None]).round() + self.zeros[:, group, None]
            self.numbers[:, order == group] = rounded.clamp(0, most).long()
        self.stands_for = (self.numbers - self.zeros[:, order]) * self.scales[:, order]


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    one = Integers(weight)

    def words(numbers: Tensor) -> Tensor:
        return packed(numbers.T.unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)].flatten(-2), 4)

    return {"qweight": words(one.numbers), "qzeros": words(one.zeros), "scales": one.scales.T.half()}, one.stands_for


def gptq(weight: Tensor, *, less: int = 1, **how: Any) -> tuple[dict[str, Tensor], Tensor]:
    width = weight.shape[1]
    one = Integers(weight, **how)
    order = torch.arange(width) // one.group if one.order is None else one.order
    zeros = one.zeros - less & 2**one.bits - 1
    return {
        "qweight": packed(one.numbers, one.bits).T,
        "qzeros": packed(zeros.T, one.bits),
        "scales": one.scales.T.half(),
        "g_idx": order.int(),
    }, one.stands_for


def act_ordered(weight: Tensor, seed: int = 3) -> tuple[dict[str, Tensor], Tensor]:
    order = torch.arange(weight.shape[1])[torch.randperm(weight.shape[1], generator=torch.manual_seed(seed))] // 32
    return gptq(weight, order=order)


def compressed(weight: Tensor, **how: Any) -> tuple[dict[str, Tensor], Tensor]:
    one = Integers(weight, **how)
    parts = {
        "weight_packed": packed(one.numbers, one.bits),
        "weight_scale": one.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not one.symmetric:
        rows = torch.nn.functional.pad(one.zeros, (0, 0, 0, -len(weight) % (32 // one.bits)))
        parts["weight_zero_point"] = packed(rows.T, one.bits).T
    return parts, one.stands_for


def compressed_ordered(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    order = torch.arange(weight.shape[1])[torch.randperm(weight.shape[1], generator=torch.manual_seed(3))] // 32
    parts, stands_for = compressed(weight, order=order)
    return parts | {"weight_g_idx": order.int()}, stands_for


def whole(weight: Tensor, *, symmetric: bool = True) -> tuple[dict[str, Tensor], Tensor]:
    """W8A8 of compressed-tensors: a scale a row."""
    one = Integers(weight, bits=8, group=weight.shape[1], symmetric=symmetric)
    parts = {"weight": (one.numbers - 128).to(torch.int8), "weight_scale": one.scales}
    return parts | ({} if symmetric else {"weight_zero_point": (one.zeros - 128).to(torch.int8)}), one.stands_for


def e2m1(weight: Tensor, scales: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return the codes, two to a byte, and the weights that they stand for."""
    spread = scales.repeat_interleave(group, 1)
    code = ((weight / spread).abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    sign = weight < 0
    codes = (code + 8 * sign).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, torch.where(sign, -1, 1) * E2M1[code] * spread


def nvfp4(weight: Tensor, *, modelopt: bool) -> tuple[dict[str, Tensor], Tensor]:
    whole_scale = weight.abs().max() / (6 * 448)
    each = (weight.abs().unflatten(1, (-1, 16)).amax(-1) / 6 / whole_scale).to(torch.float8_e4m3fn)
    values, stands_for = e2m1(weight, each.float() * whole_scale, 16)
    if modelopt:
        parts = {"weight": values, "weight_scale": each, "weight_scale_2": whole_scale, "input_scale": torch.ones(())}
        return parts, stands_for
    divisor = 1 / whole_scale.reshape(1)
    stands_for = e2m1(weight, each.float() / divisor, 16)[1]
    ends = {"weight_packed": values, "weight_scale": each, "weight_global_scale": divisor}
    return ends | {"input_global_scale": torch.ones(1)}, stands_for


def exponents(weight: Tensor, most: float) -> Tensor:
    return torch.log2(weight.abs().unflatten(1, (-1, 32)).amax(-1) / most).ceil().int()


def mxfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    power = exponents(weight, 6)
    values, stands_for = e2m1(weight, 2.0**power, 32)
    return {"weight_packed": values, "weight_scale": (power + 127).to(torch.uint8)}, stands_for


def mxfp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    power = exponents(weight, 448)
    spread = (2.0**power).repeat_interleave(32, 1)
    values = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": (power + 127).to(torch.uint8)}, values.float() * spread


def nf4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize to NF4 with scales that are quantized themselves."""
    table = torch.tensor([-1.0, -0.7, -0.5, -0.4, -0.3, -0.2, -0.1, 0, 0.1, 0.2, 0.25, 0.35, 0.45, 0.6, 0.7, 1.0])
    nested_table, blocks = torch.linspace(-1, 1, 256), weight.reshape(-1, 64)
    largest = blocks.abs().amax(1)
    offset = float(largest.mean())
    nested = (largest - offset).split(16)
    nested_scales = torch.stack([part.abs().max() for part in nested])
    codes = [
        ((part / scale)[:, None] - nested_table).abs().argmin(1)
        for part, scale in zip(nested, nested_scales, strict=True)
    ]
    scales = torch.cat([nested_table[code] * scale for code, scale in zip(codes, nested_scales, strict=True)]) + offset
    numbers = ((blocks / scales[:, None]).unsqueeze(-1) - table).abs().argmin(-1)
    flat = numbers.flatten().to(torch.uint8)
    said = {"shape": list(weight.shape), "blocksize": 64, "nested_blocksize": 16, "nested_offset": offset}
    return {
        "weight": (flat[::2] << 4 | flat[1::2]).view(-1, 1),
        "weight.absmax": torch.cat(codes).to(torch.uint8),
        "weight.quant_map": table,
        "weight.nested_absmax": nested_scales,
        "weight.nested_quant_map": nested_table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8),
    }, (table[numbers] * scales[:, None]).view(weight.shape)


Writer = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]


def write(folder: Path, settings: dict[str, Any], writer_of: Callable[[str], Writer | None]) -> dict[str, Tensor]:
    """Quantize the matrices of layers in `folder`; return all tensors that the new ones stand for."""
    tensors = load_file(folder / "model.safetensors")
    plain, found = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        writer = writer_of(name) if weight.dim() == 2 and ("proj" in name or "experts." in name) else None
        if writer is None:
            continue
        parts, plain[name] = writer(weight)
        del found[name]
        module = name.removesuffix(".weight")
        found |= {f"{module}.{end}": part.contiguous() for end, part in parts.items()}
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return plain
