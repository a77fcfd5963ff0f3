"""Registration of a Litestar controller with the services that its handlers need.

Controllers are the one way to define HTTP handlers. The requests that bypass them are in `fast_path.py`.
"""

from __future__ import annotations

from typing import Self

from litestar import Controller, Router
from litestar.di import NamedDependency, Provide
from litestar.params import SkipValidation

from moiety_platform.audit.rule_changes import RuleChanges

RulesDependency = NamedDependency[SkipValidation[RuleChanges]]
"""Access to prices, routes and guardrails for a handler that changes one of them."""


class UncopiedRouter(Router):
    """Router that is registered once, with one application.

    Litestar copies a router when it is registered, with every handler and its OpenAPI metadata, which takes 0.15 s for
    all routes of a gateway. A router that is registered once needs no copy. All routers above it must be of this class
    too, since a copy of a router does not own what it did not copy.
    """

    def __deepcopy__(self, _memo: dict[int, object]) -> Self:
        return self


def with_services(controller: type[Controller], **services: object) -> Router:
    """Return the controller's routes, whose handlers take these services as arguments of the same names.

    A service that is a provider is called for each request. An argument whose service is a dataclass needs
    `SkipValidation`: the framework would validate its fields.
    """
    dependencies = {
        name: service if isinstance(service, Provide) else _constant(service) for name, service in services.items()
    }
    return UncopiedRouter("/", route_handlers=[controller], dependencies=dependencies)


def _constant(service: object) -> Provide:
    return Provide(lambda: service, sync_to_thread=False)
