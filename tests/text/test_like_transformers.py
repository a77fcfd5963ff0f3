"""Chat templates, their variables and their messages are what transformers' apply_chat_template makes of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer

from moiety_text.chat import ChatTemplate
from moiety_text.errors import TemplateRefused
from moiety_text.folder import read_text_model

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "weather?", "name": None},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "look", "arguments": {"at": None}}}],
    },
    {"role": "tool", "tool_call_id": "a", "content": "rain"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
LINES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path, backends: dict[str, tokenizers.Tokenizer]) -> Path:
    (tmp_path / "tokenizer.json").write_text(backends["byte_level"].to_str())
    return tmp_path


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value))


def both(folder: Path, tools: list[Any] | None = None, talk: list[dict[str, Any]] | None = None) -> tuple[str, str]:
    """What we and transformers make of the conversation; "refused" where one does not render it."""
    text = read_text_model(folder)
    try:
        ours = ChatTemplate(text.chat_template, text.special_tokens).render(talk or TALK, tools=tools)
    except TemplateRefused:
        ours = "refused"
    theirs_of = AutoTokenizer.from_pretrained(folder)
    try:
        theirs = theirs_of.apply_chat_template(talk or TALK, tools=tools, tokenize=False, add_generation_prompt=True)
    except Exception:
        theirs = "refused"
    return ours, str(theirs)


CONFIG: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>"}
FILES: dict[str, dict[str, Any]] = {
    "one in the configuration": {"tokenizer_config.json": CONFIG | {"chat_template": "A" + LINES}},
    "a file beside one in the configuration": {
        "tokenizer_config.json": CONFIG | {"chat_template": "A" + LINES},
        "chat_template.jinja": "B" + LINES,
    },
    "additional ones": {
        "tokenizer_config.json": CONFIG,
        "chat_template.jinja": "B" + LINES,
        "additional_chat_templates/tool_use.jinja": "T" + LINES,
        "additional_chat_templates/rag.jinja": "R" + LINES,
    },
    "additional ones beside the configuration's": {
        "tokenizer_config.json": CONFIG | {"chat_template": [{"name": "default", "template": "A" + LINES}]},
        "chat_template.jinja": "B" + LINES,
        "additional_chat_templates/tool_use.jinja": "T" + LINES,
    },
    "additional ones without tool_use": {
        "tokenizer_config.json": CONFIG,
        "chat_template.jinja": "B" + LINES,
        "additional_chat_templates/rag.jinja": "R" + LINES,
    },
    "additional ones without a default": {
        "tokenizer_config.json": CONFIG | {"chat_template": "A" + LINES},
        "additional_chat_templates/tool_use.jinja": "T" + LINES,
    },
    "several in the configuration without a default": {
        "tokenizer_config.json": CONFIG | {"chat_template": [{"name": "tool_use", "template": "T" + LINES}]},
    },
    "other files in the folder": {
        "tokenizer_config.json": CONFIG,
        "chat_template.jinja": "B" + LINES,
        "additional_chat_templates/readme.txt": "nothing",
    },
}


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("files", FILES)
def test_the_template_is_the_one_that_transformers_takes(folder: Path, files: str, tools: list[Any] | None) -> None:
    write(folder, FILES[files])
    ours, theirs = both(folder, tools)
    assert ours == theirs


VARIABLES = (
    "{{ bos_token }}|{{ eos_token }}|{{ image_token }}|{{ boi_token }}|{{ think }}|{{ extra_special_tokens }}|"
    "{{ additional_special_tokens }}|{{ unk_token }}|{{ add_bos_token }}"
)
NAMED: dict[str, dict[str, Any]] = {
    "a list": {"tokenizer_config.json": CONFIG | {"extra_special_tokens": ["<image>", "<boi>"]}},
    "a list of old": {"tokenizer_config.json": CONFIG | {"additional_special_tokens": ["<image>", "<boi>"]}},
    "a dictionary": {
        "tokenizer_config.json": CONFIG | {"extra_special_tokens": {"image_token": "<image>", "think": "<think>"}}
    },
    "a dictionary of descriptions": {
        "tokenizer_config.json": CONFIG
        | {"extra_special_tokens": {"image_token": {"__type": "AddedToken", "content": "<image>", "special": True}}}
    },
    "a dictionary under the name that is written": {
        "tokenizer_config.json": CONFIG | {"model_specific_special_tokens": {"think": "<think>"}}
    },
    "keys of their own": {"tokenizer_config.json": CONFIG | {"image_token": "<image>", "add_bos_token": True}},
    "a map of old": {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "special_tokens_map.json": {"bos_token": "<m>", "eos_token": {"content": "<e>", "lstrip": False}},
    },
    "a map of old beside the configuration": {
        "tokenizer_config.json": CONFIG,
        "special_tokens_map.json": {"bos_token": "<m>"},
    },
    "a map of old that is void": {
        "tokenizer_config.json": CONFIG | {"added_tokens_decoder": {"300": {"content": "<x>", "special": True}}},
        "special_tokens_map.json": {"bos_token": "<m>", "unk_token": "<u>"},
    },
}


@pytest.mark.parametrize("named", NAMED)
def test_templates_know_the_special_tokens_that_transformers_tells_them(folder: Path, named: str) -> None:
    write(folder, NAMED[named] | {"chat_template.jinja": VARIABLES})
    ours, theirs = both(folder)
    assert ours == theirs


@pytest.mark.parametrize(
    "template",
    [
        LINES,
        "{% for m in messages %}{{ m['content'] | trim }}{% endfor %}",
        "{% for m in messages %}{% if m.content is none %}N{% endif %}{{ m.content is defined }}{% endfor %}",
        "{% for m in messages %}{{ 'content' in m }}{{ m.content is string }}{{ 'name' in m }}{% endfor %}",
        "{% for m in messages %}{{ m.content or 'nothing' }}{{ m.reasoning_content or '' }}{% endfor %}",
        "{% for m in messages %}{{ m.content | default('none') }}{{ m | tojson }}{% endfor %}",
        "{% for m in messages %}{% if 'x' in m.content %}x{% endif %}{{ m.get('content', 'got') }}{% endfor %}",
        "{% for m in messages %}{% for k, v in m.items() %}{{ k }};{% endfor %}{{ m | length }}{% endfor %}",
        "{% for m in messages %}{{ m.content | length }}{{ m.content ~ '!' }}{{ m.missing }}{% endfor %}",
        "{% for m in messages %}{{ (m.tool_calls or [])[0].function.arguments }}{% endfor %}",
    ],
)
def test_a_field_that_is_null_is_missing_as_it_is_to_transformers(folder: Path, template: str) -> None:
    write(folder, {"tokenizer_config.json": CONFIG, "chat_template.jinja": template})
    ours, theirs = both(folder)
    assert ours == theirs
    if theirs != "refused":
        assert "None" not in theirs or "is none" in template or "arguments" in template or "tojson" in template


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}[{{ '<' + m['content'] + '>' }}]{% endfor %}", "[<weather?>][<>][<rain>]"),
        ("{% for m in messages %}[{{ m.content.strip() }}]{% endfor %}", "[weather?][][rain]"),
        ("{% for m in messages %}[{{ m.content.split('a')[0] }}]{% endfor %}", "[we][][r]"),
        ("{% for m in messages %}{{ m.missing.strip() }}{% endfor %}", "refused"),
        ("{{ 'a' + messages[0].missing }}", "refused"),
        ("{{ messages[1].content.__class__ }}", ""),
    ],
)
def test_a_template_that_takes_null_for_text_is_not_refused_for_it_though_transformers_does(
    folder: Path, template: str, expected: str
) -> None:
    write(folder, {"tokenizer_config.json": CONFIG, "chat_template.jinja": template})
    ours, theirs = both(folder)
    assert ours == expected
    assert theirs in ("refused", expected)
