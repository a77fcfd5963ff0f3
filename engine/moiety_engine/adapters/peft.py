"""Reader of adapter folders in PEFT's format that checks that an adapter fits the model.

E experts, P parts of a fused product, r rank, D input and N output width.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from moiety_engine.errors import AdapterError
from moiety_engine.model.adapter_stacks import AdapterWeights, Product, form_of
from moiety_engine.model.names import placements
from moiety_engine.model.names.sublayers import stored_prefixes
from moiety_engine.model.names.tensor_mapping import whole
from moiety_engine.model.spec import AttentionSpec
from moiety_engine.model.weights import AttentionWeights, DenseWeights, ModelWeights, MoeWeights, allocate

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from moiety_engine.model.adapter_stacks import Key
    from moiety_engine.model.names.tensor_mapping import Shares, TensorMapping
    from moiety_engine.model.spec import ModelSpec

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_NAMES_SHOWN = 4
MAX_GAIN = 1e12  # of factors and scale together; trained adapters are below 1e4

_NAME = re.compile(r"(?:.*\.)?(?:layers|blocks)\.(\d{1,6})\.(.+)\.lora_([AB])\.weight")
_MODULE = re.compile(r"(?:self_attn\.(q|k|v|o|g|qkv)_proj|mlp\.(?:experts\.(\d{1,6})\.)?(gate|up|down)_proj)")
_ALIASES = (
    ("norm_attn_norm.attn.", "self_attn."),
    (".Wqkv", ".qkv_proj"),
    ("self_attn.gate_proj", "self_attn.g_proj"),
    ("self_attn.out_proj", "self_attn.o_proj"),
    ("block_sparse_moe.", "mlp."),
    ("feed_forward.", "mlp."),
    (".w1", ".gate_proj"),
    (".w3", ".up_proj"),
    (".w2", ".down_proj"),
)
_FUSED = "self_attn.qkv_proj"
_PLACES: dict[str, tuple[Product, int | slice]] = {  # product of a module's rows, and its part, or all of its parts
    "qkv": (Product.QKV, slice(None)),
    "q": (Product.QKV, 0),
    "k": (Product.QKV, 1),
    "v": (Product.QKV, 2),
    "o": (Product.OUTPUT, 0),
    "g": (Product.OUTPUT_GATE, 0),
    "gate": (Product.GATE_UP, 0),
    "up": (Product.GATE_UP, 1),
    "down": (Product.DOWN, 0),
}
_SUPPORTED = (
    "q_proj, k_proj, v_proj, o_proj and the output gate of attention, "
    "gate_proj, up_proj, down_proj of feed-forwards and experts"
)
_SUPPORTED_INITIALIZATIONS = (
    True,
    False,
    "gaussian",
    "orthogonal",
    "eva",
)  # others also change the base model's weights


class _Config(msgspec.Struct):
    """Relevant entries of adapter_config.json."""

    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    init_lora_weights: Any = True
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    modules_to_save: list[str] | None = None
    target_parameters: list[str] | None = None

    @property
    def scale(self) -> float:
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def read_adapter(folder: Path, spec: ModelSpec, *, max_rank: int, dtype: torch.dtype = torch.float32) -> AdapterWeights:
    """Read the adapter in `folder`, whose factors are served in `dtype`. Raises AdapterError."""
    config = _read_config(folder, max_rank)
    try:
        with safe_open(folder / TENSORS, framework="pt") as file:
            found = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - not a mapping
    except FileNotFoundError as exc:
        raise AdapterError(f"the adapter has no {TENSORS}: save it with safe_serialization=True") from exc
    except (SafetensorError, OSError, RuntimeError) as exc:  # torch raises RuntimeError for types it cannot convert
        raise AdapterError(f"{TENSORS} cannot be read: {exc}") from exc
    halves = _halves(found, spec)
    downs = {module: halves[module, "A"] for module, half in halves if half == "A"}
    ups = {module: halves[module, "B"] for module, half in halves if half == "B"}
    _check_pairs(downs, ups)
    _check_rank(downs, ups, config.r)
    for module, down in downs.items():
        _check_size(module, down, ups[module], config.scale, dtype)
    return AdapterWeights(config.r, _fused(spec, downs, ups, config))


def _read_config(folder: Path, max_rank: int) -> _Config:
    try:
        text = (folder / CONFIG).read_bytes()
        if len(text) > MAX_CONFIG_BYTES:
            raise AdapterError(
                f"{CONFIG} has {len(text)} bytes, more than the largest size of {MAX_CONFIG_BYTES}: check "
                "that it is an adapter's configuration"
            )
        config = msgspec.json.decode(text, type=_Config)
    except FileNotFoundError as exc:
        raise AdapterError(f"the adapter has no {CONFIG}: save the adapter with PEFT's save_pretrained") from exc
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise AdapterError(f"{CONFIG} cannot be read: {exc}") from exc
    refusals = {
        f"peft_type {config.peft_type} is not supported: use a LORA adapter": config.peft_type != "LORA",
        "DoRA is not supported: train without use_dora, or merge the adapter into the checkpoint": config.use_dora,
        "biases are not supported: train with bias='none'": config.bias != "none" or config.lora_bias,
        "fan_in_fan_out is not supported: no supported model family uses it": config.fan_in_fan_out,
        "different ranks for modules (rank_pattern) are not supported: train with one rank": bool(config.rank_pattern),
        "different scales for modules (alpha_pattern) are not supported: train with one lora_alpha": bool(
            config.alpha_pattern
        ),
        "replaced modules (modules_to_save) are not supported: train without modules_to_save": bool(
            config.modules_to_save
        ),
        "target_parameters is not supported: name the experts' projections in target_modules": bool(
            config.target_parameters
        ),
        f"init_lora_weights={config.init_lora_weights!r} changes the base model too: convert it to a plain LoRA when "
        "saving (path_initial_model_for_weight_conversion)": config.init_lora_weights not in _SUPPORTED_INITIALIZATIONS,
        f"the rank r must be at least 1, not {config.r}": config.r < 1,
        (
            f"the rank {config.r} is above this engine's --max-adapter-rank {max_rank}: train with a lower "
            "rank, or raise --max-adapter-rank"
        ): config.r > max_rank,
        f"lora_alpha must be a finite number, not {config.lora_alpha}": not math.isfinite(config.lora_alpha),
    }
    for message, applies in refusals.items():
        if applies:
            raise AdapterError(message)
    return config


_Module = tuple[int, str]  # layer, name within the layer in this engine's form


def _halves(found: dict[str, Tensor], spec: ModelSpec) -> dict[tuple[_Module, str], Tensor]:
    """Return the tensors by module and half ("A" or "B"). Raises AdapterError for tensors of no served module."""
    halves, unknown, odd = {}, [], []
    for name, tensor in found.items():
        match = _NAME.fullmatch(name)
        module = _module_of(spec, int(match[1]), match[2]) if match else None
        if match is None or module is None:
            unknown.append(name)
        elif tensor.dim() != 2 or not torch.isfinite(tensor).all():
            odd.append(name)
        else:
            halves[module, match[3]] = tensor
    if unknown:
        raise AdapterError(
            f"the adapter has tensors of unsupported modules: {_shown(unknown)}; supported modules are {_SUPPORTED}"
        )
    if odd:
        raise AdapterError(f"these tensors are not matrices of finite numbers: {_shown(odd)}")
    if not halves:
        raise AdapterError("the adapter has no tensors: save it after training")
    return halves


def _module_of(spec: ModelSpec, layer: int, name: str) -> _Module | None:
    """Return the module with this name in a layer of the checkpoint; None if adapters on it are not supported."""
    if not spec.block_starts:
        module = layer, _canonical(name)
        return module if layer < len(spec.layers) and _MODULE.fullmatch(module[1]) else None
    for index, start in enumerate(spec.block_starts):
        if start not in (layer, layer - 1):
            continue
        for usual, stored in stored_prefixes(spec, index).items():
            if not f"{layer}.{name}.".startswith(stored):
                continue
            module = index, _canonical(f"{usual}{f'{layer}.{name}'.removeprefix(stored)}")
            return module if _MODULE.fullmatch(module[1]) else None
    return None


def _weight_name(spec: ModelSpec, module: _Module) -> str:
    """Return the name of the module's weight among the placements of a model without a checkpoint."""
    index, name = module
    stored = f"{index}.{name}"
    if spec.block_starts:
        prefixes = stored_prefixes(spec, index)
        usual = next((one for one in prefixes if name.startswith(one)), None)
        stored = stored if usual is None else prefixes[usual] + name.removeprefix(usual)
    return f"model.layers.{stored}.weight"


