"""Tokenizers of sentencepiece and tiktoken files give the ids that these packages give."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from moiety_text.errors import ModelFilesUnusable, UnusableTokenizer
from moiety_text.folder import read_text_model
from moiety_text.tokenizer import Tokenizer
from moiety_text.tokenizer_formats.patterns import KIMI

TEXTS = [
    "The internet thing is in there: the theme, the thin string.",
    "  two  spaces\n\tand a tab, 12345 and don't, I'll, 漢字とかな 🎉é",
    "",
    "x",
    "def f(x):\n    return x + 1\r\n\r\n",
]


def ranks() -> dict[bytes, int]:
    more = [b"th", b"the", b" the", b"in", b"ing", b" t", b"ther", b"er", "漢".encode()[:2], "漢".encode(), b"  "]
    return {token: rank for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *more])}


def write_tiktoken(path: Path) -> None:
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks().items()]
    path.write_bytes(b"".join(lines))


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    folder, count = tmp_path_factory.mktemp("kimi"), len(ranks())
    write_tiktoken(folder / "tiktoken.model")
    special = {"[BOS]": count, "[EOS]": count + 1, "<|im_end|>": count + 5}
    described = {str(number): {"content": content, "special": True} for content, number in special.items()}
    config = {"added_tokens_decoder": described, "eos_token": "[EOS]", "bos_token": "[BOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    text = read_text_model(folder)
    assert text.eos_token_ids == (count + 1,)
    return Tokenizer.from_json(text.tokenizer_json), tiktoken.Encoding(
        "kimi", pat_str=KIMI, mergeable_ranks=ranks(), special_tokens=special
    )


def test_a_tiktoken_file_gives_the_ids_of_tiktoken(kimi: tuple[Tokenizer, Any]) -> None:
    ours, theirs = kimi
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("a<|im_end|>b") == theirs.encode("a<|im_end|>b", allowed_special="all")
    assert ours.token(len(ranks()) + 3) == f"<|reserved_token_{len(ranks()) + 3}|>"
    assert ours.vocab_size == len(ranks()) + 6


@settings(deadline=None)
@given(st.text(alphabet=st.sampled_from("the ing漢字'lIX\n\t 12é🎉"), max_size=40))
def test_any_text_has_the_ids_of_tiktoken(kimi: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = kimi
    assert ours.encode(text) == theirs.encode(text)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def piece_model(request: pytest.FixtureRequest) -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20),
        model_writer=written,
        vocab_size=330,
        model_type=request.param,
        byte_fallback=True,
        normalization_rule_name="identity" if request.param == "bpe" else "nmt_nfkc",
        remove_extra_whitespaces=request.param == "unigram",
        user_defined_symbols=["<|im_end|>"],
        character_coverage=0.99,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return written.getvalue()


def test_a_sentencepiece_file_gives_the_ids_of_sentencepiece(piece_model: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(piece_model)
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=piece_model)
    text_model = read_text_model(tmp_path)
    ours = Tokenizer.from_json(text_model.tokenizer_json)
    for text in [*TEXTS, "unseen ğ letters", "a<|im_end|>"]:
        assert ours.encode(text) == theirs.encode(text), text
    assert ours.encode("the", add_special_tokens=True) == [theirs.bos_id(), *theirs.encode("the")]
    assert text_model.eos_token_ids == (theirs.eos_id(),)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": theirs.vocab_size()}))
    more = Tokenizer.from_json(read_text_model(tmp_path).tokenizer_json)
    assert more.encode("<tool>") == [theirs.vocab_size()]


def test_damaged_files_are_refused_wherever_they_are_cut(piece_model: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    for size in (0, 1, 5, 700, len(piece_model) // 2 + 3):
        path.write_bytes(piece_model[:size])
        try:
            read_text_model(tmp_path)
        except (UnusableTokenizer, ModelFilesUnusable) as exc:
            assert "\n" not in str(exc)
    path.write_bytes(b"\x0a\xff\xff\xff\xff\x7f")
    with pytest.raises(UnusableTokenizer, match=r"sentencepiece model is damaged \(it ends within a field\)"):
        read_text_model(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b"AA== 0", b"AA== 7", "gaps or repeat"),
        (b"AQ== 1", b"A 1", r"line 2 of the tiktoken file is damaged"),
        (b"AQ== 1", b"AQ==", r"line 2 of the tiktoken file is damaged"),
        (b"AQ== 1", b"AA== 1", r"line 2 .*occurs twice"),
        (b"AQ== 1", b"/////w== 1", "no token for the byte 1"),
    ],
)
def test_damaged_tiktoken_files_are_refused_by_line(tmp_path: Path, old: bytes, new: bytes, why: str) -> None:
    path = tmp_path / "tiktoken.model"
    write_tiktoken(path)
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with pytest.raises(UnusableTokenizer, match=why):
        read_text_model(tmp_path)


def test_tokens_without_content_or_beyond_a_gap_are_refused(piece_model: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(piece_model)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"5": {"special": True}}}))
    with pytest.raises(ModelFilesUnusable, match="not described by id and content"):
        read_text_model(tmp_path)
    described = {"added_tokens_decoder": {"5000": {"content": "<x>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    with pytest.raises(UnusableTokenizer, match=r"ids \[5000\] … do not follow the \d+ pieces"):
        read_text_model(tmp_path)
