"""Answers of a scripted engine for agents: it calls an offered tool, repeats the tool's result, and fills in schemas.

It reads the prompt that the gateway has made, as a model does. So a client's tool loop ends with the tool's own result
in the answer, which shows that tools, calls and results pass the gateway in both directions. A user may say which tools
to call: a line `Call NAME with {"argument": …}` for each call, or `Use no tools`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from moiety_platform.engine_client.fake import Piece
from moiety_text.tokenizer import Tokenizer
from moiety_wire.grammars import GrammarKind, GrammarSpec, ReasonedGrammar, ToolCallsGrammar
from moiety_wire.images import image_size
from moiety_wire.messages import Submit

IMAGE = "<|image|>"
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
THOUGHT = "The tool knows it."
CHAT_TEMPLATE = """\
{%- if tools %}<|system|><tools>{{ tools | tojson }}</tools>
{% endif %}
{%- for message in messages %}<|{{ message.role }}|>
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content or [] %}{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}
{%- endif %}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
SHELLS = ("Bash", "bash", "exec_command", "run_commands", "shell")  # preferred where an agent offers many tools
COMMAND = "echo moiety"
KNOWN_VALUES: dict[str, Any] = {
    **dict.fromkeys(("command", "cmd"), COMMAND),
    "commands": [COMMAND],
    "description": "say moiety",
    "city": "Basel",
}
_TOOLS = re.compile(r"<tools>(.*?)</tools>\n", re.DOTALL)
_ASKED_CALL = re.compile(r"^Call (\S+) with (\{.*?\})(?=\n|<\||$)", re.MULTILINE)
ANY_OBJECT = {"type": "object"}
_NO_TOOLS = "Use no tools"
_RESULT_CHARS = 400


class ScriptedAnswers:
    """Script of an engine whose tokenizer has the markers of reasoning and tool calls as tokens."""

    def __init__(self, tokenizer_json: str) -> None:
        self._tokenizer = Tokenizer.from_json(tokenizer_json)
        self._marker_ids = {token.content: one for one, token in self._tokenizer.added_tokens.items()}
        self._marker = re.compile("|".join(map(re.escape, MARKERS)))

    def __call__(self, submit: Submit) -> Sequence[Piece]:
        prompt = self._tokenizer.decode(submit.prompt_ids, skip_special_tokens=False)
        begun = prompt.rpartition("<|assistant|>")[2].rpartition("</think>")[2].lstrip()  # where a call is forced
        must_answer = _schema_of(submit.grammar) is not None and _unreasoned(submit.grammar) is submit.grammar
        is_silent = bool(begun) or prompt.rstrip().endswith("</think>") or must_answer
        thought = "" if is_silent else f"<think>{THOUGHT}</think>"
        return list(self._pieces(thought + answer_to(prompt, submit).removeprefix(begun)))

    def _pieces(self, text: str) -> Iterator[Piece]:
        """Yield one token a marker, and one a word for all other text."""
        at = 0
        for found in self._marker.finditer(text):
            yield from self._words(text[at : found.start()])
            yield self._marker_ids[found[0]], found[0]
            at = found.end()
        yield from self._words(text[at:])

    @staticmethod
    def _words(text: str) -> Iterator[Piece]:
        for word in re.findall(r"\S+\s*|\s+", text):
            yield 65, word


def answer_to(prompt: str, submit: Submit) -> str:
    """Return the answer after the reasoning."""
    tools = {} if _NO_TOOLS in _last_turn(prompt) else offered_tools(prompt, submit)
    asked = [found for found in _ASKED_CALL.findall(_last_turn(prompt)) if found[0] in tools]
    num_results = _last_turn(prompt).count("<|tool|>")
    if num_results < len(asked):
        name, arguments = asked[num_results]
        return call_of(name, json.loads(arguments))
    result = _last_result(prompt, "<|tool|>" if "final_answer" not in tools else "Observation:")
    if result is not None:
        text = f"The tool says: {result}"
        if "final_answer" in tools:  # smolagents, whose results are user messages, and whose answer is a call
            return call_of("final_answer", {"answer": text})
        return text if _schema_of(submit.grammar) is None else _document(submit)
    if submit.images and _schema_of(submit.grammar) is None:
        width, height = image_size(submit.images[-1].data)
        return f"I see an image of {width} × {height} pixels."
    if tools:
        name = next((name for name in SHELLS if name in tools), next(iter(tools)))
        return call_of(name, instance_of(tools[name]))
    return _document(submit) if _schema_of(submit.grammar) is not None else "The answer is 42, as everybody knows."