def _block_names(spec: ModelSpec) -> set[str]:
    """Return prefixes of feed-forward tensors, by which placements use the engine's names of modules."""
    if not spec.block_starts:
        return {f"model.layers.{index}.mlp." for index in range(len(spec.layers))}
    prefixes = (stored_prefixes(spec, index).get("mlp.") for index in range(len(spec.layers)))
    return {f"model.layers.{stored}" for stored in prefixes if stored is not None}


def _canonical(module: str) -> str:
    for other, ours in _ALIASES:
        module = module.replace(other, ours)
    return module


def _check_pairs(downs: dict[_Module, Tensor], ups: dict[_Module, Tensor]) -> None:
    lonely = sorted(downs.keys() ^ ups.keys())
    if lonely:
        raise AdapterError(
            f"each module needs both lora_A and lora_B, but one is missing for {_shown(map(_module_name, lonely))}"
        )


def _check_rank(downs: dict[_Module, Tensor], ups: dict[_Module, Tensor], rank: int) -> None:
    for module, down in downs.items():
        if down.shape[0] != rank or ups[module].shape[1] != rank:
            shapes = f"{tuple(down.shape)} and {tuple(ups[module].shape)}"
            raise AdapterError(
                f"{_module_name(module)} has factors of shapes {shapes}, which do not have the rank {rank} of {CONFIG}"
            )


