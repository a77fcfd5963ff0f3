"""Pooling of embeddings: the options, and what the files of sentence-transformers in a checkpoint say.

Imports no torch.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from moiety_engine.errors import InvalidConfig
from moiety_engine.model.errors import ConfigError, UnsupportedModelError
from moiety_wire.engine_choices import NormalizeEmbeddings, PoolingChoice

if TYPE_CHECKING:
    from moiety_engine.config import EngineConfig

_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
_MODES = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "max_tokens": "max",
    "lasttoken": "last",
}


class PoolingKind(StrEnum):
    """Method that reduces the hidden states of an input to one vector."""

    CLS = "cls"  # the first token's
    MEAN = "mean"
    MEAN_SQRT_LEN = "mean_sqrt_len"  # their sum divided by the root of their number
    MAX = "max"
    LAST = "last"


class Pooling(msgspec.Struct, frozen=True):
    """Pooling of a model. `is_default`: neither the checkpoint nor an option names its kind."""

    kind: PoolingKind
    normalizes: bool  # vectors are divided by their length
    is_default: bool = False


def read_pooling(folder: Path, config: EngineConfig | None, default: PoolingKind) -> Pooling:
    """Return the pooling of the options, or else of modules.json, or else `default` with unit vectors.

    Raises ConfigError, and UnsupportedModelError for modules that are not known.
    """
    choice = PoolingChoice.AUTO if config is None else config.pooling
    normalize = NormalizeEmbeddings.AUTO if config is None else config.normalize_embeddings
    modules = read_json(folder / "modules.json", kind=list)
    kinds = [str(one.get("type", "")).rpartition(".")[2] for one in modules if isinstance(one, dict)]
    if unknown := [kind for kind in kinds if kind not in _KNOWN_MODULES]:
        raise UnsupportedModelError(
            f"{folder / 'modules.json'}: the modules {', '.join(unknown)} are not supported; "
            f"supported are {', '.join(_KNOWN_MODULES)}"
        )
    is_default = False
    if choice is not PoolingChoice.AUTO:
        kind = PoolingKind(choice.value)
    elif "Pooling" in kinds:
        kind = _kind_of(folder / str(modules[kinds.index("Pooling")].get("path", "")) / "config.json")
    else:
        kind, is_default = default, True
    if normalize is NormalizeEmbeddings.AUTO:
        return Pooling(kind, not kinds or "Normalize" in kinds, is_default)
    return Pooling(kind, normalize is NormalizeEmbeddings.ON, is_default)


def decoder_embeds(config: EngineConfig) -> bool:
    """Return whether a decoder's embeddings, the unit vectors of last tokens, are those that its checkpoint names.

    Logs the reason if not. Raises InvalidConfig for an option that asks for others.
    """
    if config.pooling not in (PoolingChoice.AUTO, PoolingChoice.LAST):
        raise InvalidConfig(
            f"--pooling {config.pooling} is available for encoder models only, since a decoder does not compute the "
            "hidden states of cached tokens: use --pooling last, or leave it out"
        )
    if config.normalize_embeddings is NormalizeEmbeddings.OFF:
        raise InvalidConfig(
            "--normalize-embeddings off is available for encoder models only: embeddings of decoders are unit "
            "vectors; leave it out"
        )
    try:
        pooling = read_pooling(Path(config.model), config, PoolingKind.LAST)
    except (ConfigError, UnsupportedModelError) as exc:
        problem = str(exc)
    else:
        if pooling.kind is PoolingKind.LAST and pooling.normalizes:
            return True
        if pooling.kind is PoolingKind.LAST:
            problem = f"{config.model} has no Normalize module, but embeddings of decoders are unit vectors"
        else:
            problem = f"{config.model} names the pooling {pooling.kind}, which is available for encoder models only"
    advice = "for unit vectors of the last token all the same, set --pooling last and --normalize-embeddings on"
    structlog.get_logger().warning("embeddings_not_available", reason=problem, advice=advice)
    return False


def _kind_of(path: Path) -> PoolingKind:
    """Return the kind that the configuration of a Pooling module names; mean if it names none, as that package does."""
    pooling = read_json(path)
    given = pooling.get("pooling_mode")
    if isinstance(given, str):
        chosen = [given]
    elif isinstance(given, list | tuple):
        chosen = [str(one) for one in given]
    else:
        prefix = "pooling_mode_"
        chosen = [name.removeprefix(prefix) for name, is_on in pooling.items() if name.startswith(prefix) and is_on]
        if not chosen and not any(name.startswith(prefix) for name in pooling):
            chosen = ["mean"]
    found = [_MODES.get(one, one) for one in chosen]
    if len(found) != 1 or found[0] not in list(PoolingKind):
        raise UnsupportedModelError(
            f"{path}: the pooling {', '.join(found) or '(none)'} is not supported; it must be one of "
            f"{', '.join(PoolingKind)}; --pooling replaces it"
        )
    return PoolingKind(found[0])


def read_json(path: Path, kind: type = dict) -> Any:
    """Return the JSON value in the file, empty if there is none. Raises ConfigError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return kind()
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{path} cannot be read ({exc}); download the checkpoint again") from exc
    if not isinstance(found, kind):
        raise ConfigError(f"{path} must be a JSON {'object' if kind is dict else 'list'}")
    return found
