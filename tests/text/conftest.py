"""Small tokenizers of every kind that we decode, trained or written here."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and doesn't stop.",
    "naïve café — 東京 タワー, привет мир, 🙂👩‍👩‍👧 ok!",
    "def f(x):\n    return x * 2\n\n\nprint(f(21))",
]
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("Ġ é", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def _fallback_vocab(space: str) -> dict[str, int]:
    vocab = {token: i for i, token in enumerate(["<unk>", *SPECIALS])}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in [space, "a", "b", "é", "東", space + "a", "ab", space + "ab", space + space, "🙂"]:
        vocab[piece] = len(vocab)
    return vocab


def llama_like() -> Tokenizer:
    """SentencePiece as converted for Llama 2 and Mixtral: normalizer, byte fallback, strip."""
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab"), ("▁", "▁")]
    tokenizer = Tokenizer(
        models.BPE(vocab=_fallback_vocab("▁"), merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def metaspace_fallback() -> Tokenizer:
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab"), ("▁", "▁")]
    tokenizer = Tokenizer(
        models.BPE(vocab=_fallback_vocab("▁"), merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def word_piece() -> Tokenizer:
    words = ["[UNK]", "[CLS]", "do", "##es", "n't", "dog", "##s", ".", ",", "not", "'", "s", "東", "é", "a"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.add_special_tokens(["[CLS]"])
    return tokenizer


def word_suffix() -> Tokenizer:
    vocab = {piece: i for i, piece in enumerate(["a", "b", "ab</w>", "b</w>", "é</w>", "."])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


def undecorated() -> Tokenizer:
    return Tokenizer(models.WordLevel({"one": 0, "two": 1, "[UNK]": 2}, unk_token="[UNK]"))


KINDS = {
    "byte_level": byte_level,
    "llama_like": llama_like,
    "metaspace_fallback": metaspace_fallback,
    "word_piece": word_piece,
    "word_suffix": word_suffix,
    "undecorated": undecorated,
}


@pytest.fixture(scope="session")
def backends() -> dict[str, Tokenizer]:
    return {name: build() for name, build in KINDS.items()}
