"""`/admin/v1/models`: the catalogue of models. The admin router decides on access."""

from __future__ import annotations

from datetime import datetime

from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.params import SkipValidation

from moiety_platform.access.actions import needs
from moiety_platform.access.caller import Caller
from moiety_platform.access.views import READ_ENGINES, READ_MODELS
from moiety_platform.db.session import Database
from moiety_platform.model_catalog.schemas import ModelEntries
from moiety_platform.model_catalog.service import list_models
from moiety_platform.routing.replicas import Replicas


class ModelCatalogController(Controller):
    """Route of the catalogue."""

    path = "/models"
    tags = ("models",)

    @get(opt=needs(READ_MODELS))
    async def list_models(
        self,
        database: NamedDependency[Database],
        replicas: NamedDependency[Replicas],
        caller: NamedDependency[SkipValidation[Caller]],
        now: NamedDependency[datetime],
    ) -> ModelEntries:
        """List the served models with their features, prices and load, and the tenants that may use them."""
        states = replicas.states()
        async with database.read() as session:
            return ModelEntries(await list_models(session, states, now, shows_load=caller.may(READ_ENGINES)))
