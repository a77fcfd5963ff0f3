"""Reader of compressed-tensors checkpoints: integers and floats of several layouts, also several in one checkpoint.

A configuration has groups of layers, each with its layout, bits and scales. A group's targets are names of modules,
patterns of names ("re:…") or classes of modules ("Linear"), in this order of precedence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from moiety_engine.model.checkpoint_formats.float8 import float8_format, float8_source
from moiety_engine.model.checkpoint_formats.four_bit_floats import from_dense_mxfp4, kept_dense_mxfp4, nvfp4_source
from moiety_engine.model.checkpoint_formats.integers import (
    PACKED,
    SCALES,
    SHAPE,
    from_integers,
    kept_integers,
    unpacked,
)
from moiety_engine.model.checkpoint_formats.tensor_source import StoredQuantization, TensorSource
from moiety_engine.model.quantization_formats import refused
from moiety_kernels.quantization import DENSE_MXFP4, NVFP4, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

METHOD, PACKED_FORMAT, FLOAT_FORMAT, INT_FORMAT = (
    "compressed-tensors",
    "pack-quantized",
    "float-quantized",
    "int-quantized",
)
_NAIVE, _NVFP4, _MXFP4, _MXFP8 = "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
ZERO_POINTS, GROUP_INDEX, GLOBAL_SCALE = "_zero_point", "_g_idx", "_global_scale"
_IN_ORDER = (None, False, "weight", "static")  # groups of adjacent inputs; otherwise `_g_idx` assigns inputs to groups
_MX_GROUP = 32
_MAX_PATTERN = 1000  # characters


@dataclass(frozen=True, slots=True)
class Scheme:
    """Quantization of one group of layers. `form`: the format in which the kernels may read it, if there is one."""

    layout: str
    bits: int
    group: int | None
    symmetric: bool
    in_order: bool
    form: WeightFormat | None
    description: str


def compressed_tensors(settings: dict[str, Any]) -> StoredQuantization:
    """Return the quantization that the configuration describes. Raises UnsupportedModelError."""
    groups = list((settings.get("config_groups") or {}).values())
    if not groups or (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise refused(f"{METHOD} {settings.get('format')!r} ({'sparse' if groups else 'without config_groups'})")
    schemes = [_scheme(group, settings) for group in groups]
    targets = [(_targets(group), scheme) for group, scheme in zip(groups, schemes, strict=True)]
    form = next((one.form for one in schemes if one.form is not None and one.form.is_kept), None)
    name = f"{METHOD} {', '.join(dict.fromkeys(one.description for one in schemes))}"
    unused = (".input_scale", ".input_global_scale", ".input_zero_point", f".weight{ZERO_POINTS}")
    return StoredQuantization(name, form, partial(_sources, targets=targets, form=form), unused)


def _targets(group: dict[str, Any]) -> tuple[str, ...]:
    targets = tuple(map(str, group.get("targets") or ("Linear",)))
    for target in targets:
        try:
            if len(target) > _MAX_PATTERN:
                raise ValueError("too long")
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
        except (re.error, ValueError) as exc:
            raise refused(f"{METHOD} has a target {target[:60]!r} that is not a pattern ({exc})") from exc
    return targets


def _scheme(group: dict[str, Any], settings: dict[str, Any]) -> Scheme:
    weights = group.get("weights") or {}
    layout = str(group.get("format") or settings.get("format"))
    kind, bits, strategy = weights.get("type"), int(weights.get("num_bits") or 0), weights.get("strategy")
    if layout == _NAIVE:
        layout = FLOAT_FORMAT if kind == "float" else INT_FORMAT
    symmetric, in_order = bool(weights.get("symmetric", True)), weights.get("actorder") in _IN_ORDER
    inputs = None if strategy in ("channel", "tensor") else weights.get("group_size")
    described = _description(layout, weights, group.get("input_activations") or {})

    def scheme(form: WeightFormat | None, inputs: int | None = inputs) -> Scheme:
        return Scheme(layout, bits, inputs, symmetric, in_order, form, described)

    if kind == "float" and symmetric:
        if layout == FLOAT_FORMAT and bits == 8 and strategy in ("tensor", "channel"):
            return scheme(float8_format())
        if layout == FLOAT_FORMAT and bits == 8 and strategy == "block" and weights.get("block_structure"):
            return scheme(float8_format(weights["block_structure"]))
        if layout in (FLOAT_FORMAT, _MXFP8) and bits == 8 and strategy == "group" and inputs:
            return scheme(float8_format(group=int(inputs)))
        if layout == _NVFP4 and strategy == "tensor_group":
            return scheme(NVFP4)
        if layout == _MXFP4 and inputs == _MX_GROUP:
            return scheme(DENSE_MXFP4)
    readable = {PACKED_FORMAT: (2, 4, 8), INT_FORMAT: range(2, 9)}
    if kind == "int" and strategy in ("channel", "group", "tensor") and bits in readable.get(layout, ()):
        inputs = None if inputs is None else int(inputs)
        kept = bits == 4 or (bits == 8 and symmetric)
        ordered = not in_order and inputs is not None
        form = WeightFormat(f"int{bits}", bits, inputs, offsets=not symmetric, ordered=ordered)
        return scheme(form if kept else None, inputs)
    raise refused(f"{METHOD} {described}")


def _description(layout: str, weights: dict[str, Any], inputs: dict[str, Any]) -> str:
    """Return a readable description of a group's weights."""
    kind = f"{weights.get('num_bits')} bits, {weights.get('type')}, by {weights.get('strategy')}"
    more = [] if weights.get("symmetric", True) else ["asymmetric"]
    more += [f"activation ordering {weights['actorder']!r}"] if weights.get("actorder") else []
    more += [f"activations in {inputs.get('num_bits')} bits"] if inputs else []
    return f"{layout!r} ({', '.join([kind, *more])})"


