from __future__ import annotations

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moiety_text.detokenizer import CharacterCount, Detokenizer
from moiety_text.tokenizer import Tokenizer

Backends = dict[str, tokenizers.Tokenizer]


@pytest.mark.parametrize(
    "kind", ["byte_level", "llama_like", "metaspace_fallback", "word_piece", "word_suffix", "undecorated"]
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pieces_concatenate_to_the_full_decode_for_any_tokens(
    backends: Backends, kind: str, data: st.DataObject
) -> None:
    tokenizer = Tokenizer.from_json(backends[kind].to_str())
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    detokenizer, text, at = Detokenizer(tokenizer), "", 0
    while at < len(ids):
        step = data.draw(st.integers(1, 4))
        text += detokenizer.add(ids[at : at + step])
        at += step
    text += detokenizer.flush()
    assert text == backends[kind].decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["byte_level", "llama_like", "metaspace_fallback"])
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=30))
def test_no_piece_holds_a_part_of_a_character(backends: Backends, kind: str, text: str) -> None:
    tokenizer = Tokenizer.from_json(backends[kind].to_str())
    text = text.replace("\N{REPLACEMENT CHARACTER}", "")
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add([token_id]) for token_id in tokenizer.encode(text)]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_a_character_comes_with_the_token_that_completes_it(backends: Backends) -> None:
    tokenizer = Tokenizer.from_json(backends["byte_level"].to_str())
    byte_ids = [tokenizer.encode(c)[0] for c in "abc"]
    half = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) in (b"\xe6", b"\x9d", b"\xb1")]
    in_order = sorted(half, key=lambda i: [b"\xe6", b"\x9d", b"\xb1"].index(tokenizer.token_bytes(i)))
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add([i]) for i in [byte_ids[0], *in_order, byte_ids[1]]] == ["a", "", "", "東", "b"]


def test_special_tokens_have_a_text_where_they_are_asked_for(backends: Backends) -> None:
    for kind in ("byte_level", "llama_like", "metaspace_fallback"):
        tokenizer = Tokenizer.from_json(backends[kind].to_str())
        ids = tokenizer.encode("<|im_start|>ab<|im_end|>")
        shown = {token_id for token_id, token in tokenizer.added_tokens.items() if token.content == "<|im_end|>"}
        detokenizer = Detokenizer(tokenizer, shown)
        text = "".join(detokenizer.add([token_id]) for token_id in ids) + detokenizer.flush()
        assert text.strip() == "ab<|im_end|>"


def test_ids_that_only_the_model_has_are_silent(backends: Backends) -> None:
    tokenizer = Tokenizer.from_json(backends["byte_level"].to_str())
    assert (
        Detokenizer(tokenizer).add([*tokenizer.encode("a"), tokenizer.vocab_size + 7, *tokenizer.encode("b")]) == "ab"
    )


@pytest.mark.parametrize("kind", ["byte_level", "llama_like", "metaspace_fallback"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.lists(st.sampled_from(["a", "b", " ", "ab", "é", "東京", "🙂", "ñ", "\n", "<|im_end|>"]), min_size=1))
def test_characters_are_counted_where_their_tokens_stand_in_the_text(
    backends: Backends, kind: str, text: list[str]
) -> None:
    tokenizer = Tokenizer.from_json(backends[kind].to_str())
    ids = tokenizer.encode("".join(text))
    whole = backends[kind].decode(ids, skip_special_tokens=True)
    count, at = CharacterCount(tokenizer), 0
    for token_id in ids:
        num_chars = count.add(token_id)
        piece = tokenizer.token_bytes(token_id).decode(errors="replace")
        if num_chars and "\N{REPLACEMENT CHARACTER}" not in piece:
            assert whole[at : at + num_chars] == piece[len(piece) - num_chars :]
        at += num_chars
    assert at == len(whole)
