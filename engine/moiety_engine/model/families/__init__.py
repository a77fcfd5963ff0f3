"""Readers of a Hugging Face config.json into a ModelSpec, one module per group of related families.

They accept the keys of the original releases (`rope_theta`, `rope_scaling`, `num_experts`, `torch_dtype`) and those
that transformers 5 writes (`rope_parameters`, `num_local_experts`, `dtype`).
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from moiety_engine.model.checkpoint_formats.reading import read_quantization
from moiety_engine.model.errors import ConfigError, UnsupportedModelError
from moiety_engine.model.families.afmoe import afmoe, afmoe_features
from moiety_engine.model.families.aria import aria_text
from moiety_engine.model.families.cohere import cohere2_moe, cohere2_moe_features
from moiety_engine.model.families.config import Config, Features, checkpoint_dtype, quantization_settings, read_mtp
from moiety_engine.model.families.dbrx import dbrx, dbrx_config, dbrx_features
from moiety_engine.model.families.deepseek import (
    axk1,
    axk1_features,
    axk2,
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    glm4_moe_lite,
    glm_moe_dsa,
    mistral4,
    sarvam_mla,
)
from moiety_engine.model.families.deepseek_v4 import deepseek_v4, deepseek_v4_features
from moiety_engine.model.families.defaults import filled
from moiety_engine.model.families.dots import dots1
from moiety_engine.model.families.ernie import ernie4_5_moe, ernie_features
from moiety_engine.model.families.exaone import exaone_features, exaone_moe
from moiety_engine.model.families.falcon import falcon_h1, falcon_h1_features
from moiety_engine.model.families.gemma import gemma3, gemma3_features, gemma3_text_config
from moiety_engine.model.families.gemma4 import gemma4_features, gemma4_text
from moiety_engine.model.families.glm import glm4_moe, glm4v_text_config, solar_open
from moiety_engine.model.families.gpt_oss import gpt_oss
from moiety_engine.model.families.granite import (
    granite,
    granite_features,
    granitemoe,
    granitemoe_swa,
    granitemoehybrid,
    granitemoeshared,
)
from moiety_engine.model.families.hunyuan import hunyuan_v1_moe
from moiety_engine.model.families.hy import hy_v3
from moiety_engine.model.families.ignored import RecordingConfig, ignored_of
from moiety_engine.model.families.jamba import jamba
from moiety_engine.model.families.jetmoe import jetmoe, jetmoe_features
from moiety_engine.model.families.kimi import kimi_linear, kimi_linear_features
from moiety_engine.model.families.kolibri import kolibri1
from moiety_engine.model.families.laguna import laguna, mellum, mellum_features
from moiety_engine.model.families.lfm import lfm2_moe, lfm2_moe_features
from moiety_engine.model.families.ling import bailing_hybrid, bailing_hybrid_features, bailing_moe
from moiety_engine.model.families.llama import llama
from moiety_engine.model.families.llama4 import llama4_text
from moiety_engine.model.families.longcat import longcat_flash, longcat_flash_features
from moiety_engine.model.families.mimo import mimo_features, mimo_v2_flash
from moiety_engine.model.families.minimax import first_minimax_config, minimax, minimax_m2, minimax_m2_features
from moiety_engine.model.families.mistral import mistral
from moiety_engine.model.families.mixtral import mixtral
from moiety_engine.model.families.nemotron import nemotron_h, nemotron_h_features
from moiety_engine.model.families.olmoe import flex_olmo, olmoe
from moiety_engine.model.families.other_names import under_own_names
from moiety_engine.model.families.phimoe import phimoe, phimoe_features
from moiety_engine.model.families.qwen import qwen2, qwen2_moe, qwen3, qwen3_moe
from moiety_engine.model.families.qwen_next import qwen3_5, qwen3_5_moe, qwen3_next, qwen3_next_features
from moiety_engine.model.families.qwen_vl import qwen3_vl_moe, qwen3_vl_moe_features, qwen3_vl_moe_text_config
from moiety_engine.model.families.unsupported import UNSUPPORTED
from moiety_engine.model.families.wrapped import WRAPPERS, around_text, wrapped_text_config
from moiety_engine.model.families.zaya import zaya, zaya_features
from moiety_engine.model.quantization_formats import modelopt_settings
from moiety_engine.model.spec import LayerSpec, ModelSpec, NormSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from moiety_engine.model.checkpoint_formats.tensor_source import StoredQuantization

FAMILIES: dict[str, Callable[[Config, int], LayerSpec]] = {
    "afmoe": afmoe,
    "aria_text": aria_text,
    "axk1": axk1,
    "axk2": axk2,
    "bailing_hybrid": bailing_hybrid,
    "bailing_moe": bailing_moe,
    "bailing_moe_v2": bailing_moe,
    "cohere2_moe": cohere2_moe,
    "dbrx": dbrx,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_v32,
    "deepseek_v4": deepseek_v4,
    "dots1": dots1,
    "ernie4_5_moe": ernie4_5_moe,
    "exaone_moe": exaone_moe,
    "falcon_h1": falcon_h1,
    "flex_olmo": flex_olmo,
    "gemma3": gemma3,
    "gemma3_text": gemma3,
    "gemma4_text": gemma4_text,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": glm4_moe_lite,
    "glm_moe_dsa": glm_moe_dsa,
    "gpt_oss": gpt_oss,
    "granite": granite,
    "granitemoe": granitemoe,
    "granitemoe_swa": granitemoe_swa,
    "granitemoehybrid": granitemoehybrid,
    "granitemoeshared": granitemoeshared,
    "hunyuan_v1_moe": hunyuan_v1_moe,
    "hy_v3": hy_v3,
    "jamba": jamba,
    "jetmoe": jetmoe,
    "kimi_k2": deepseek_v3,
    "kimi_linear": kimi_linear,
    "kolibri1": kolibri1,
    "laguna": laguna,
    "lfm2_moe": lfm2_moe,
    "llama": llama,
    "llama4_text": llama4_text,
    "longcat_flash": longcat_flash,
    "mellum": mellum,
    "mimo_v2_flash": mimo_v2_flash,
    "minimax": minimax,
    "minimax_m2": minimax_m2,
    "mistral": mistral,
    "mistral4": mistral4,
    "mixtral": mixtral,
    "nemotron_h": nemotron_h,
    "olmoe": olmoe,
    "phimoe": phimoe,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen3_5_text": qwen3_5,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "qwen3_vl_moe": qwen3_vl_moe,
    "sarvam_mla": sarvam_mla,
    "sarvam_moe": glm4_moe,
    "solar_open": solar_open,
    "zaya": zaya,
}
# Families whose only special features outside the layers are those of multi-token prediction.
_WITH_MTP = (
    "axk2",
    "bailing_moe",
    "bailing_moe_v2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "hy_v3",
    "kimi_k2",
    "sarvam_mla",
    "sarvam_moe",
)
# Readers of a family's special features outside the layers.
WHOLE: dict[str, Callable[[Config], Features]] = {
    "afmoe": afmoe_features,
    "axk1": axk1_features,
    "bailing_hybrid": bailing_hybrid_features,
    "cohere2_moe": cohere2_moe_features,
    "dbrx": dbrx_features,
    "deepseek_v4": deepseek_v4_features,
    "ernie4_5_moe": ernie_features,
    "exaone_moe": exaone_features,
    "falcon_h1": falcon_h1_features,
    "gemma3": gemma3_features,
    "gemma3_text": gemma3_features,
    "gemma4_text": gemma4_features,
    "granite": granite_features,
    "granitemoe": granite_features,
    "granitemoe_swa": granite_features,
    "granitemoehybrid": granite_features,
    "granitemoeshared": granite_features,
    "jetmoe": jetmoe_features,
    "kimi_linear": kimi_linear_features,
    "lfm2_moe": lfm2_moe_features,
    "longcat_flash": longcat_flash_features,
    "mellum": mellum_features,
    "mimo_v2_flash": mimo_features,
    "minimax_m2": minimax_m2_features,
    "nemotron_h": nemotron_h_features,
    "phimoe": phimoe_features,
    "qwen3_5": qwen3_next_features,
    "qwen3_5_moe": qwen3_next_features,
    "qwen3_5_moe_text": qwen3_next_features,
    "qwen3_5_text": qwen3_next_features,
    "qwen3_next": qwen3_next_features,
    "qwen3_vl_moe": qwen3_vl_moe_features,
    "zaya": zaya_features,
    **{family: partial(read_mtp, read_layer=FAMILIES[family]) for family in _WITH_MTP},
}
_POSITIVE = {"vocab_size", "hidden_size", "max_position_embeddings"}
_SIZES = ("_size", "_heads", "_dim", "_experts")  # ends of the keys of other sizes, which may be zero
MAX_LAYERS = 10_000  # that a configuration may say; the deepest models have a few hundred
# Readers of the part of a config.json that describes the text model, if that is not the whole file.
TEXT_PART: dict[str, Callable[[Config], Config]] = {
    "dbrx": dbrx_config,
    "gemma3": gemma3_text_config,
    "qwen3_5": qwen3_vl_moe_text_config,
    "qwen3_5_moe": qwen3_vl_moe_text_config,
    "qwen3_vl_moe": qwen3_vl_moe_text_config,
}

# Readers of configurations under a `model_type` of their own, such as those of first releases, into those of a family.
FIRST_RELEASES: dict[str, Callable[[Config], Config]] = {
    "glm4v_moe_text": glm4v_text_config,
    "minimax_m1": first_minimax_config,
    "minimax_text_01": first_minimax_config,
}


def read_spec(folder: Path) -> ModelSpec:
    """Return the spec of the checkpoint in `folder`. Raises ConfigError or UnsupportedModelError."""
    return spec_from_config(_read(folder))


def ignored_keys(folder: Path) -> list[str]:
    """Return the keys of config.json that reading the spec ignores and that may matter. Raises like `read_spec`."""
    stated = _text_part(_read(folder))
    config = RecordingConfig(filled(stated, stated["model_type"]))
    _spec_of(config)
    return ignored_of(stated, config.seen)


def kv_cache_scheme(folder: Path) -> Any:
    """Return config.json's settings of a quantized KV cache; None if it has none. Raises like `read_spec`."""
    settings = quantization_settings(_text_part(_read(folder)))
    return settings.get("kv_cache_scheme") or settings.get("kv_cache_quant_algo")