def _check_size(module: _Module, down: Tensor, up: Tensor, scale: float, dtype: torch.dtype) -> None:
    """Raise AdapterError if the factors, or their outputs for inputs of magnitude 1, overflow in the model."""
    if not (down.to(dtype).isfinite().all() and (up * scale).to(dtype).isfinite().all()):
        raise AdapterError(
            f"{_module_name(module)} has weights that are not finite in {dtype}, including the scale "
            "lora_alpha / r: train again or lower lora_alpha"
        )
    gain = float((up.double().abs() * abs(scale) @ down.double().abs().sum(dim=1)).max()) if up.numel() else 0.0
    if not gain <= MAX_GAIN:
        raise AdapterError(
            f"{_module_name(module)} multiplies its input by up to {gain:.3g} (lora_B, lora_A and lora_alpha / r "
            f"together), more than {MAX_GAIN:.0e}: sums of squares would overflow; lower lora_alpha or train again"
        )


def _fused(
    spec: ModelSpec, downs: dict[_Module, Tensor], ups: dict[_Module, Tensor], config: _Config
) -> dict[Key, tuple[Tensor, Tensor]]:
    """Return the factors of the products as this engine fuses them.

    The position of output rows follows from the checkpoint's tensor mapping: an [outputs, rank] matrix is placed like
    the weight.
    """
    rank = config.r
    outputs = allocate(
        spec, device=torch.device("cpu"), dtype=torch.float32, product_dtype=torch.float32, groups=lambda _: rank
    )
    places = placements(spec, outputs, _block_names(spec))
    of_key: dict[Key, list[_Module]] = defaultdict(list)
    for of_layer, name in downs:
        for product in _products_of(spec, of_layer, name):
            of_key[of_layer, product].append((of_layer, name))
    fused = {}
    for (layer, product), modules in of_key.items():
        form = form_of(spec.layers[layer], product, spec.hidden_size)
        if form is None:
            raise AdapterError(
                f"adapters on {_module_name(modules[0])} of a {spec.family} model are not supported: train without it"
            )
        up_ENr = _output_of(outputs, layer, product)
        up_ENr.zero_()
        down_EPrD = torch.zeros(form.num_experts, len(form.widths), rank, form.width)
        for module in modules:
            place = places.get(_weight_name(spec, module))
            if module[1] == _FUSED and _in_order(spec.layers[layer].attention):
                place = whole(up_ENr)
            _check_shapes(module, place, downs[module], ups[module], form.width, rank)
            assert place is not None
            place.fill(ups[module] * config.scale)
            own_product, part, expert = _place_of(module[1])
            down_EPrD[expert, part if product is own_product else 0] = downs[module]
        fused[layer, product] = down_EPrD, up_ENr.view(form.num_experts, -1, rank).mT.contiguous()
    return fused


