"""Parameters of HTTP handlers, as the check of query strings and the OpenAPI documents need them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from litestar.handlers import BaseRouteHandler
from litestar.typing import FieldDefinition


def parameters_of(handler: BaseRouteHandler) -> dict[str, FieldDefinition]:
    """Return a handler's parameters by name, and in place of a dependency the parameters of its provider."""
    providers = handler.resolve_dependencies()

    def expanded(fields: Mapping[str, FieldDefinition]) -> Iterator[tuple[str, FieldDefinition]]:
        for name, field in fields.items():
            if name in providers:
                yield from expanded(providers[name].parsed_fn_signature.parameters)
            else:
                yield name, field

    return dict(expanded(handler.parsed_fn_signature.parameters))