def _sources(
    present: set[str], targets: list[tuple[tuple[str, ...], Scheme]], form: WeightFormat | None
) -> dict[str, TensorSource]:
    found = {}
    for name in present:
        plain = name.removesuffix(PACKED)
        if plain == name and plain + SCALES not in present:
            continue
        scheme = _of_module(plain.removesuffix(".weight"), targets)
        source = _source(name, plain, scheme, present)
        if scheme.form is None or scheme.form != form:
            source = TensorSource(source.names, source.make, widened=scheme.description)
        found[plain] = source
    return found


def _of_module(module: str, targets: list[tuple[tuple[str, ...], Scheme]]) -> Scheme:
    """Return the scheme of a module; that of the first group for modules that only classes of modules describe."""
    for some, scheme in targets:
        if any(target == module or module.endswith(f".{target}") for target in some):
            return scheme
    for some, scheme in targets:
        patterns = (target.removeprefix("re:") for target in some if target.startswith("re:"))
        if any(re.match(pattern, module) for pattern in patterns):
            return scheme
    classes = (scheme for some, scheme in targets if any(target.isidentifier() for target in some))
    return next(classes, targets[0][1])


def _source(name: str, plain: str, scheme: Scheme, present: set[str]) -> TensorSource:
    scale = plain + SCALES
    if scheme.layout in (FLOAT_FORMAT, _MXFP8):
        assert scheme.form is not None
        return float8_source(name, scale, scheme.form)
    if scheme.layout == _NVFP4:
        return nvfp4_source(name, scale, plain + GLOBAL_SCALE, divides=True)
    if scheme.layout == _MXFP4:
        return TensorSource((name, scale), from_dense_mxfp4, kept_dense_mxfp4, is_narrow=True)
    packed = scheme.layout == PACKED_FORMAT
    names = [name, scale, *([plain + SHAPE] if packed else [])]
    names += [] if scheme.symmetric else [plain + ZERO_POINTS]
    ordered = not scheme.in_order and plain + GROUP_INDEX in present
    names += [plain + GROUP_INDEX] if ordered else []
    make = partial(_made, scheme=scheme, ordered=ordered)
    keep = None if scheme.form is None else partial(_kept, scheme=scheme, ordered=ordered)
    order = plain + GROUP_INDEX if ordered and keep is not None else ""
    return TensorSource(tuple(names), make, keep, is_narrow=keep is not None, order=order)


def _made(*parts: Tensor, scheme: Scheme, ordered: bool) -> Tensor:
    order = parts[-1] if ordered else None
    numbers, scales, zeros = _numbers(parts[:-1] if ordered else parts, scheme)
    return from_integers(numbers, scales, zeros, scheme.bits, scheme.group, order)


def _kept(*parts: Tensor, scheme: Scheme, ordered: bool) -> tuple[Tensor, Tensor]:
    assert scheme.form is not None
    order = parts[-1] if ordered else None
    return kept_integers(*_numbers(parts[:-1] if ordered else parts, scheme), scheme.form, order)


def _numbers(parts: tuple[Tensor, ...], scheme: Scheme) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (unsigned numbers [N, K], scales [N, G], zero points [N, G] or None)."""
    half = 2 ** (scheme.bits - 1)
    zeros = None if scheme.symmetric else parts[-1]
    if scheme.layout == PACKED_FORMAT:
        rows, width = parts[2].tolist()
        if tuple(parts[0].shape) != (rows, -(-width * scheme.bits // 32)):
            raise ValueError(f"it has another shape than {rows} by {width} packed")
        numbers = unpacked(parts[0], scheme.bits)[:, :width]
        zeros = None if zeros is None else unpacked(zeros.T, scheme.bits)[:, :rows].T
    else:
        numbers = _unsigned(parts[0], half)
        rows = numbers.shape[0]
        zeros = None if zeros is None else _unsigned(zeros, half).reshape(-1, zeros.shape[-1] if zeros.dim() > 1 else 1)
    scales = parts[1].reshape(-1, parts[1].shape[-1] if parts[1].dim() > 1 else 1)
    return numbers, _of_rows(scales, rows), None if zeros is None else _of_rows(zeros, rows)


def _of_rows(scales: Tensor, rows: int) -> Tensor:
    """Return scales [N, G]; that of a matrix is repeated."""
    return scales.expand(rows, -1) if scales.numel() == 1 else scales


def _unsigned(numbers: Tensor, half: int) -> Tensor:
    if numbers.dtype is not torch.int8:
        raise ValueError(f"the values are {numbers.dtype}, not int8")
    return (numbers.short() + half).to(torch.uint8)
