"""Dimensions, pooling and classification head of an encoder checkpoint, read from its JSON files. Imports no torch."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

from moiety_engine.model.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from pathlib import Path

ENCODER_TYPES = ("bert",)
_HEAD = "ForSequenceClassification"
_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


class PoolingKind(StrEnum):
    """How the hidden states of an input become one vector."""

    CLS = "cls"  # the first token's
    MEAN = "mean"
    MAX = "max"
    LAST = "last"


class ScoreActivation(StrEnum):
    """Function that turns the logits of a classification head into scores."""

    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"
    IDENTITY = "identity"


class EncoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An encoder. `labels` is empty where the checkpoint has no classification head."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    hidden_act: str
    norm_eps: float
    num_positions: int
    num_segments: int
    max_context_tokens: int
    dtype: str
    pooling: PoolingKind
    labels: tuple[str, ...]
    activation: ScoreActivation


def is_encoder(folder: Path) -> bool:
    """Return whether the checkpoint's family is an encoder. Raises ConfigError."""
    return _read(folder / "config.json").get("model_type") in ENCODER_TYPES


def read_encoder_spec(folder: Path, max_context_tokens: int | None) -> EncoderSpec:
    """Read config.json and, where they exist, the files of sentence-transformers.

    Raises ConfigError and UnsupportedModelError.
    """
    config = _read(folder / "config.json")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise UnsupportedModelError(
            f"{folder}: position_embedding_type {config['position_embedding_type']!r} is not supported; "
            "use a checkpoint with absolute positions"
        )
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise UnsupportedModelError(f"{folder}: a BERT decoder is not supported; use an encoder checkpoint")
    hidden_act = config.get("hidden_act", "gelu")
    if hidden_act not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{folder}: hidden_act {hidden_act!r} is not supported; it must be one of {', '.join(_ACTIVATIONS)}"
        )
    has_head = any(name.endswith(_HEAD) for name in config.get("architectures") or ())
    labels = _labels(config) if has_head else ()
    most = int(config.get("max_position_embeddings", 512))
    limits = [most, _read(folder / "sentence_bert_config.json").get("max_seq_length") or most]
    if max_context_tokens is not None:
        if max_context_tokens > most:
            raise ConfigError(
                f"--max-context-tokens {max_context_tokens} exceeds the model's {most} positions; lower it"
            )
        limits = [max_context_tokens]
    try:
        return EncoderSpec(
            family=config["model_type"],
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=int(config["num_attention_heads"]),
            intermediate_size=int(config["intermediate_size"]),
            hidden_act=hidden_act,
            norm_eps=float(config.get("layer_norm_eps", 1e-12)),
            num_positions=most,
            num_segments=int(config.get("type_vocab_size", 2)),
            max_context_tokens=min(limits),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            pooling=_pooling(folder),
            labels=labels,
            activation=_activation(config, len(labels)),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise ConfigError(f"{folder / 'config.json'} is not a complete BERT configuration: {exc!r}") from exc


def _labels(config: dict[str, Any]) -> tuple[str, ...]:
    named = config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    return tuple(str(named[key]) for key in sorted(named, key=int))


def _activation(config: dict[str, Any], num_labels: int) -> ScoreActivation:
    """Return the activation that sentence-transformers would use, or else that of the problem type."""
    own = (config.get("sentence_transformers") or {}).get("activation_fn")
    name = str(own or config.get("sbert_ce_default_activation_function") or "").rpartition(".")[2].lower()
    if name in list(ScoreActivation):
        return ScoreActivation(name)
    if name:
        raise UnsupportedModelError(f"the activation {name!r} of the classification head is not supported")
    match config.get("problem_type"):
        case "regression":
            return ScoreActivation.IDENTITY
        case "multi_label_classification":
            return ScoreActivation.SIGMOID
        case _:
            return ScoreActivation.SIGMOID if num_labels == 1 else ScoreActivation.SOFTMAX


def _pooling(folder: Path) -> PoolingKind:
    """Return the pooling of sentence-transformers' modules; mean without them, as that package does."""
    modules = _read(folder / "modules.json", kind=list)
    kinds = [str(one.get("type", "")).rpartition(".")[2] for one in modules]
    if unknown := [kind for kind in kinds if kind not in _KNOWN_MODULES]:
        raise UnsupportedModelError(
            f"{folder / 'modules.json'}: the modules {', '.join(unknown)} are not supported; "
            f"supported are {', '.join(_KNOWN_MODULES)}"
        )
    if "Pooling" not in kinds:
        return PoolingKind.MEAN
    pooling = _read(folder / str(modules[kinds.index("Pooling")].get("path", "")) / "config.json")
    names = {"cls_token": "cls", "mean_tokens": "mean", "mean_sqrt_len_tokens": "mean", "max_tokens": "max"}
    names["lasttoken"] = "last"  # a mean divided by a root of the length has the same direction
    given = pooling.get("pooling_mode")
    chosen = [given] if isinstance(given, str) else [
        names.get(name.removeprefix("pooling_mode_"), name)
        for name, is_on in pooling.items()
        if name.startswith("pooling_mode_") and is_on is True
    ]  # fmt: skip
    found = ["last" if one == "lasttoken" else one for one in chosen]
    if len(found) != 1 or found[0] not in list(PoolingKind):
        raise UnsupportedModelError(
            f"{folder}: the pooling {', '.join(map(str, found)) or '(none)'} is not supported; "
            f"it must be one of {', '.join(PoolingKind)}"
        )
    return PoolingKind(found[0])


def _read(path: Path, kind: type = dict) -> Any:
    """Return the JSON value in the file, empty if there is none. Raises ConfigError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return kind()
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be read ({exc}); download the checkpoint again") from exc
    if not isinstance(found, kind):
        raise ConfigError(f"{path} must be a JSON {'object' if kind is dict else 'list'}")
    return found
