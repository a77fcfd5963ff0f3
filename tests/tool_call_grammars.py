"""Grammars of tool calls as a gateway makes them, with a tokenizer of bytes that has the markers of all formats."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.grammar_walks import GrammarWalker

from moiety_engine.scripted.text_model import END_ID, scripted_text_model
from moiety_engine.structured_outputs.compiler import GrammarCompiler
from moiety_engine.structured_outputs.grammar_tokenizer import GrammarTokenizer
from moiety_platform.inference.generation import Conversation, Generation
from moiety_platform.inference.model_texts import ModelText
from moiety_text.tokenizer import Tokenizer
from moiety_text.tools.formats import ToolFormat
from moiety_text.tools.offer import Tool, ToolOffer
from moiety_text.tools.registry import find_tool_format
from moiety_wire.grammars import GrammarSpec
from moiety_wire.messages import ModelCard, Sampling

TEMPLATES = Path(__file__).parent / "gateway" / "templates"
CALL_TEMPLATES = Path(__file__).parent / "text" / "templates"
SCRIPTED = scripted_text_model()
ADDED = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *(
        "   ",
        "user\n",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "｜DSML｜",
        "<|tool_calls_section_begin|>",
    ),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *(
        "[CALL_ID]",
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
        "]<]minimax[>[",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
    ),
)
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "how": {"enum": ["<tool_call>", "<think>", 3]}},
    "required": ["city", "how"],
    "additionalProperties": False,
}
TOOLS = (Tool("now", "", {"type": "object"}), Tool("forecast", "", PLACE, strict=True))
OTHER_FAMILIES = (
    *("qwen3_coder", "mimo", "seed_oss", "glm45", "glm47", "hy_v3", "minimax_m2", "dots", "step3", "deepseek_v32"),
    *("deepseek_v4", "deepseek_v3", "deepseek_v31", "kimi_k2", "cohere_command", "granite", "phi4_mini"),
    *(
        "phi4_mini_json",
        "nemotron_json",
        "hunyuan_a13b",
        "json_list",
        "gemma4",
        "minimax_m3",
        "llama4_pythonic",
        "lfm2",
    ),
)


def with_added_tokens(special: bool, contents: tuple[str, ...] = ADDED, **more: Any) -> str:
    spec = json.loads(SCRIPTED.tokenizer_json) | more
    for token_id, content in enumerate(contents, start=len(spec["model"]["vocab"])):
        spec["added_tokens"].append(spec["added_tokens"][0] | {"id": token_id, "content": content, "special": special})
    return json.dumps(spec)


def templates() -> dict[str, str]:
    found = {name: (TEMPLATES / f"{name}.jinja").read_text() for name in ("hermes", "llama", "mistral")}
    found["hermes with thoughts"] = found["hermes"] + "{% if false %}<think></think>{% endif %}"
    found["mistral of later models"] = (
        "{{ tools }}{% for call in messages[0].tool_calls %}[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments }}"
        "{% endfor %}"
    )
    found["mistral with ids"] = found["mistral of later models"].replace("[ARGS]", "[CALL_ID]{{ call.id }}[ARGS]")
    around = "{{ tools }}{% set calls = messages[0].tool_calls %}"
    return found | {name: around + (CALL_TEMPLATES / f"{name}.jinja").read_text() for name in OTHER_FAMILIES}


FORMATS = tuple(templates())


def format_named(name: str) -> ToolFormat:
    way = find_tool_format(templates()[name], "json_list" if name == "json_list" else "auto")
    assert way is not None
    return way


class GrammarText:
    """One tokenizer with its compiler."""

    def __init__(self, tokenizer_json: str, eos_token_ids: tuple[int, ...] = (END_ID,)) -> None:
        self.json, self.tokenizer = tokenizer_json, Tokenizer.from_json(tokenizer_json)
        self.ids = {token.content: one for one, token in self.tokenizer.added_tokens.items()}
        self.compiler = GrammarCompiler(tokenizer_json, eos_token_ids)
        tokens = GrammarTokenizer(tokenizer_json, eos_token_ids).tokens
        self.walker = GrammarWalker(self.compiler, tokens, eos_token_ids)

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def spell(self, told: str, way: ToolFormat) -> list[int]:
        """Token ids with the markers of the format as tokens, and all else as ordinary ones."""
        marked = re.split("(" + "|".join(map(re.escape, way.markers)) + ")", told)
        return [
            one
            for part in marked
            for one in ([self.ids[part]] if part in way.markers and part in self.ids else part.encode())
        ]

    def card(self, name: str) -> ModelCard:
        """The card of a model with this tokenizer and a template of this name."""
        size = self.tokenizer.vocab_size
        return ModelCard(
            *("e", "m", "qwen", self.json, templates()[name], {}, (END_ID,), 4096, size, 0, 0, "float32", "cpu"),
            follows_grammars=True,
            tool_format="json_list" if name == "json_list" else "auto",
        )

    def grammar(self, name: str, offer: ToolOffer) -> GrammarSpec:
        """What a gateway makes of tools, for a model with this tokenizer and a template of this name."""
        prompt = Conversation(({"role": "user", "content": "Hi"},), tools=offer)
        generation = Generation("m", (prompt,), 1, Sampling(), None)
        grammar = ModelText(self.card(name), 8192).answer_format(generation, 0, []).grammar
        assert grammar is not None
        return grammar
