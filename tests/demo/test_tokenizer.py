"""Any text survives the tokenizer; digits and quoted letters are single tokens; turns are as the template has them."""

import functools
import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment
from tokenizers import Tokenizer

from moiety_demo.batches import TrainingEncoder
from moiety_demo.conversation import sample_conversation
from moiety_demo.tokenizer import CHAT_TEMPLATE, ROLE_TOKENS, SPECIAL_TOKENS, VOCAB_SIZE, build_tokenizer, render_prompt


@functools.cache
def tokenizer() -> Tokenizer:
    return build_tokenizer()


def render(messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
    template = Environment(autoescape=False).from_string(CHAT_TEMPLATE)
    return template.render(messages=messages, add_generation_prompt=add_generation_prompt)


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    assert tokenizer().decode(tokenizer().encode(text).ids, skip_special_tokens=False) == text


@given(st.text(alphabet="0123456789 ,+-"))
def test_digits_are_single_tokens(text: str) -> None:
    tokens = tokenizer().encode(text).tokens
    assert sum(token.isdigit() for token in tokens) == sum(character.isdigit() for character in text)


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=12))
def test_a_quoted_word_is_read_letter_by_letter(word: str) -> None:
    tokens = tokenizer().encode(f'Reverse "{word}".').tokens
    assert tokens[2:-2] == list(word)


def test_frequent_words_are_single_tokens() -> None:
    assert tokenizer().encode("What is the capital of").tokens == ["What", "Ġis", "Ġthe", "Ġcapital", "Ġof"]


def test_the_vocabulary_is_within_its_size_and_has_its_special_tokens() -> None:
    assert tokenizer().get_vocab_size() <= VOCAB_SIZE
    assert all(len(tokenizer().encode(token).ids) == 1 for token in (*SPECIAL_TOKENS, *ROLE_TOKENS))
    assert tokenizer().decode(tokenizer().encode("<|im_end|>").ids) == ""


def test_building_twice_gives_the_same_tokenizer() -> None:
    assert json.loads(build_tokenizer().to_str()) == json.loads(tokenizer().to_str())


@pytest.mark.parametrize("seed", range(50))
def test_training_sequences_are_exactly_what_the_chat_template_writes(seed: int) -> None:
    conversation = sample_conversation(Random(seed))
    messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
    for task in conversation.turns:
        messages += [{"role": "user", "content": task.prompt}, {"role": "assistant", "content": task.answer}]
    ids, learned = TrainingEncoder(tokenizer()).encode(conversation)
    assert ids == tokenizer().encode(render(messages)).ids
    kept = [token for token, keep in zip(ids, learned, strict=True) if keep]
    answers = "".join(f"{task.answer}<|im_end|>" for task in conversation.turns)
    assert tokenizer().decode(kept, skip_special_tokens=False) == answers


def test_the_prompt_for_an_answer_is_the_templates() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2 = ?"}]
    pairs = [(message["role"], message["content"]) for message in messages]
    assert render_prompt(pairs) == render(messages, add_generation_prompt=True)
