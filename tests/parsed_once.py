"""Litestar parses each handler anew for every application, and most tests of a gateway make one: half of their time.
Here the handlers that are methods, which are the same in every application, are parsed once a process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from litestar._signature.model import SignatureModel
from litestar.utils.signature import ParsedSignature

_parsed: dict[Any, ParsedSignature] = {}  # by function; classes have them, so that nothing lives on that would not
_models: dict[tuple[int, frozenset[str]], type[SignatureModel]] = {}


def _parse_once(parse: Callable[..., ParsedSignature]) -> Callable[..., ParsedSignature]:
    def parsed(fn: Any, signature_namespace: dict[str, Any]) -> ParsedSignature:
        if not isinstance(fn, MethodType):
            return parse(fn, signature_namespace)
        if fn.__func__ not in _parsed:
            _parsed[fn.__func__] = parse(fn, signature_namespace)
        return _parsed[fn.__func__]

    return parsed


def _model_once(make: Callable[..., type[SignatureModel]]) -> Callable[..., type[SignatureModel]]:
    def model(*, fn: Any, dependency_name_set: set[str], **given: Any) -> type[SignatureModel]:
        if not isinstance(fn, MethodType) or given["data_dto"] is not None:
            return make(fn=fn, dependency_name_set=dependency_name_set, **given)
        key = id(given["parsed_signature"]), frozenset(dependency_name_set)
        if key not in _models:
            _models[key] = make(fn=fn, dependency_name_set=dependency_name_set, **given)
        return _models[key]

    return model


@functools.cache
def parse_handlers_once() -> None:
    """From now on, in this process."""
    ParsedSignature.from_fn = _parse_once(ParsedSignature.from_fn)  # type: ignore[method-assign]
    SignatureModel.create = _model_once(SignatureModel.create)  # type: ignore[method-assign]
