"""Reader of adapter folders in PEFT's format, which checks that an adapter's files are valid and supported."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from moiety_engine.errors import AdapterError
from moiety_engine.model.adapter_modules import MODULE, AdapterModules, Module, module_name
from moiety_engine.model.names.sublayers import stored_prefixes

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from moiety_engine.model.spec import ModelSpec

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_NAMES_SHOWN = 4
MAX_GAIN = 1e12  # of factors and scale together; trained adapters are below 1e4

_NAME = re.compile(r"(?:.*\.)?(?:layers|blocks)\.(\d{1,6})\.(.+)\.lora_([AB])\.weight")
_ALIASES = (
    ("norm_attn_norm.attn.", "self_attn."),
    (".Wqkv", ".qkv_proj"),
    ("self_attn.gate_proj", "self_attn.g_proj"),
    ("self_attn.out_proj", "self_attn.o_proj"),
    ("block_sparse_moe.", "mlp."),
    ("feed_forward.", "mlp."),
    ("mlp.shared_expert.", "mlp.shared_experts."),
    ("mlp.shared_mlp.", "mlp.shared_experts."),
    (".w1", ".gate_proj"),
    (".w3", ".up_proj"),
    (".w2", ".down_proj"),
)
_SUPPORTED = (
    "q_proj, k_proj, v_proj, o_proj and the output gate of attention, "
    "gate_proj, up_proj, down_proj of feed-forwards, experts and shared experts"
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


def read_adapter(folder: Path, spec: ModelSpec, *, max_rank: int, dtype: torch.dtype = torch.float32) -> AdapterModules:
    """Read the adapter in `folder`, whose factors are served in `dtype`. Raises AdapterError.

    Whether the shapes are those of the model is checked by `rank_factors`.
    """
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
    return AdapterModules(config.r, {module: (down, ups[module] * config.scale) for module, down in downs.items()})


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


def _halves(found: dict[str, Tensor], spec: ModelSpec) -> dict[tuple[Module, str], Tensor]:
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


def _module_of(spec: ModelSpec, layer: int, name: str) -> Module | None:
    """Return the module with this name in a layer of the checkpoint; None if adapters on it are not supported."""
    if not spec.block_starts:
        module = layer, _canonical(name)
        return module if layer < len(spec.layers) and MODULE.fullmatch(module[1]) else None
    for index, start in enumerate(spec.block_starts):
        if start not in (layer, layer - 1):
            continue
        for usual, stored in stored_prefixes(spec, index).items():
            if not f"{layer}.{name}.".startswith(stored):
                continue
            module = index, _canonical(f"{usual}{f'{layer}.{name}'.removeprefix(stored)}")
            return module if MODULE.fullmatch(module[1]) else None
    return None


def _canonical(module: str) -> str:
    for other, ours in _ALIASES:
        module = module.replace(other, ours)
    return module


def _check_pairs(downs: dict[Module, Tensor], ups: dict[Module, Tensor]) -> None:
    lonely = sorted(downs.keys() ^ ups.keys())
    if lonely:
        raise AdapterError(
            f"each module needs both lora_A and lora_B, but one is missing for {_shown(map(module_name, lonely))}"
        )


def _check_rank(downs: dict[Module, Tensor], ups: dict[Module, Tensor], rank: int) -> None:
    for module, down in downs.items():
        if down.shape[0] != rank or ups[module].shape[1] != rank:
            shapes = f"{tuple(down.shape)} and {tuple(ups[module].shape)}"
            raise AdapterError(
                f"{module_name(module)} has factors of shapes {shapes}, which do not have the rank {rank} of {CONFIG}"
            )


def _check_size(module: Module, down: Tensor, up: Tensor, scale: float, dtype: torch.dtype) -> None:
    """Raise AdapterError if the factors, or their outputs for inputs of magnitude 1, overflow in the model."""
    if not (down.to(dtype).isfinite().all() and (up * scale).to(dtype).isfinite().all()):
        raise AdapterError(
            f"{module_name(module)} has weights that are not finite in {dtype}, including the scale "
            "lora_alpha / r: train again or lower lora_alpha"
        )
    gain = float((up.double().abs() * abs(scale) @ down.double().abs().sum(dim=1)).max()) if up.numel() else 0.0
    if not gain <= MAX_GAIN:
        raise AdapterError(
            f"{module_name(module)} multiplies its input by up to {gain:.3g} (lora_B, lora_A and lora_alpha / r "
            f"together), more than {MAX_GAIN:.0e}: sums of squares would overflow; lower lora_alpha or train again"
        )


def _shown(names: Any) -> str:
    names = sorted(str(name)[:100] for name in names)
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + more
