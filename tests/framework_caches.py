"""Caches of work that Litestar does for each application and SQLAlchemy for each engine, shared by a process of tests.

Most tests of a gateway make an application and several engines. Without the caches, Litestar parses each handler again,
and SQLAlchemy compiles each statement again. What a route needs to call its handler is made at the route's first
request; in production it is made with the application."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

from litestar import Litestar
from litestar._kwargs import KwargsModel
from litestar._signature.model import SignatureModel
from litestar.handlers.base import BaseRouteHandler
from litestar.router import Router
from litestar.routes.base import BaseRoute
from litestar.utils.signature import ParsedSignature
from sqlalchemy import Engine

NUM_MAPS = 4  # of nested routers that register at the same time
_parsed: dict[Any, ParsedSignature] = {}  # by method or code, which modules hold anyway
_models: dict[tuple[int, frozenset[str]], type[SignatureModel]] = {}


def _key_of(fn: Any) -> Any:
    """Return what two functions of one signature share, or None: a method, or the code of a function without defaults,
    whose annotations are strings that mean the same in each of its closures."""
    if isinstance(fn, MethodType):
        return fn.__func__
    is_plain = isinstance(fn, FunctionType) and not fn.__defaults__ and not fn.__kwdefaults__
    return fn.__code__ if is_plain and all(isinstance(one, str) for one in fn.__annotations__.values()) else None


def _parse_once(parse: Callable[..., ParsedSignature]) -> Callable[..., ParsedSignature]:
    def parsed(fn: Any, signature_namespace: dict[str, Any]) -> ParsedSignature:
        key = _key_of(fn)
        if key is None:
            return parse(fn, signature_namespace)
        if key not in _parsed:
            _parsed[key] = parse(fn, signature_namespace)
        return _parsed[key]

    return parsed


def _model_once(make: Callable[..., type[SignatureModel]]) -> Callable[..., type[SignatureModel]]:
    def model(*, fn: Any, dependency_name_set: set[str], **given: Any) -> type[SignatureModel]:
        if _parsed.get(_key_of(fn)) is not given["parsed_signature"] or given["data_dto"] is not None:
            return make(fn=fn, dependency_name_set=dependency_name_set, **given)
        key = id(given["parsed_signature"]), frozenset(dependency_name_set)
        if key not in _models:
            _models[key] = make(fn=fn, dependency_name_set=dependency_name_set, **given)
        return _models[key]

    return model


class _AtFirstRequest:
    """Stands for a handler's KwargsModel until something is asked of it."""

    def __init__(self, make: Callable[[], KwargsModel]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Any:
        if "_made" not in self.__dict__:
            self._made = self._make()
        return getattr(self._made, name)


class _SharedCompiledCache(dict[Any, Any]):
    """Compiled statements of all engines of one dialect and driver. An engine's own keys begin with its dialect."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key[1:], default)

    def __setitem__(self, key: Any, compiled: Any) -> None:
        super().__setitem__(key[1:], compiled)


@functools.cache
def _compiled_cache(dialect: str, driver: str) -> _SharedCompiledCache:
    return _SharedCompiledCache()


_maps: dict[int, tuple[list[BaseRoute], list[BaseRoute], dict[str, Any]]] = {}  # the last few, by the list's id


def _map_of_new_routes(whole: Callable[[Router], dict[str, Any]]) -> Callable[[Router], dict[str, Any]]:
    """Stand for `Router.route_handler_method_map`, which is asked for at each registration: one that appended routes
    adds these to the map of before, any other makes a new one."""

    def route_map(router: Router) -> dict[str, Any]:
        routes = router.routes
        of, known, found = _maps.pop(id(routes), (routes, [], {}))
        if of is not routes or routes[: len(known)] != known:
            known, found = [], {}
        new = routes[len(known) :]
        _maps[id(routes)] = routes, [*known, *new], {**found, **whole(SimpleNamespace(routes=new))}  # type: ignore
        if len(_maps) > NUM_MAPS:
            del _maps[next(iter(_maps))]
        return _maps[id(routes)][2]

    return route_map


def _copy_handler(handler: BaseRouteHandler, _memo: dict[int, object]) -> BaseRouteHandler:
    """Stand for `__deepcopy__`: what a controller changes in its copy of a handler are attributes of the copy."""
    return copy.copy(handler)


def _register(handler: BaseRouteHandler, _app: Litestar) -> None:
    """Stand for `BaseRouteHandler.on_registration`: what a handler inherits is resolved when it is first asked for."""
    handler._validate_handler_function()
    handler.resolve_opts()


@functools.cache
def share_framework_caches() -> None:
    """From now on, in this process."""
    ParsedSignature.from_fn = _parse_once(ParsedSignature.from_fn)  # type: ignore[method-assign]
    SignatureModel.create = _model_once(SignatureModel.create)  # type: ignore[method-assign]
    create = BaseRouteHandler.create_kwargs_model
    BaseRouteHandler.create_kwargs_model = lambda *given, **named: _AtFirstRequest(  # type: ignore
        functools.partial(create, *given, **named)
    )
    Engine._compiled_cache = property(  # type: ignore
        lambda engine: _compiled_cache(engine.dialect.name, engine.dialect.driver), lambda *_: None
    )
    whole = Router.route_handler_method_map.fget  # type: ignore[attr-defined]
    assert whole is not None
    Router.route_handler_method_map = property(_map_of_new_routes(whole))  # type: ignore
    BaseRouteHandler.on_registration = _register  # type: ignore
    BaseRouteHandler.__deepcopy__ = _copy_handler  # type: ignore[attr-defined]
