"""Generator of the reference of all request fields of the text APIs and of decisions, `docs/api-fields.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from moiety_platform.anthropic_api.schemas import MessagesBody
from moiety_platform.decisions.schemas import DecisionBody
from moiety_platform.inference.field_support import SERVED, FieldSupport, FieldTreatment, support_of
from moiety_platform.openai_api.schemas import ChatBody, CompletionBody
from moiety_platform.responses_api.schemas import ResponsesBody

HEAD = """# Request fields

This page lists every request field of the four text APIs and of decisions, and what the server does with it.
`moiety config reference --api-fields` generates it from the declarations of the fields. You need it to find out whether
an option of your client has an effect.

| treatment | meaning |
|---|---|
| served | The field has the effect that the API's documentation describes. |
| mapped | The field has the effect of the nearest feature, which the note names. |
| ignored | Every valid value is accepted and has no effect, because the answer is right without it. |
| refused | Null and values without effect are accepted. Others fail with 400, since ignoring them would be wrong. |

An answer names the ignored fields of its request in the header `x-moiety-ignored-fields`, and fields that were served
with another value in `x-moiety-adjusted-fields`. Tools of unknown types are skipped and named in the first of them, for
example `tools.2`; a `tool_choice` that requires one fails with 400. Fields that this page does not list are ignored
without a notice. One error names all bad fields of a request.
"""

SCHEMAS: Mapping[str, tuple[str, type[BaseModel]]] = MappingProxyType(
    {
        "/v1/chat/completions": ("Chat completions", ChatBody),
        "/v1/completions": ("Completions", CompletionBody),
        "/v1/responses": ("Responses", ResponsesBody),
        "/v1/messages": ("Messages", MessagesBody),
        "/v1/decisions": ("Decisions", DecisionBody),
    }
)


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field, by its path in the body, as a row of a table."""

    path: str
    support: FieldSupport

    def __str__(self) -> str:
        note = self.support.note.replace("|", "\\|").replace("<", "&lt;")
        return f"| `{self.path}` | {self.support.treatment} | {_as_sentence(note)} |\n"


def fields_reference() -> str:
    """Return the reference of the request fields of all text APIs."""
    parts = [HEAD]
    for path, (title, schema) in SCHEMAS.items():
        parts.append(f"\n## {title}\n\nFields of `POST {path}`:\n\n| field | treatment | note |\n|---|---|---|\n")
        parts += [str(row) for row in sorted(field_rows(schema), key=lambda row: row.path.split("."))]
    return "".join(parts)


def field_rows(schema: type[BaseModel], within: str = "") -> Iterator[FieldRow]:
    """Yield the fields of a body and of the option objects in it, not those of entries of lists."""
    for name, field in schema.model_fields.items():
        path = within + (field.alias or name)
        support = support_of(schema, name)
        yield FieldRow(path, support)
        if support is SERVED or support.treatment is FieldTreatment.MAPPED:
            seen: set[str] = set()
            for option in options_in(field.annotation):
                for row in field_rows(option, path + "."):
                    if row.path not in seen:
                        seen.add(row.path)
                        yield row


def options_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models among the types of a field, but not those of the entries of lists."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from options_in(get_args(annotation)[0])
    elif origin is Union or type(annotation).__name__ == "UnionType":
        for one in get_args(annotation):
            yield from options_in(one)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation


def _as_sentence(note: str) -> str:
    return note if not note else note[0].upper() + note[1:] + ("" if note.endswith(".") else ".")
