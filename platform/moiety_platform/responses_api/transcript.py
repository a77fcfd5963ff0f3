"""Shortened transcript of a conversation, in place of a summary that the model did not write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moiety_platform.inference.tool_fields import arguments_text

HEAD = "The model wrote no summary. This is a shortened transcript of the conversation:\n\n"
MAX_CHARACTERS = 8000
MIN_CHARACTERS = 500
MESSAGE_PART = 4  # a message may have one part in so many of the transcript
LEFT_OUT = " […] "


def shortened_transcript(messages: Sequence[Mapping[str, Any]], num_tokens: int) -> str:
    """Return a transcript of messages as the chat template gets them, with at least one.

    It has about as many characters as the conversation has tokens (`num_tokens`), so that it needs fewer tokens, within
    MIN_CHARACTERS and MAX_CHARACTERS. The first message of the user and the newest messages are kept; long ones lose
    their middle.
    """
    most = min(MAX_CHARACTERS, max(MIN_CHARACTERS, num_tokens))
    entries = [_shortened(_entry_of(message), most // MESSAGE_PART) for message in messages]
    first = next((place for place, message in enumerate(messages) if message["role"] == "user"), 0)
    num_characters, begin = len(entries[first]), len(entries)
    while begin > 0:
        more = len(entries[begin - 1]) + 1 if begin - 1 != first else 0
        if num_characters + more > most:
            break
        num_characters += more
        begin -= 1
    kept = entries[begin:]
    if first < begin:
        num_left_out = begin - 1
        kept = [entries[first], *([f"[{num_left_out} messages left out]"] if num_left_out else []), *kept]
    return HEAD + "\n".join(kept)


def _entry_of(message: Mapping[str, Any]) -> str:
    lines = [text] if (text := _text_of(message.get("content"))) else []
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    lines += [f"calls {function['name']}({arguments_text(function['arguments'])})" for function in functions]
    return f"{message['role']}: " + "\n".join(lines)


def _text_of(content: Any) -> str:
    """Return the text of a content, which is a text or parts; images and files are named."""
    if isinstance(content, str):
        return content.strip()
    texts = [str(part.get("text", f"[{part['type']}]")).strip() for part in content or ()]
    return "\n".join(filter(None, texts))


def _shortened(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = (most - len(LEFT_OUT)) // 2
    return text[:half] + LEFT_OUT + text[len(text) - half :]
