"""Tokenizer, chat template and special tokens of a model from the metadata of its GGUF file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from moiety_engine.errors import CheckpointError
from moiety_text.tokenizer_formats.patterns import PATTERNS, WHOLE_WORDS
from moiety_text.tokenizer_formats.tokenizer_json import AddedToken, SentencePieces, byte_level_bpe, sentencepiece_bpe

if TYPE_CHECKING:
    from moiety_engine.gguf.header import GgufHeader

_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER, _BYTE = 2, 3, 4, 6  # kinds of tokens
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # of a text, a turn, a message
_STARTING = frozenset({"llama-bpe", "llama3", "llama-v3"})  # begin every text with their first token by default
_COMPOSING = frozenset({"qwen2", "deepseek-r1-qwen"})


def tokenizer_files(header: GgufHeader) -> dict[str, Any]:
    """Return the contents of tokenizer.json, tokenizer_config.json and chat templates by file name.

    Raises CheckpointError if the tokenizer is of another kind.
    """
    tokens, kinds = _value(header, "tokens"), _value(header, "token_type")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens) or not tokens:
        raise CheckpointError(
            f"{header.paths[0]} has no tokenizer; use the model's checkpoint in Hugging Face's format"
        )
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        kinds = [1] * len(tokens)
    added = [
        AddedToken(number, token, special=kind == _CONTROL)
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER)
    ]
    model = _value(header, "model")
    make = {"gpt2": _byte_level, "llama": _sentencepiece}.get(str(model))
    if make is None:
        raise CheckpointError(
            f"{header.paths[0]} has a tokenizer of the kind {model!r}; of GGUF files gpt2 and llama are read. Use the "
            "model's checkpoint in Hugging Face's format"
        )
    return {"tokenizer.json": make(header, tokens, kinds, added), **_template_files(header, tokens)}


def generation_defaults(header: GgufHeader) -> dict[str, Any]:
    """Return the contents of generation_config.json: the tokens that end an answer."""
    ids = [_value(header, name) for name in _ENDS]
    return {"eos_token_id": sorted({one for one in ids if isinstance(one, int)})}


def _value(header: GgufHeader, name: str) -> Any:
    return header.metadata.get(_PREFIX + name)


def _first(header: GgufHeader, tokens: list[str], *, default: bool) -> AddedToken | None:
    """Return the token with which every text begins, if there is one."""
    adds, number = _value(header, "add_bos_token"), _value(header, "bos_token_id")
    if not (default if adds is None else adds) or not isinstance(number, int) or not 0 <= number < len(tokens):
        return None
    return AddedToken(number, tokens[number])


def _byte_level(header: GgufHeader, tokens: list[str], _kinds: list[int], added: list[AddedToken]) -> dict[str, Any]:
    name = str(_value(header, "pre") or "default")
    if name not in PATTERNS:
        raise CheckpointError(
            f"{header.paths[0]} splits texts as {name!r}, which is not known; known are {', '.join(PATTERNS)}. Use the "
            "model's checkpoint in Hugging Face's format"
        )
    merges = []
    for pair in _value(header, "merges") or []:
        left, _, right = str(pair).partition(" ")
        merges.append((left, right))
    return byte_level_bpe(
        {token: number for number, token in enumerate(tokens)},
        merges,
        added,
        PATTERNS[name],
        whole_words=name in WHOLE_WORDS,
        first=_first(header, tokens, default=name in _STARTING),
        composes=name in _COMPOSING,
    )


def _sentencepiece(header: GgufHeader, tokens: list[str], kinds: list[int], added: list[AddedToken]) -> dict[str, Any]:
    scores = _value(header, "scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{header.paths[0]} has no scores of its tokens; download it again")
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), tokens[0])
    return sentencepiece_bpe(
        SentencePieces(
            pieces=list(zip(tokens, scores, strict=True)),
            added=added,
            unknown=unknown,
            byte_fallback=_BYTE in kinds,
            adds_space=bool(header.metadata.get(f"{_PREFIX}add_space_prefix", True)),
            first=_first(header, tokens, default=True),
        )
    )


def _template_files(header: GgufHeader, tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        number = _value(header, f"{key}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            config[name] = tokens[number]
    template = header.metadata.get("tokenizer.chat_template")
    named = {
        key.removeprefix("tokenizer.chat_template."): value
        for key, value in header.metadata.items()
        if key.startswith("tokenizer.chat_template.") and isinstance(value, str)
    }
    if isinstance(template, str):
        named["default"] = template
    config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()] or None
    return {"tokenizer_config.json": json.dumps(config, ensure_ascii=False)}
