"""Grammars of custom tools' inputs, in each way in which formats of tool calls write an input.

Some formats write the input as a JSON string (`escaped_grammars`), others as it is, up to a tag. Where ordinary text
can spell that tag, a grammar must exclude it. This is exact for a terminal, so a grammar whose rules do not refer to
themselves is rewritten with terminals in place of its rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from functools import lru_cache

from moiety_platform.inference.escaped_grammars import (
    PART,
    MalformedGrammar,
    NotRewritable,
    check_length,
    check_start,
    escaped_grammar,
    fault_of_part,
    rewritten_regex,
)
from moiety_text.tools.offer import INPUT_TERMINAL, InputFaults, InputGrammar

_MAX_NESTED = 100  # rules that refer to each other
_DEFINITION = re.compile(r"^[ \t]*[?!]?(?P<name>_?[A-Za-z]\w*)(?:\.-?\d+)?[ \t]*:", re.MULTILINE)
_PIECE = re.compile(
    rf"(?P<label>->[ \t]*\w+)|(?P<attributes>\[)|(?P<part>{PART.pattern})|(?P<rule>\b_?[A-Za-z]\w*\b)", re.VERBOSE
)


@lru_cache(64)  # the same tools come with each turn, and are asked for several times in one
def input_grammar_of(syntax: str, definition: str) -> InputGrammar:
    """Return the grammar of a custom tool's input. `syntax` is "lark" or "regex".

    Linear in the length of the definition.
    """
    escaped, why_not_escaped = _or_fault(escaped_grammar, syntax, definition)
    plain, why_not_plain = _or_fault(_plain_grammar, syntax, definition)
    terminals, why_not_terminals = _or_fault(_terminals, syntax, definition) if plain else ("", why_not_plain)
    return InputGrammar(
        escaped, plain, terminals, syntax, definition, InputFaults(why_not_escaped, why_not_plain, why_not_terminals)
    )


def _or_fault(rewrite: Callable[[str, str], str], syntax: str, definition: str) -> tuple[str, str]:
    """Return the rewritten grammar and "", or "" and the fault because of which it cannot be rewritten."""
    try:
        return rewrite(syntax, definition), ""
    except NotRewritable as exc:
        return "", str(exc)


def check_well_formed(syntax: str, definition: str) -> None:
    """Raise MalformedGrammar for a grammar with an error in its lexemes, expressions or classes.

    Errors between rules, such as names without a definition, are found by the engine.
    """
    try:
        escaped_grammar(syntax, definition)
    except MalformedGrammar:
        raise
    except NotRewritable:
        return


def _plain_grammar(syntax: str, definition: str) -> str:
    """Return the grammar of the input as it is.

    Raises NotRewritable for a grammar with references to tokens and other grammars, or with `%ignore`.
    """
    check_length(definition)
    if syntax == "regex":
        return f"start: {rewritten_regex(definition, {})}"
    check_start(definition)
    for found in PART.finditer(definition):
        if found["unknown"] is not None:
            raise fault_of_part(found)
    return definition


def _terminals(syntax: str, definition: str) -> str:
    if syntax == "regex":
        return f"{INPUT_TERMINAL}: {rewritten_regex(definition, {})}"
    return _terminals_of(definition)


def _terminals_of(definition: str) -> str:
    """Return the grammar with terminals in place of its rules. Raises NotRewritable."""
    definitions = list(_DEFINITION.finditer(definition))
    names = {found["name"]: _terminal_named(found["name"]) for found in definitions}
    if len(set(names.values())) < len(definitions) or "start" not in names:
        raise NotRewritable("a name is defined twice, or as a rule and as a terminal; give each its own")
    ends = [*(found.start() for found in definitions[1:]), len(definition)]
    parts = [_with_terminals(definition[: definitions[0].start()], names)[0]]
    referred: dict[str, Set[str]] = {}
    for found, end in zip(definitions, ends, strict=True):
        body, used = _with_terminals(definition[found.end() : end], names)
        referred[names[found["name"]]] = used
        parts.append(f"{names[found['name']]}: {body}")
    _check_depth(INPUT_TERMINAL, referred, {}, 0)
    return "".join(parts)


def _terminal_named(name: str) -> str:
    return name if name.isupper() else f"RULE_{name.upper()}"


def _with_terminals(text: str, names: Mapping[str, str]) -> tuple[str, Set[str]]:
    """Return a piece of a grammar with terminals in place of rules, and the names to which it refers."""
    used: set[str] = set()

    def rewritten(found: re.Match[str]) -> str:
        if found["attributes"] is not None:
            raise NotRewritable("'[' is not supported in this model's format of tool calls; write (…)? for an option")
        if found["unknown"] is not None:
            raise fault_of_part(found)
        if found["label"] is not None or found["comment"] is not None:
            return ""
        name = found["rule"] or found["terminal"]
        if name is None:
            return found[0]
        used.add(names.get(name, name))
        return names.get(name, name)

    return _PIECE.sub(rewritten, text), used


def _check_depth(name: str, referred: Mapping[str, Set[str]], known: dict[str, bool], depth: int) -> None:
    """Raise NotRewritable for a name that refers to itself, or through too many others."""
    if known.get(name) or name not in referred:
        return
    if name in known or depth > _MAX_NESTED:
        rule = name.removeprefix("RULE_").lower()
        raise NotRewritable(
            f"the rule {rule[:64]!r} refers to itself, or through more than {_MAX_NESTED} others, which is not "
            "supported in this model's format of tool calls; write a repetition instead"
        )
    known[name] = False
    for other in referred[name]:
        _check_depth(other, referred, known, depth + 1)
    known[name] = True