def _last_result(prompt: str, mark: str) -> str | None:
    """Return the result of a tool that the last turn begins with `mark`; None where it is no result."""
    _, found, result = _last_turn(prompt).rpartition(mark)
    return result.partition("<|")[0].strip()[:_RESULT_CHARS] if found else None


def _last_turn(prompt: str) -> str:
    """Return the last message of the user and what follows it."""
    return prompt[prompt.rfind("<|user|>") :]


def call_of(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def offered_tools(prompt: str, submit: Submit) -> dict[str, Any]:
    """Return the schemas of the tools by name: those of the prompt, or of the grammar, which a choice may narrow.

    A tool that is not strict accepts any object in the grammar, and the prompt has its schema.
    """
    found = _TOOLS.search(prompt)
    functions = [tool.get("function", tool) for tool in (json.loads(found[1]) if found else [])]
    told = {function["name"]: function.get("parameters") or {} for function in functions}
    grammar = _unreasoned(submit.grammar)
    if grammar is None or grammar.kind is not GrammarKind.CALLS:
        return told
    held = {tool.name: json.loads(tool.preferred_schema or tool.schema) for tool in _calls_grammar(grammar.text).tools}
    return {name: told.get(name, schema) if schema == ANY_OBJECT else schema for name, schema in held.items()}


def instance_of(schema: Any, name: str = "", root: Any = None) -> Any:
    """Return a small valid document of a JSON schema; properties that are not required are left out."""
    root = schema if root is None else root
    if not isinstance(schema, dict):
        return "text"
    inner = _inner(schema, root)
    if inner is not None:
        return instance_of(inner, name, root)
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    return KNOWN_VALUES[name] if name in KNOWN_VALUES else _instance_of_type(schema, root)


def _inner(schema: dict[str, Any], root: Any) -> Any:
    """Return the schema that this one refers to, or the first of its alternatives; None where it says all itself."""
    if "$ref" in schema:
        target = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        return target
    return next((schema[key][0] for key in ("anyOf", "oneOf", "allOf") if schema.get(key)), None)


def _instance_of_type(schema: dict[str, Any], root: Any) -> Any:
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties", {})
        return {one: instance_of(properties.get(one), one, root) for one in schema.get("required", [])}
    if kind == "array":
        return [instance_of(schema.get("items"), "", root)] * schema.get("minItems", 1)
    number = schema.get("minimum", 42)
    return {"integer": number, "number": number, "boolean": True, "null": None}.get(kind, "text")


def _calls_grammar(text: str) -> ToolCallsGrammar:
    return msgspec.json.decode(text, type=ToolCallsGrammar)


def _schema_of(grammar: GrammarSpec | None) -> str | None:
    """Return the JSON schema of the answer, empty for any object; None where it may be text."""
    grammar = _unreasoned(grammar)
    if grammar is None:
        return None
    if grammar.kind is GrammarKind.CALLS:
        return _schema_of(_calls_grammar(grammar.text).answer)
    return grammar.text if grammar.kind in {GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT} else None


def _unreasoned(grammar: GrammarSpec | None) -> GrammarSpec | None:
    """Return the grammar of the output after the reasoning."""
    if grammar is None or grammar.kind is not GrammarKind.REASONED:
        return grammar
    return msgspec.json.decode(grammar.text, type=ReasonedGrammar).answer


def _document(submit: Submit) -> str:
    text = _schema_of(submit.grammar)
    return json.dumps(instance_of(json.loads(text)) if text else {"answer": 42})
