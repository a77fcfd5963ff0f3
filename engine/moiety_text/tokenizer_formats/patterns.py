"""Patterns that split a text before byte pairs are merged, by the names that GGUF files and tiktoken models have."""

from __future__ import annotations

from typing import Any

GPT2 = "gpt-2"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDS}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDS}"
_O200K = "|".join((
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    _ENDS,
))  # fmt: skip
_TEKKEN = "|".join((
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
    r"\p{N}",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    _ENDS,
))  # fmt: skip
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_ENDS}",
)
_HAN = r"[\p{Han}]+"
_WORD = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI = "|".join((
    _HAN,
    rf"[^\r\n\p{{L}}\p{{N}}]?{_WORD}*{_SMALL}+{_CONTRACTIONS}?",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_WORD}+{_SMALL}*{_CONTRACTIONS}?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    _ENDS,
))  # fmt: skip
_DIGITS = "digits"  # each digit alone, then as GPT-2 splits
PATTERNS: dict[str, tuple[str, ...]] = {
    GPT2: (GPT2,),
    "default": (GPT2,),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (_DIGITS, GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), (_QWEN2,)),
    **dict.fromkeys(("gpt-4o", "llama4"), (_O200K,)),
    "tekken": (_TEKKEN,),
    "deepseek-v3": _DEEPSEEK3,
    "kimi-k2": (KIMI,),
}
WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})  # a word in the vocabulary is not merged


def pre_tokenizer(patterns: tuple[str, ...]) -> dict[str, Any]:
    """Return the pre-tokenizer of a tokenizer.json that splits by the patterns, one after the other."""
    steps: list[dict[str, Any]] = []
    for pattern in patterns:
        if pattern == _DIGITS:
            steps.append({"type": "Digits", "individual_digits": True})
        elif pattern != GPT2:
            steps.append({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False})
    steps.append(byte_level(splits=GPT2 in patterns))
    return {"type": "Sequence", "pretokenizers": steps}


def byte_level(*, splits: bool = False) -> dict[str, Any]:
    """Return a step that writes bytes as characters, and, if it `splits`, splits the text as GPT-2 does."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": splits}
