from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from moiety_text.chat import ChatTemplate
from moiety_text.errors import ModelFilesUnusable
from moiety_text.folder import read_text_model
from moiety_text.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path: Path, backends: dict[str, tokenizers.Tokenizer]) -> Path:
    (tmp_path / "tokenizer.json").write_text(backends["byte_level"].to_str())
    return tmp_path


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_all_files_are_read(folder: Path) -> None:
    config = {
        "bos_token": {"content": "<s>", "special": True},
        "eos_token": "<|im_end|>",
        "pad_token": None,
        "add_bos_token": True,
        "chat_template": "hi",
    }
    write(folder, "tokenizer_config.json", config)
    write(folder, "generation_config.json", {"eos_token_id": [1, 7]})
    write(folder, "config.json", {"eos_token_id": 5})
    text = read_text_model(folder)
    eos = Tokenizer.from_json(text.tokenizer_json).encode("<|im_end|>")[0]
    assert text.chat_template == "hi"
    assert text.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert text.eos_token_ids == tuple(sorted({1, 7, eos}))


def test_the_model_config_names_the_end_where_generation_config_does_not(folder: Path) -> None:
    write(folder, "config.json", {"text_config": {"eos_token_id": 5}})
    text = read_text_model(folder)
    assert (text.eos_token_ids, text.chat_template, text.special_tokens) == ((5,), "", {})


def test_a_template_file_wins_over_the_tokenizer_config(folder: Path) -> None:
    write(folder, "tokenizer_config.json", {"chat_template": "old"})
    write(folder, "chat_template.jinja", "new")
    assert read_text_model(folder).chat_template == "new"


def test_named_templates_serve_their_kinds_of_requests(folder: Path) -> None:
    named = [{"name": "default", "template": "\n  plain {{ x }} \n"}, {"name": "tool_use", "template": "\n  tools \n"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    template = ChatTemplate(read_text_model(folder).chat_template, {})
    plain, tools = (ChatTemplate(entry["template"], {}).render([], extra={"x": 1}) for entry in named)
    assert template.render([], extra={"x": 1}) == plain
    assert template.render([], tools=[{}], extra={"x": 1}) == tools


def test_a_folder_without_a_tokenizer_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesUnusable, match="AutoTokenizer"):
        read_text_model(tmp_path)
    with pytest.raises(ModelFilesUnusable, match="is not a folder"):
        read_text_model(tmp_path / "none")


@pytest.mark.parametrize("broken", ["{", "[1]", '"x"'])
def test_a_broken_file_is_named(folder: Path, broken: str) -> None:
    write(folder, "generation_config.json", broken)
    with pytest.raises(ModelFilesUnusable, match=r"generation_config\.json"):
        read_text_model(folder)


def test_sampling_parameters_of_the_model_are_read_and_checked(folder: Path) -> None:
    said = {"temperature": 0.6, "top_p": 0.95, "top_k": -1, "do_sample": True, "min_p": None}
    write(folder, "generation_config.json", said)
    assert read_text_model(folder).sampling_defaults == {"temperature": 0.6, "top_p": 0.95, "top_k": 0}
    for bad in (True, "0.6", -1, 1e9):
        write(folder, "generation_config.json", {"temperature": bad})
        with pytest.raises(
            ModelFilesUnusable, match=r"generation_config\.json: temperature is .*must be from 0 to 100"
        ):
            read_text_model(folder)
