"""Registration of a Litestar controller with the services that its handlers need.

Controllers are the one way to define HTTP handlers. The requests that bypass them are in `direct.py`.
"""

from __future__ import annotations

from litestar import Controller, Router
from litestar.di import Provide


def with_services(controller: type[Controller], **services: object) -> Router:
    """Return the controller's routes, whose handlers take these services as arguments of the same names.

    An argument whose service is a dataclass needs `SkipValidation`: the framework would validate its fields.
    """
    dependencies = {name: _constant(service) for name, service in services.items()}
    return Router("/", route_handlers=[controller], dependencies=dependencies)


def _constant(service: object) -> Provide:
    return Provide(lambda: service, sync_to_thread=False)
