from __future__ import annotations

import json

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from moiety_text.errors import TextNotEncodable, TokenOutOfRange, UnusableTokenizer
from moiety_text.tokenizer import Tokenizer

Backends = dict[str, tokenizers.Tokenizer]
TEXTS = [
    "",
    " ",
    "ab  ab a",
    "héllo 東京 🙂",
    "<|im_start|>user\nhi<|im_end|>\n",
    "  a\tb\r\n",
    "dogs don't",
    "x" * 5000,
]


@pytest.mark.parametrize("kind", ["byte_level", "llama_like", "metaspace_fallback", "word_piece"])
@pytest.mark.parametrize("special", [False, True])
def test_encoding_equals_that_of_transformers(backends: Backends, kind: str, special: bool) -> None:
    source = backends[kind].to_str()
    ours, theirs = Tokenizer.from_json(source), PreTrainedTokenizerFast(tokenizer_object=backends[kind])
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special)
        assert ours.decode(ids) == backends[kind].decode(ids)


def test_truncation_and_padding_in_the_file_do_not_touch_a_prompt(backends: Backends) -> None:
    cut = tokenizers.Tokenizer.from_str(backends["byte_level"].to_str())
    cut.enable_truncation(4)
    cut.enable_padding(length=32)
    assert len(Tokenizer.from_json(cut.to_str()).encode("\n" * 20 + "qqqq")) == len(
        Tokenizer.from_json(backends["byte_level"].to_str()).encode("\n" * 20 + "qqqq")
    )


@pytest.mark.parametrize("kind", ["byte_level", "llama_like", "metaspace_fallback"])
def test_bytes_of_the_tokens_concatenate_to_the_text(backends: Backends, kind: str) -> None:
    tokenizer = Tokenizer.from_json(backends[kind].to_str())
    text = "ab 東京 naïve 🙂é<|im_end|>"
    joined = b"".join(tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text))
    assert joined.decode().removeprefix(" ") == text


def test_bytes_of_word_pieces_show_where_words_begin(backends: Backends) -> None:
    tokenizer = Tokenizer.from_json(backends["word_piece"].to_str())
    ids = tokenizer.encode("dogs")
    assert [tokenizer.token_bytes(i) for i in ids] == [b" dog", b"s"]
    suffixed = Tokenizer.from_json(backends["word_suffix"].to_str())
    assert suffixed.token_bytes(2) == b"ab "


def test_ids_outside_of_the_vocabulary_are_named_in_the_error(backends: Backends) -> None:
    tokenizer = Tokenizer.from_json(backends["byte_level"].to_str())
    for wrong in (-1, tokenizer.vocab_size, 2**40):
        with pytest.raises(TokenOutOfRange, match=str(wrong)):
            tokenizer.decode([wrong])
        with pytest.raises(TokenOutOfRange, match=str(wrong)):
            tokenizer.token_bytes(wrong)
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == "Ġ é"


def test_special_tokens_are_known_and_left_out_unless_wanted(backends: Backends) -> None:
    tokenizer = Tokenizer.from_json(backends["byte_level"].to_str())
    ids = tokenizer.encode("a<|im_end|><think>")
    assert [tokenizer.is_special(i) for i in ids] == [False, True, False]
    assert tokenizer.decode(ids) == "a<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|><think>"


def test_half_a_surrogate_pair_is_refused_as_text(backends: Backends) -> None:
    with pytest.raises(TextNotEncodable, match="surrogate"):
        Tokenizer.from_json(backends["byte_level"].to_str()).encode("a\ud800")


def test_files_that_are_no_tokenizer_are_refused(backends: Backends) -> None:
    for source in ("", "{}", "[1]", "not json"):
        with pytest.raises(UnusableTokenizer, match=r"tokenizer\.json"):
            Tokenizer.from_json(source)


def test_an_unknown_decoder_is_refused_when_loading(backends: Backends) -> None:
    spec = json.loads(backends["byte_level"].to_str())
    spec["decoder"] = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    with pytest.raises(UnusableTokenizer, match="CTC"):
        Tokenizer.from_json(json.dumps(spec))


def _marking_segments() -> tokenizers.Tokenizer:
    letters = {letter: number for number, letter in enumerate("abcdefgh")}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({**letters, "[CLS]": 8, "[SEP]": 9}, unk_token="a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["[CLS]", "[SEP]"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 8), ("[SEP]", 9)]
    )
    return backend


@pytest.mark.parametrize("limit", [8, 9, 12, 20])
def test_pairs_of_robertas_have_two_separators_and_no_segments(limit: int) -> None:
    backend = _marking_segments()
    backend.post_processor = tokenizers.processors.RobertaProcessing(("[SEP]", 9), ("[CLS]", 8))
    ours = Tokenizer.from_json(backend.to_str())
    whole = [8, 0, 1, 2, 3, 9, 9, 4, 5, 6, 9]
    assert ours.encode_pair("a b c d", "e f g") == (whole, 0)
    ids, begin = ours.encode_truncated("a b c d", "e f g", limit)
    cut = {8: [8, 0, 1, 9, 9, 4, 5, 9], 9: [8, 0, 1, 2, 9, 9, 4, 5, 9]}.get(limit, whole)
    assert (sorted(ids), len(ids), begin) == (sorted(cut), min(limit, 11), 0)


@pytest.mark.parametrize("second", [None, "e", "e f g h e f g"])
@pytest.mark.parametrize("first", ["a", "a b c d a b"])
def test_truncation_is_that_of_the_library_with_the_longer_text_first(first: str, second: str | None) -> None:
    ours, library = Tokenizer.from_json(_marking_segments().to_str()), _marking_segments()
    for limit in range(5, 20):
        library.enable_truncation(limit, strategy="longest_first")
        wanted = library.encode(first, second)
        ids, begin = ours.encode_truncated(first, second, limit)
        assert len(ids) == min(limit, len(_marking_segments().encode(first, second).ids))
        if second is None:
            assert ids == wanted.ids
        else:  # which of two equally long texts loses the odd token is the library's choice
            assert abs(wanted.type_ids.count(1) - (len(ids) - begin)) <= 1
        assert begin == (0 if second is None else ids.index(9) + 1)
        if limit >= 17:  # nothing is cut
            assert ids == wanted.ids
            assert second is None or ours.encode_pair(first, second) == (ids, begin)
