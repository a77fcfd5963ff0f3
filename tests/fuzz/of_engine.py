"""Targets of the engine: messages of gateways, outputs of models, and grammars and adapters of tenants."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tests.fuzz.mutations import of_json, of_msgpack
from tests.fuzz.target import Take, Target, split


def open_wire() -> Take:
    """Both directions and the notes of steps: what is understood is said again in the same way."""
    from moiety_wire.codec import decode_notes, decode_to_engine, decode_to_gateway, encode
    from moiety_wire.errors import UndecodableMessage

    def take(data: bytes) -> None:
        way, data = split(data, 3)
        try:
            if way == 2:
                decode_notes(data)
                return
            decode = decode_to_gateway if way else decode_to_engine
            messages = decode(data)
        except UndecodableMessage:
            return
        if messages:
            told = encode(*messages)
            assert encode(*decode(told)) == told, messages

    return take


def open_answers() -> Take:
    """Calls and thoughts in a model's answer, which are the same however its text is cut."""
    from moiety_text.reasoning import ThoughtReader
    from moiety_text.stop import StopFinder
    from moiety_text.tools.deltas import assemble
    from moiety_text.tools.registry import FAMILIES

    names = ("add", "find-it", "f")
    readers = [family.format_of("").reader for family in FAMILIES]

    def reader(way: int, number: int) -> Any:
        calls = None
        if way & 3:
            calls = readers[number](names, 1 if way & 16 else None, is_rest=bool(way & 32))
        return ThoughtReader(calls, is_open=bool(way & 8)) if way & 4 or calls is None else calls

    def take(data: bytes) -> None:
        way, data = split(data, 64)
        number, data = split(data, len(readers))
        size, data = (1 + data[0] % 16, data[1:]) if data else (1, b"")
        text = data.decode(errors="replace")
        whole, by_pieces = reader(way, number).read(text), reader(way, number)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        deltas = [delta for piece in pieces for delta in by_pieces.feed(piece)]
        assert assemble([*deltas, *by_pieces.end()]) == whole
        finder, shown = StopFinder(("</s>", "ab", "b\n")), ""
        for piece in pieces:
            more, stopped_by = finder.add(piece)
            shown += more
            if stopped_by is not None:
                assert text[len(shown) :].startswith(stopped_by), (shown, stopped_by)
                return
        assert shown + finder.flush() == text

    return take


def open_grammars() -> Take:
    """What an answer must be, compiled within its bounds, and followed for some tokens."""
    from tests.fuzz.words import tokenizer_json

    from moiety_engine.structured_outputs.compiler import GrammarCompiler
    from moiety_engine.structured_outputs.errors import GrammarRefused
    from moiety_wire.grammars import GrammarKind, GrammarSpec

    library, kinds = GrammarCompiler(tokenizer_json(), (2,)), list(GrammarKind)

    def take(data: bytes) -> None:
        way, data = split(data, len(kinds))
        try:
            follower = library.open(GrammarSpec(kinds[way], data.decode(errors="replace")))
        except GrammarRefused as refused:
            assert str(refused)
            return
        follower.take([len(data) % 250 + 8, 40, 41])

    return take


def open_preferred() -> Take:
    """Schemas of forced calls' tools that are not strict: each is enforced or left out, and no request is refused."""
    import msgspec
    from tests.fuzz.words import tokenizer_json

    from moiety_engine.structured_outputs.compiler import GrammarCompiler
    from moiety_engine.structured_outputs.errors import GrammarRefused
    from moiety_engine.structured_outputs.preferred_schemas import (
        num_unsupported,
        prefer_schemas,
        tools_with_preference,
    )
    from moiety_wire.grammars import (
        ArgumentNotation,
        GrammarKind,
        GrammarSpec,
        NotedArgumentsGrammar,
        ParameterTagsGrammar,
        ToolCallGrammar,
        ToolCallsGrammar,
    )

    compiler = GrammarCompiler(tokenizer_json(), (2,))
    tags = ParameterTagsGrammar("<parameter=", ">\n", ">\n", "</parameter>", "\n", "\n")
    notations = (None, tags, *(NotedArgumentsGrammar(notation, "|") for notation in ArgumentNotation))

    def grammar(way: int, schemas: list[str]) -> GrammarSpec:
        tools = [ToolCallGrammar(f"f{i}", '{"type":"object"}', preferred_schema=one) for i, one in enumerate(schemas)]
        form = ToolCallsGrammar(
            *(
                tools,
                "<tool_call>",
                "",
                "(",
                ")",
                None,
                "</tool_call>",
                {"<tool_call>": 5},
                True,
                len(tools) == 1,
                False,
            ),
            parameters=notations[way],
        )
        return GrammarSpec(GrammarKind.CALLS, msgspec.json.encode(form).decode())

    def take(data: bytes) -> None:
        way, data = split(data, len(notations))
        text = data.decode(errors="replace")
        try:
            decoded = msgspec.json.decode(text)
            schemas = (
                [msgspec.json.encode(one).decode() for one in decoded[:4]] if isinstance(decoded, list) else [text]
            )
        except (ValueError, RecursionError):
            schemas = [text]
        spec = grammar(way, [one for one in schemas if one] or ["{}"])
        without = prefer_schemas(spec, ())
        try:
            compiler.compile(without)
        except GrammarRefused as refused:
            assert str(refused)
            return
        chosen = compiler.try_grammar(spec)
        assert not tools_with_preference(chosen)
        assert num_unsupported(spec, chosen) <= len(tools_with_preference(spec))
        assert compiler.try_grammar(chosen) == chosen == compiler.try_grammar(spec)
        answer = compiler.open(chosen)
        answer.take([len(data) % 250 + 8, 40, 41])

    return take


def open_peft() -> Take:
    """An adapter's files as an engine loads them."""
    import moiety_demo
    from moiety_engine.adapters.peft import CONFIG, TENSORS, read_adapter
    from moiety_engine.errors import AdapterError
    from moiety_engine.model.adapter_modules import rank_factors
    from moiety_engine.model.families import read_spec

    folder = Path(tempfile.mkdtemp(prefix="moiety-fuzz-"))
    spec = read_spec(Path(moiety_demo.__file__).parent / "checkpoint")

    def take(data: bytes) -> None:
        config, _, tensors = data.partition(b"\0\0\0\n")
        (folder / CONFIG).write_bytes(config)
        (folder / TENSORS).write_bytes(tensors)
        try:
            rank_factors(read_adapter(folder, spec, max_rank=64), spec)
        except AdapterError as refused:
            assert str(refused)

    return take


TARGETS = (
    Target("wire", "messages between gateway and engine", open_wire, ("moiety_wire",), of_msgpack),
    Target("answers", "calls and thoughts in what models write", open_answers, ("moiety_text",)),
    Target(
        "grammars",
        "schemas, expressions and grammars that answers are held to",
        open_grammars,
        ("moiety_engine",),
        of_json,
    ),
    Target(
        "preferred",
        "schemas of forced calls' tools that are not strict",
        open_preferred,
        ("moiety_engine",),
        of_json,
    ),
    Target("peft", "adapters' files, as engines load them", open_peft, ("moiety_engine",), max_bytes=16_384),
)
