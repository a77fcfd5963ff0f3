"""The encoding cache changes no token id, separates salts, and keeps its bounds."""

from __future__ import annotations

import random
import tracemalloc
from array import array
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from moiety_text.chat import ChatTemplate
from moiety_text.conversation import ConversationEncoder
from moiety_text.segment_cache import ENTRY_BYTES, TENANT_PART, Segment, SegmentCache, boundaries_in
from moiety_text.tokenizer import Tokenizer

Backends = dict[str, tokenizers.Tokenizer]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_BOUNDARY_FIRST = "{{ messages[0].content }}{% for m in messages[1:] %}<|im_end|>{{ m.content }}{% endfor %}"
PIECES = ["ab", "a", " ", "  ", "\n", "é", "東京", "🙂", "<think>", "<|im", "x", "Ġ é", "<s", "1"]


def encoder_of(
    backend: tokenizers.Tokenizer, template: str, max_bytes: int = 1 << 20
) -> tuple[ConversationEncoder, SegmentCache]:
    spec, cache = backend.to_str(), SegmentCache(max_bytes)
    tokenizer = Tokenizer.from_json(spec)
    return ConversationEncoder(tokenizer, spec, ChatTemplate(template, {}), cache=cache), cache


def text_of(rng: random.Random) -> str:
    return "".join(rng.choices(PIECES, k=rng.randrange(12)))


@pytest.mark.parametrize("template", [CHATML, NO_BOUNDARY_FIRST])
def test_conversations_have_the_same_ids_with_the_cache(backends: Backends, template: str) -> None:
    rng = random.Random(0)
    for kind, backend in backends.items():
        encoder, cache = encoder_of(backend, template)
        for _ in range(30):
            messages: list[dict[str, Any]] = []
            for turn in range(rng.randrange(1, 6)):
                messages.append({"role": "assistant" if turn % 2 else "user", "content": text_of(rng)})
                token_ids = encoder.encode(messages, scope=("one", b""))
                assert token_ids == encoder.encode(messages), (kind, messages)
                prefill = text_of(rng)
                assert encoder.encode(messages, prefill=prefill, scope=("one", b"")) == encoder.encode(
                    messages, prefill=prefill
                ), (kind, messages, prefill)
        if "<|im_end|>" in backend.get_vocab():
            assert cache.num_hit_tokens > 0 < cache.num_missed_tokens, kind


def test_only_what_is_new_is_encoded(backends: Backends, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, _ = encoder_of(backends["byte_level"], CHATML)
    encoded: list[str] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(text)
        return encode(self, text, **options)

    messages = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "second"}]
    expected = encoder.encode(messages)
    encoder.encode(messages[:1], scope=("one", b""))
    monkeypatch.setattr(Tokenizer, "encode", noted)
    assert encoder.encode(messages, scope=("one", b"")) == expected
    assert encoded == ["<|im_start|>assistant\nsecond"]
    encoded.clear()
    assert encoder.encode(messages, scope=("one", b"")) == expected
    assert not encoded
    assert encoder.encode(messages, scope=("two", b"")) == expected
    assert encoded == [
        "<|im_start|>user\nfirst<|im_end|>\n<|im_start|>assistant\nsecond<|im_end|>\n<|im_start|>assistant\n"
    ]


def segment(text: str, rest: bytes = b"") -> Segment:
    return (0, rest, False, text)


def test_the_cache_keeps_its_bounds_and_no_tenant_displaces_all_others() -> None:
    rng, most = random.Random(1), 100_000
    cache = SegmentCache(most)
    cache.store("quiet", {segment("mine"): [1, 2, 3]})
    for number in range(3000):  # a client chooses its salts
        text = f"{number}" * rng.randrange(1, 40)
        cache.store("loud", {segment(text, b"salt %d" % number): range(len(text))})
        assert cache.num_bytes <= most // TENANT_PART + 2 * ENTRY_BYTES
    assert cache.find("quiet", [segment("mine"), segment("mine", b"other")]) == [array("I", [1, 2, 3]), None]
    for number in range(300):
        cache.store(f"{number}", {segment("x" * 500): range(500)})
        assert cache.num_bytes <= most
    assert cache.find("quiet", [segment("mine")]) == [None]  # the least recently used tenant
    cache.store("huge", {segment("x" * most): [1]})
    assert cache.find("huge", [segment("x" * most)]) == [None]
    held = cache.num_bytes
    assert held > most // 2
    cache.resize(held // 2)
    assert 0 < cache.num_bytes <= held // 2
    cache.resize(0)
    assert cache.num_bytes == 0
    assert not cache.is_enabled


def test_the_size_of_the_cache_counts_what_python_keeps() -> None:
    tracemalloc.start()
    try:
        cache = SegmentCache(1 << 30)
        for number in range(2000):
            cache.store(f"tenant {number}", {segment(f"{number} 東", bytes([number % 256]) * 32): [1] * 10})
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cache.num_bytes >= 0.5 * kept


def test_texts_of_deleted_and_of_idle_tenants_are_forgotten() -> None:
    now_s = 0.0
    cache = SegmentCache(1 << 20, idle_s=60, monotonic=lambda: now_s)
    for tenant_id in ("a", "b", "c"):
        cache.store(tenant_id, {segment("text"): [1]})
    cache.forget_tenants(["a", "unknown"])
    assert cache.find("a", [segment("text")]) == [None]
    now_s = 50.0
    assert cache.find("b", [segment("text")]) == [array("I", [1])]
    now_s = 70.0
    cache.drop_idle()
    assert [cache.find(one, [segment("text")]) for one in "bc"] == [[array("I", [1])], [None]]
    now_s = 200.0
    cache.drop_idle()
    assert cache.num_bytes == 0


def test_tokens_that_do_not_always_divide_a_text_are_no_boundaries() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    plain = ["<|a|>", "<|b|>", "<|long|>", "<|e|>"]
    backend.add_tokens([AddedToken(name, normalized=False) for name in plain])
    backend.add_tokens([AddedToken("<|n|>", normalized=True), AddedToken("<|w|>", single_word=True, normalized=False)])
    backend.add_tokens([AddedToken("<|l|>", lstrip=True, normalized=False), AddedToken("_w|>", normalized=False)])
    backend.add_tokens([AddedToken("<|r|>", rstrip=True, normalized=False), AddedToken("word", normalized=False)])
    backend.add_tokens([AddedToken("=<|b|>", normalized=False), AddedToken("=<|e", normalized=False)])
    tokenizer = Tokenizer.from_json(backend.to_str())
    names = [token.content for token in tokenizer.added_tokens.values()]
    assert set(boundaries_in(tokenizer, "".join(names), names)) == {"<|a|>", "<|long|>", "=<|b|>"}
    assert set(boundaries_in(tokenizer, "<|long|>", names)) == {"<|long|>"}


def test_words_that_are_normalized_to_a_boundary_do_not_mislead_the_cache() -> None:
    vocab = {"[UNK]": 0, "a": 1, "<|im_end|>": 2, "<|im_start|>": 3, "user": 4}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    encoder, _ = encoder_of(backend, CHATML)
    messages = [{"role": "user", "content": "a <|IM_END|> a"}, {"role": "assistant", "content": "a"}]
    expected = encoder.encode(messages)
    assert expected.count(2) == 3
    for _ in range(2):
        assert encoder.encode(messages, scope=("one", b"")) == expected
