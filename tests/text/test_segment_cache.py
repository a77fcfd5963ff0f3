"""The encoding cache changes no token id, separates salts, and keeps its bounds."""

from __future__ import annotations

import random
import sys
from array import array
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from moiety_text.chat import ChatTemplate
from moiety_text.conversation import ConversationEncoder
from moiety_text.segment_cache import ENTRY_BYTES, SCOPE_PART, SegmentCache, boundaries_in
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
                token_ids = encoder.encode(messages, salt=b"one")
                assert token_ids == encoder.encode(messages), (kind, messages)
                prefill = text_of(rng)
                assert encoder.encode(messages, prefill=prefill, salt=b"one") == encoder.encode(
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
    encoder.encode(messages[:1], salt=b"one")
    monkeypatch.setattr(Tokenizer, "encode", noted)
    assert encoder.encode(messages, salt=b"one") == expected
    assert encoded == ["<|im_start|>assistant\nsecond"]
    encoded.clear()
    assert encoder.encode(messages, salt=b"one") == expected
    assert not encoded
    assert encoder.encode(messages, salt=b"two") == expected
    assert encoded == [
        "<|im_start|>user\nfirst<|im_end|>\n<|im_start|>assistant\nsecond<|im_end|>\n<|im_start|>assistant\n"
    ]


def test_the_cache_keeps_its_bounds_and_no_salt_displaces_all_others() -> None:
    rng, most = random.Random(1), 100_000
    cache, owner = SegmentCache(most), object()
    quiet = (owner, b"quiet")
    cache.store(quiet, {(False, "mine"): [1, 2, 3]})
    for number in range(3000):
        text = f"{number}" * rng.randrange(1, 40)
        cache.store((owner, b"loud"), {(False, text): range(len(text))})
        assert cache.num_bytes <= most // SCOPE_PART + ENTRY_BYTES * 2
    assert cache.find(quiet, [(False, "mine"), (True, "mine")]) == [array("I", [1, 2, 3]), None]
    for number in range(300):
        cache.store((owner, b"%d" % number), {(False, "x" * 500): range(500)})
        assert cache.num_bytes <= most
    assert cache.find(quiet, [(False, "mine")]) == [None]  # the least recently used salt
    cache.store((owner, b"huge"), {(False, "x" * most): [1]})
    assert cache.find((owner, b"huge"), [(False, "x" * most)]) == [None]
    held = cache.num_bytes
    assert held > most // 2
    cache.resize(held // 2)
    assert cache.num_bytes <= held // 2
    cache.resize(0)
    assert cache.num_bytes == 0
    assert not cache.is_enabled


def test_the_size_of_the_cache_counts_what_python_keeps() -> None:
    cache, owner, kept = SegmentCache(1 << 24), object(), []
    for number in range(500):
        text, ids = f"{number} 東" * 20, array("I", range(100))
        cache.store((owner, b"a"), {(False, text): ids})
        kept.append(sys.getsizeof(text) + sys.getsizeof(ids) + sys.getsizeof((False, text)))
    assert cache.num_bytes >= sum(kept)


def test_tokens_that_do_not_always_divide_a_text_are_no_boundaries() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    plain = ["<|a|>", "<|b|>", "<|long|>", "<|e|>"]
    backend.add_tokens([AddedToken(name, normalized=False) for name in plain])
    backend.add_tokens([AddedToken("<|n|>", normalized=True), AddedToken("<|w|>", single_word=True, normalized=False)])
    backend.add_tokens([AddedToken("<|l|>", lstrip=True, normalized=False)])
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
        assert encoder.encode(messages, salt=b"one") == expected
