"""Grammar of outputs in the Harmony format, whose final message or calls follow grammars."""

from __future__ import annotations

import msgspec

from moiety_engine.structured_outputs.calls import json_arguments
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.lark_text import quoted_with_tokens
from moiety_engine.structured_outputs.reasoned import ANSWER, tokens_but
from moiety_wire.grammars import GrammarSpec, HarmonyGrammar

CONTROL_TOKENS = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>")
_FIRST_TOOL_LINE = 3  # of the rules, with one line for each tool's arguments


def harmony_of(spec: GrammarSpec) -> HarmonyGrammar:
    """Decode the spec's text. Raises GrammarRefused."""
    try:
        form = msgspec.json.decode(spec.text, type=HarmonyGrammar)
    except (ValueError, RecursionError) as exc:
        raise GrammarRefused(f"the grammar of the Harmony format cannot be decoded: {exc}") from exc
    if missing := [token for token in CONTROL_TOKENS if token not in form.special]:
        raise GrammarRefused(f"the model has no control token {missing[0]}, which the Harmony format needs")
    return form


def tool_at_line(text: str, line: int) -> tuple[str, str]:
    """Return the name and the schema of the tool whose arguments are in a line of the rules, by the spec's text."""
    tool = msgspec.json.decode(text, type=HarmonyGrammar).tools[line - _FIRST_TOOL_LINE]
    return tool.name, tool.schema


def harmony_rules(form: HarmonyGrammar) -> str:
    """Return the rules in Lark's syntax, which refer to the final message's grammar. Raises GrammarRefused.

    A call names its recipient after the channel, or before it as the chat template writes it.
    """

    def text_of(text: str) -> str:
        return quoted_with_tokens(text, form.special)

    try:
        arguments = [json_arguments(tool, number) for number, tool in enumerate(form.tools)]
    except (ValueError, RecursionError) as exc:
        raise GrammarRefused(f"a tool's parameters are not a valid JSON schema: {exc}") from exc
    next_turn = text_of("<|end|><|start|>assistant")
    rules = [f"arguments_{i}: {schema}" for i, schema in enumerate(arguments)]
    rules += [
        tokens_but([*form.banned_ids, *form.special.values()]),
        f"thought: {text_of('<|channel|>analysis<|message|>')} text {next_turn}",
        f"preamble: {text_of('<|channel|>commentary<|message|>')} text {next_turn}",
        f"final: {text_of('<|channel|>final<|message|>')} {'text' if form.answer is None else ANSWER}",
        f'json: (" "? {text_of("<|constrain|>json")} | " json" | " ")? {text_of("<|message|>")}',
    ]
    for i, tool in enumerate(form.tools):
        to_name, name = text_of(f"to=functions.{tool.name}"), f"json arguments_{i} {text_of('<|call|>')}"
        rules.append(
            f'call_{i}: {text_of("<|channel|>")} "commentary " {to_name} {name}'
            f' | " " {to_name} {text_of("<|channel|>")} "commentary" {name}'
        )
    ends = [f"call_{i}" for i in range(len(arguments))] + ([] if form.must_call else ["final"])
    if not ends:
        raise GrammarRefused("the output must end with a call, but there is no tool")
    may_preface = form.answer is None and not form.must_call
    before = "(thought | preamble)*" if may_preface else "thought*"
    return "\n".join(["%llguidance {}", f"start: {before} ({' | '.join(ends)})", *rules])