def _in_order(attention: object) -> bool:
    """Return whether the rows of queries, keys and values are in the weight as a checkpoint would join them."""
    if not isinstance(attention, AttentionSpec) or attention.rope.interleaved:
        return False
    return attention.gate is None or not attention.gate.in_query_projection


def _check_shapes(
    module: _Module, place: TensorMapping | Shares | None, down: Tensor, up: Tensor, width: int, rank: int
) -> None:
    if place is None:
        raise AdapterError(
            f"the model has no module {_module_name(module)}: check that the adapter was trained on this model"
        )
    if down.shape != (rank, width) or up.shape != place.shape:
        wanted = f"{(rank, width)} and {place.shape}"
        shapes = f"{tuple(down.shape)} and {tuple(up.shape)}"
        raise AdapterError(
            f"{_module_name(module)} has factors of shapes {shapes}, but the model needs {wanted}: "
            "check that the adapter was trained on this model"
        )


def _place_of(module: str) -> tuple[Product, int | slice, int]:
    """Return the product, the part of it or all of its parts, and the expert of a module."""
    match = _MODULE.fullmatch(module)
    assert match is not None, "unknown modules are rejected before"
    product, part = _PLACES[match[1] or match[3]]
    return product, part, int(match[2] or 0)


def _products_of(spec: ModelSpec, layer: int, module: str) -> list[Product]:
    """Return the products that a module's rows belong to: queries, for instance, may be projected with a gate."""
    product, part, _ = _place_of(module)
    attention = spec.layers[layer].attention
    gate = attention.gate if isinstance(attention, AttentionSpec) else None
    with_gate = gate is not None and gate.in_query_projection and (product, part) == _PLACES["q"]
    return [product, Product.OUTPUT_GATE] if with_gate else [product]


def _output_of(outputs: ModelWeights, layer: int, product: Product) -> Tensor:
    attention, ffn = outputs.layers[layer].attention, outputs.layers[layer].ffn
    if product in (Product.QKV, Product.OUTPUT_GATE, Product.OUTPUT):
        assert isinstance(attention, AttentionWeights)
        of_attention = {Product.QKV: attention.qkv_CD, Product.OUTPUT_GATE: attention.gate_CD}
        found = of_attention.get(product, attention.output_DC)
    elif isinstance(ffn, MoeWeights):
        found = ffn.gate_up_E2FD if product is Product.GATE_UP else ffn.down_EDF
    else:
        assert isinstance(ffn, DenseWeights)
        found = ffn.gate_up_2FD if product is Product.GATE_UP else ffn.down_DF
    assert isinstance(found, torch.Tensor)
    return found


def _module_name(module: _Module) -> str:
    return f"layers.{module[0]}.{module[1]}"


def _shown(names: Any) -> str:
    names = sorted(str(name)[:100] for name in names)
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + more
