"""Text files of a model folder in Hugging Face's format.

The module reads files and knows nothing else about tokens; weights and model dimensions belong to the engine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moiety_text.errors import ModelFilesUnusable
from moiety_text.tokenizer import Tokenizer
from moiety_text.tokenizer_formats.files import converted_tokenizer

# Sampling parameters that generation_config.json may set, and their least and greatest values.
SAMPLING_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1.0, 2.0**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 100.0),
}


@dataclass(frozen=True)
class TextModel:
    tokenizer_json: str
    chat_template: str  # "" if the model has none
    special_tokens: dict[str, str]  # bos_token, eos_token … by the template's names
    eos_token_ids: tuple[int, ...]  # ascending; empty if no file names one
    sampling_defaults: dict[str, float] = field(default_factory=dict)  # of generation_config.json, by SAMPLING_RANGES


def read_tokenizer_json(folder: Path) -> str:
    """Return the text of a model folder's tokenizer.json, or one made of a sentencepiece or tiktoken file.

    Raises ModelFilesUnusable.
    """
    if not folder.is_dir():
        raise ModelFilesUnusable(f"{folder} is not a folder; name the folder of a checkpoint in Hugging Face's format")
    tokenizer_json = _read_text(folder / "tokenizer.json")
    if tokenizer_json is None:
        config, added = _read_object(folder / "tokenizer_config.json"), _read_object(folder / "added_tokens.json")
        tokenizer_json = converted_tokenizer(folder, config, added)
    if tokenizer_json is None:
        raise ModelFilesUnusable(
            f"{folder} has no tokenizer.json, tokenizer.model (sentencepiece) or tiktoken.model; create the first from "
            "its other tokenizer files with transformers.AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )
    return tokenizer_json


def read_text_model(folder: Path) -> TextModel:
    """Read the text side of a model folder.

    Reads tokenizer.json, or else a sentencepiece or tiktoken file, tokenizer_config.json, chat_template.jinja,
    additional_chat_templates/*.jinja, the end-of-sequence ids of generation_config.json, config.json and the tokenizer,
    and the sampling parameters of generation_config.json. Raises ModelFilesUnusable, UnusableTokenizer.
    """
    tokenizer_json = read_tokenizer_json(folder)
    config = _read_object(folder / "tokenizer_config.json")
    tokenizer = Tokenizer.from_json(tokenizer_json)
    mapped, configured = _special_tokens(_read_object(folder / "special_tokens_map.json")), _special_tokens(config)
    # as in transformers: newer files put all in tokenizer_config.json, and the older file beside it is ignored
    special_tokens = configured if "added_tokens_decoder" in config else configured | mapped
    template = _one_template(_template_files(folder) or config.get("chat_template"), folder)
    eos_ids = _eos_ids(folder, tokenizer, mapped | configured)
    return TextModel(tokenizer_json, template, special_tokens, eos_ids, _sampling_defaults(folder))


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as exc:
        raise ModelFilesUnusable(f"{path} cannot be read: {exc}") from exc


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; {} if there is no such file."""
    text = _read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise ModelFilesUnusable(f"{path} is not JSON ({exc}); download the checkpoint again") from exc
    if not isinstance(value, dict):
        raise ModelFilesUnusable(f"{path} must be a JSON object")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the variables of templates: all `…_token` entries, and a model's own ones in `extra_special_tokens`.

    The latter are by name. Each is a string or a description with its `content`. A list there has no names, so
    templates do not know its tokens.
    """
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    for own in ("model_specific_special_tokens", "extra_special_tokens"):
        more = config.get(own)
        named |= more if isinstance(more, dict) else {}
    found: dict[str, str] = {}
    for name, value in named.items():
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _template_files(folder: Path) -> str | list[dict[str, str]]:
    """Return the template of chat_template.jinja, or a list of it and additional_chat_templates by name; "" if none."""
    default, more = _read_text(folder / "chat_template.jinja"), folder / "additional_chat_templates"
    named = {} if default is None else {"default": default}
    for path in sorted(more.glob("*.jinja")):
        named[path.stem] = _read_text(path) or ""
    if named.keys() <= {"default"}:
        return named.get("default", "")
    return [{"name": name, "template": template} for name, template in named.items()]


def _one_template(value: Any, folder: Path) -> str:
    """Return one template for a string or for several named templates.

    With several, `tool_use` serves requests with tools and `default` all others.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    try:
        named = {str(entry["name"]): str(entry["template"]) for entry in value}
    except (TypeError, KeyError) as exc:
        raise ModelFilesUnusable(
            f"{folder / 'tokenizer_config.json'}: chat_template is neither text nor a list"
        ) from exc
    if not named:
        return ""
    default = named.get("default")
    if default is None:
        default = "{{ raise_exception('the model has a chat template for requests with tools only') }}"
    with_tools = named.get("tool_use")
    if with_tools is None or with_tools == default:
        return default
    with_tools, default = with_tools.removesuffix("\n"), default.removesuffix("\n")  # as Jinja does for each alone
    return "{% if tools +%}" + with_tools + "{%+ else +%}" + default + "{%+ endif %}"


def _eos_ids(folder: Path, tokenizer: Tokenizer, special_tokens: dict[str, str]) -> tuple[int, ...]:
    found: set[int] = set()
    model = _read_object(folder / "config.json")
    for config in (_read_object(folder / "generation_config.json"), model, model.get("text_config") or {}):
        value = config.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found.update(token_id for token_id in ids if isinstance(token_id, int) and token_id >= 0)
        if found:
            break
    eos = special_tokens.get("eos_token")
    if eos is not None:
        ids = tokenizer.encode(eos)
        if len(ids) == 1:
            found.update(ids)
    return tuple(sorted(found))


def _sampling_defaults(folder: Path) -> dict[str, float]:
    """Return the sampling parameters that the model's authors recommend. Raises ModelFilesUnusable."""
    path = folder / "generation_config.json"
    config, found = _read_object(path), dict[str, float]()
    for name, (least, greatest) in SAMPLING_RANGES.items():
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= greatest:
            raise ModelFilesUnusable(f"{path}: {name} is {value!r}, but must be from {least:g} to {greatest:g}")
        found[name] = max(0, int(value)) if name == "top_k" else value  # -1: off
    return found
