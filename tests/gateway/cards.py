"""Model cards of scripted engines, with a tokenizer of one token a byte and chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import tokenizers

from moiety_wire.images import ImageRules
from moiety_wire.messages import ModelCard

MODEL = "tiny"
TOOL_TEMPLATES = Path(__file__).parent / "templates"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
IMAGE_PLACEHOLDER = "<|image|>"
IMAGE_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
)


def _tokenizer_json() -> str:
    """Return a tokenizer with one token for each byte and an end token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer.to_str()


def make_card(
    engine_id: str = "engine-1", model: str = MODEL, max_context_tokens: int = 512, embedding_width: int = 0
) -> ModelCard:
    return ModelCard(
        engine_id=engine_id,
        model=model,
        family="scripted",
        tokenizer_json=_tokenizer_json(),
        chat_template=TEMPLATE,
        special_tokens={"eos_token": "<|end|>"},
        eos_token_ids=(256,),
        max_context_tokens=max_context_tokens,
        vocab_size=257,
        max_num_logprobs=20,
        created_unix_s=1_700_000_000,
        dtype="float32",
        device="none",
        embedding_width=embedding_width,
    )


def write_tokenizer(folder: Path, card: ModelCard) -> None:
    """Write the files that the tokenizer and the chat template of an external engine are read from."""
    (folder / "tokenizer.json").write_text(card.tokenizer_json)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "chat_template.jinja").write_text(card.chat_template)


NewCard = Callable[..., ModelCard]
ToolCard = Callable[..., ModelCard]


@pytest.fixture
def card() -> ModelCard:
    return make_card()


@pytest.fixture(scope="session")
def any_card() -> ModelCard:
    return make_card()


@pytest.fixture
def new_card() -> NewCard:
    return make_card


@pytest.fixture
def tool_card() -> ToolCard:
    """Return a function that makes the card of a model that is named for the family of its chat template. The markers
    of its calls are special tokens or other added ones."""

    def make(
        family: str,
        *,
        template: str = "",
        special: Sequence[str] = (),
        added: Sequence[str] = (),
        engine_id: str = "",
    ) -> ModelCard:
        card = make_card(engine_id or family, family, max_context_tokens=20_000)
        tokenizer = tokenizers.Tokenizer.from_str(card.tokenizer_json)
        tokenizer.add_special_tokens(list(special))
        tokenizer.add_tokens(list(added))
        return msgspec.structs.replace(
            card,
            chat_template=template or (TOOL_TEMPLATES / f"{family}.jinja").read_text(),
            tokenizer_json=tokenizer.to_str(),
            vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
        )

    return make


@pytest.fixture
def thinking_card(tool_card: ToolCard) -> ModelCard:
    """Return a function that makes the card of a model with reasoning, which requests can disable; its markers are
    tokens."""
    switch = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    template = (TOOL_TEMPLATES / "hermes.jinja").read_text() + switch
    return tool_card("hermes", template=template, added=("<think>", "</think>"))


@pytest.fixture
def seeing(card: ModelCard) -> ModelCard:
    """A card of a model that reads images, whose placeholder is a control token of the template."""
    tokenizer = tokenizers.Tokenizer.from_str(card.tokenizer_json)
    tokenizer.add_special_tokens([IMAGE_PLACEHOLDER])
    rules = ImageRules(
        image_token_id=tokenizer.token_to_id(IMAGE_PLACEHOLDER),
        start_token_id=0,
        end_token_id=0,
        patch_size=16,
        merge_size=2,
        min_pixels=1024,
        max_pixels=1 << 20,
        max_images=3,
        max_bytes=10_000,
        max_total_bytes=20_000,
        max_source_pixels=1 << 20,
    )
    files = {"tokenizer_json": tokenizer.to_str(), "vocab_size": card.vocab_size + 1, "chat_template": IMAGE_TEMPLATE}
    return msgspec.structs.replace(card, images=rules, **files)
