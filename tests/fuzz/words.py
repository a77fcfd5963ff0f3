"""A small vocabulary and a request, for targets that need them."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from moiety_text.tokenizer import Tokenizer
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling, Stopping, Submit

SPECIALS = ["<s>", "<unk>", "</s>", "<|im_start|>", "<|im_end|>", "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>"]

SUBMIT = Submit(
    request_id="r",
    seq=0,
    model="m",
    tenant_id="t",
    service=STANDARD,
    fallback=None,
    prompt_ids=[9, 10, 11],
    sampling=Sampling(temperature=0.5, num_logprobs=2),
    stopping=Stopping(max_tokens=64),
    credit_tokens=64,
    cache_salt=b"salt",
    arrival_unix_ns=1_800_000_000_000_000_000,
    deadline_unix_ns=1_800_000_001_000_000_000,
    traceparent="",
)


@cache
def tokenizer_json() -> str:
    """Return a tokenizer with a token for every byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *letters, "th", "in"])}
    backend = Backend(models.BPE(vocab=vocab, merges=[("t", "h"), ("i", "n")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    return backend.to_str()


def tokenizer() -> Tokenizer:
    return Tokenizer.from_json(tokenizer_json())