def stored_quantization(folder: Path) -> StoredQuantization | None:
    """Return the quantization of the checkpoint in `folder`; None if it is not quantized. Raises like `read_spec`."""
    return read_quantization(quantization_settings(_text_part(_read(folder))), folder)


def _read(folder: Path) -> Config:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the folder of a Hugging Face checkpoint") from None
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be read as JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold one JSON object")
    if not quantization_settings(config) and (settings := modelopt_settings(folder)):
        config["quantization_config"] = settings
    return config


def spec_from_config(config: Config) -> ModelSpec:
    """Return the spec that a parsed config.json describes. Raises ConfigError or UnsupportedModelError."""
    stated = _text_part(config)
    with _invalid_values(stated["model_type"]):
        whole = filled(stated, stated["model_type"])
    return _spec_of(whole)


@contextmanager
def _invalid_values(family: str) -> Iterator[None]:
    """Raise ConfigError in place of what a value of another type or range than expected raises."""
    try:
        yield
    except KeyError as exc:
        raise ConfigError(f"config.json of a {family} model lacks the key {exc.args[0]!r}") from exc
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:
        raise ConfigError(f"config.json of a {family} model has an invalid value: {exc}") from exc


def _text_part(config: Config) -> Config:
    """Return the text model's configuration under the family's own key names.

    Raises UnsupportedModelError and ConfigError.
    """
    named = config.get("model_type")
    if not isinstance(named, str | None):
        raise ConfigError(f"the model_type {str(named)[:60]} of config.json is not a string")
    with _invalid_values(str(named)):
        return _under_own_names(config)


