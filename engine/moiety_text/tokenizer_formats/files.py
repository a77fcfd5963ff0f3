"""Choice of a tokenizer among the files of a checkpoint folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from moiety_text.errors import ModelFilesUnusable
from moiety_text.tokenizer_formats.patterns import PATTERNS
from moiety_text.tokenizer_formats.sentencepiece import parse_model, sentencepiece_tokenizer
from moiety_text.tokenizer_formats.tiktoken import is_tiktoken, parse_ranks, tiktoken_tokenizer
from moiety_text.tokenizer_formats.tokenizer_json import AddedToken

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Files that are read in place of a tokenizer.json, and how their texts are split if they are tiktoken files.
_FILES = {"tokenizer.model": "llama-bpe", "tiktoken.model": "kimi-k2", "qwen.tiktoken": "qwen2"}
_MAX_BYTES = 64 << 20


def converted_tokenizer(folder: Path, config: Mapping[str, Any], added: Mapping[str, Any]) -> str | None:
    """Return a tokenizer.json made from the folder's sentencepiece or tiktoken file; None if there is none.

    `config`: tokenizer_config.json. `added`: added_tokens.json. Raises ModelFilesUnusable, UnusableTokenizer.
    """
    path = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if path is None:
        return None
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ModelFilesUnusable(f"{path} has more than {_MAX_BYTES >> 20} MiB, so it is not a tokenizer")
        data = path.read_bytes()
    except OSError as exc:
        raise ModelFilesUnusable(f"{path} cannot be read: {exc}") from exc
    tokens = _added_tokens(path, config, added)
    if is_tiktoken(data):
        first = _first(config, default=False)
        made = tiktoken_tokenizer(parse_ranks(data), tokens, PATTERNS[_FILES[path.name]], first)
    else:
        made = sentencepiece_tokenizer(parse_model(data), tokens, _first(config, default=True))
    return json.dumps(made, ensure_ascii=False)


def _first(config: Mapping[str, Any], *, default: bool) -> str | None:
    """Return the token before every text, if there is one; transformers' Llama tokenizer has one by default."""
    token = config.get("bos_token", "<s>" if default else None)
    content = token.get("content") if isinstance(token, dict) else token
    return content if config.get("add_bos_token", default) and isinstance(content, str) else None


def _added_tokens(path: Path, config: Mapping[str, Any], added: Mapping[str, Any]) -> list[AddedToken]:
    described = config.get("added_tokens_decoder") or {}
    try:
        found = [AddedToken(int(number), str(content), special=False) for content, number in added.items()]
        found += [
            AddedToken(int(number), str(one["content"]), special=bool(one.get("special", True)))
            for number, one in described.items()
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise ModelFilesUnusable(f"the added tokens beside {path} are not described by id and content: {exc}") from exc
    return list({token.id: token for token in found}.values())
