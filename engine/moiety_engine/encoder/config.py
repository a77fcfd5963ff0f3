"""Dimensions, pooling and classification head of an encoder checkpoint, read from its JSON files. Imports no torch."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

from moiety_engine.errors import InvalidConfig
from moiety_engine.model.errors import ConfigError, UnsupportedModelError
from moiety_engine.pooling import Pooling, PoolingKind, read_json, read_pooling
from moiety_wire.engine_choices import NormalizeEmbeddings, PoolingChoice

if TYPE_CHECKING:
    from pathlib import Path

    from moiety_engine.config import EngineConfig

ENCODER_TYPES = ("bert", "roberta", "xlm-roberta", "camembert")  # the latter three have one structure
_HEAD = "ForSequenceClassification"
_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")


class ScoreActivation(StrEnum):
    """Function that turns the logits of a classification head into scores."""

    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"
    IDENTITY = "identity"


class EncoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An encoder. `labels` is empty where the checkpoint has no classification head.

    `first_position` is the position of an input's first token. With `padding_id`, positions do not count tokens with
    that id, as in RoBERTa; None: they count all.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    hidden_act: str
    norm_eps: float
    num_positions: int
    first_position: int
    padding_id: int | None
    num_segments: int
    max_context_tokens: int
    dtype: str
    pooling: Pooling
    labels: tuple[str, ...]
    activation: ScoreActivation


def is_encoder(folder: Path) -> bool:
    """Return whether the checkpoint's family is an encoder. Raises ConfigError."""
    return read_json(folder / "config.json").get("model_type") in ENCODER_TYPES


def read_encoder_spec(folder: Path, options: EngineConfig | None = None) -> EncoderSpec:
    """Read config.json and, where they exist, the files of sentence-transformers. `options` None: the defaults.

    Raises ConfigError, UnsupportedModelError and InvalidConfig.
    """
    config = read_json(folder / "config.json")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise UnsupportedModelError(
            f"{folder}: position_embedding_type {config['position_embedding_type']!r} is not supported; "
            "use a checkpoint with absolute positions"
        )
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise UnsupportedModelError(
            f"{folder}: an encoder that is configured as a decoder is not supported; use an encoder checkpoint"
        )
    hidden_act = config.get("hidden_act", "gelu")
    if hidden_act not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{folder}: hidden_act {hidden_act!r} is not supported; it must be one of {', '.join(_ACTIVATIONS)}"
        )
    has_head = any(name.endswith(_HEAD) for name in config.get("architectures") or ())
    labels = _labels(config) if has_head else ()
    try:
        num_positions = int(config.get("max_position_embeddings", 512))
        padding_id = None if config["model_type"] == "bert" else int(config.get("pad_token_id", 1))
        first_position = 0 if padding_id is None else padding_id + 1
        return EncoderSpec(
            family=config["model_type"],
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=int(config["num_attention_heads"]),
            intermediate_size=int(config["intermediate_size"]),
            hidden_act=hidden_act,
            norm_eps=float(config.get("layer_norm_eps", 1e-12)),
            num_positions=num_positions,
            first_position=first_position,
            padding_id=padding_id,
            num_segments=int(config.get("type_vocab_size", 2)),
            max_context_tokens=_context(folder, options, num_positions - first_position),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            pooling=_pooling(folder, options, has_head=has_head),
            labels=labels,
            activation=_activation(config, len(labels)),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise ConfigError(f"{folder / 'config.json'} is not a complete encoder configuration: {exc!r}") from exc


def _context(folder: Path, options: EngineConfig | None, most: int) -> int:
    """Return the largest number of tokens of an input: that of the options, or else of the checkpoint."""
    asked = None if options is None else options.max_context_tokens
    if asked is None:
        return min(most, int(read_json(folder / "sentence_bert_config.json").get("max_seq_length") or most))
    if asked > most:
        raise ConfigError(f"--max-context-tokens {asked} exceeds the model's {most} positions; lower it")
    return asked


def _pooling(folder: Path, options: EngineConfig | None, *, has_head: bool) -> Pooling:
    """Return the pooling; without files and options the mean, as sentence-transformers has it."""
    if not has_head:
        return read_pooling(folder, options, PoolingKind.MEAN)
    chosen = options is not None and (options.pooling, options.normalize_embeddings)
    if chosen and chosen != (PoolingChoice.AUTO, NormalizeEmbeddings.AUTO):
        raise InvalidConfig(
            f"--pooling and --normalize-embeddings: {folder} has a classification head and makes no embeddings; leave "
            "them out"
        )
    return Pooling(PoolingKind.CLS, normalizes=False)


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