def _under_own_names(config: Config) -> Config:
    if config.get("model_type") in WRAPPERS:
        config = wrapped_text_config(config)
    if config.get("model_type") in FIRST_RELEASES:
        config = FIRST_RELEASES[config["model_type"]](config)
    family = config.get("model_type")
    if family in UNSUPPORTED:
        raise UnsupportedModelError(
            f"model family {family!r} is not supported, because it needs {UNSUPPORTED[family]}: serve it with another "
            "engine behind the gateway, or choose a model that `moiety models` lists"
        )
    if family not in FAMILIES:
        known = ", ".join(sorted([*FAMILIES, *WRAPPERS, *FIRST_RELEASES]))
        raise UnsupportedModelError(f"model family {family!r} is not supported; the known families are: {known}")
    text = TEXT_PART[family](config) if family in TEXT_PART else config
    return {**under_own_names(text, family), "model_type": family}


def _check_layer_types(config: Config) -> None:
    """Raise ConfigError if `layer_types` has more or fewer entries than the model has layers."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) != (num_layers := config["num_hidden_layers"]):
        raise ConfigError(
            f"config.json has {len(kinds)} layer_types for {num_layers} num_hidden_layers; give one for each layer"
        )


def _check_sizes(config: Config) -> None:
    """Raise ValueError for widths and numbers that no tensor can have."""
    for key, value in config.items():
        least = 1 if key in _POSITIVE else 0
        if least and value is not None and not isinstance(value, int):
            raise ValueError(f"{key} {value!r} must be a whole number")
        if (least or key.endswith(_SIZES)) and isinstance(value, int) and value < least:
            raise ValueError(f"{key} {value} must be at least {least}")


def _spec_of(config: Config) -> ModelSpec:
    family = config["model_type"]
    read_layer = FAMILIES[family]
    with _invalid_values(family):
        quantization = read_quantization(quantization_settings(config))
        for key in ("num_hidden_layers", "num_layers"):
            if config.get(key) is not None and not 0 < config[key] <= MAX_LAYERS:
                raise ValueError(f"{key} {config[key]} must be between 1 and {MAX_LAYERS:,}")
        _check_sizes(config)
        _check_layer_types(config)
        features: Features = {"tie_word_embeddings": bool(config["tie_word_embeddings"])}
        features |= WHOLE[family](config) if family in WHOLE else {}
        if "norm" not in features:
            features["norm"] = NormSpec(float(config["rms_norm_eps"]))
        starts = features.get("block_starts")
        num_layers = config["num_hidden_layers"] if starts is None else len(starts)
        spec = ModelSpec(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            max_context_tokens=config["max_position_embeddings"],
            checkpoint_dtype=checkpoint_dtype(config),
            layers=tuple(read_layer(config, index) for index in range(num_layers)),
            weight_format=None if quantization is None else quantization.form,
            **features,
        )
        if not spec.paged_layers:
            raise UnsupportedModelError(
                f"all {len(spec.layers)} layers of this {family} model are recurrent; models without a layer with "
                "attention are not supported: check layer_types"
            )
        return replace(spec, ignored_prefixes=spec.ignored_prefixes + around_text(config))
