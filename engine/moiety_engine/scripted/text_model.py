"""Text side of the scripted core: a byte tokenizer, whose token ids are the bytes, and a small chat template."""

from __future__ import annotations

import json
from typing import Any

from moiety_text.decoding import BYTE_OF_CHARACTER
from moiety_text.folder import TextModel

END_ID, USER_ID, ASSISTANT_ID, SYSTEM_ID = 256, 257, 258, 259
SPECIALS = {END_ID: "<|end|>", USER_ID: "<|user|>", ASSISTANT_ID: "<|assistant|>", SYSTEM_ID: "<|system|>"}
VOCAB_SIZE = 256 + len(SPECIALS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('roles are system, user and assistant, not ' ~ message.role) }}{% endif %}"
    "{{ '<|' ~ message.role ~ '|>' ~ message.content ~ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def scripted_text_model() -> TextModel:
    """Return byte-level BPE without merges: the id of a byte is the byte."""
    added = [
        {
            "id": token_id, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for token_id, content in SPECIALS.items()
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "vocab": {**BYTE_OF_CHARACTER, **{content: token_id for token_id, content in SPECIALS.items()}},
            "merges": [],
        },
    }  # fmt: skip
    return TextModel(json.dumps(tokenizer), CHAT_TEMPLATE, {"eos_token": SPECIALS[END_ID]}, (END_ID,))
