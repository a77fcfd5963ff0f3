"""`/admin/v1/guardrails`: maps HTTP to the service. The admin router decides on access."""

from __future__ import annotations

from litestar import Controller, Response, delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody, SkipValidation

from moiety_platform.access.actions import needs
from moiety_platform.controllers import RulesDependency
from moiety_platform.db.session import Database
from moiety_platform.etags import Precondition, tagged
from moiety_platform.guardrails import service
from moiety_platform.guardrails.admin_resource import GUARDRAILS
from moiety_platform.guardrails.schemas import GuardrailView, GuardrailViews, NewGuardrail
from moiety_platform.guardrails.service import UrlCheck
from moiety_platform.openapi.described import fails


class GuardrailController(Controller):
    """Routes of guardrails. `reach` says which addresses their HTTP endpoints may have."""

    path = GUARDRAILS.path
    tags = GUARDRAILS.tags

    @get(opt=needs(GUARDRAILS.read))
    async def list_guardrails(self, database: NamedDependency[Database]) -> GuardrailViews:
        """List all guardrails by name."""
        async with database.read() as session:
            return GuardrailViews([GuardrailView.of(one) for one in await service.load_guardrails(session)])

    @get("/{name:str}", opt=needs(GUARDRAILS.read))
    async def get_guardrail(self, database: NamedDependency[Database], name: FromPath[str]) -> Response[GuardrailView]:
        """Return one guardrail."""
        async with database.read() as session:
            return tagged(GuardrailView.of(await service.get_guardrail(session, name)))

    @put(opt=needs(GUARDRAILS.write) | fails(404, 409))
    async def set_guardrail(
        self,
        rules: RulesDependency,
        reach: NamedDependency[SkipValidation[UrlCheck]],
        precondition: NamedDependency[Precondition],
        data: JSONBody[NewGuardrail],
    ) -> Response[GuardrailView]:
        """Set or replace a guardrail."""
        async with rules.write() as session:
            found = await service.find_guardrail(session, data.name)
            precondition.check(None if found is None else GuardrailView.of(found))
            return tagged(GuardrailView.of(await service.set_guardrail(session, data, reach)))

    @delete("/{name:str}", status_code=200, opt=needs(GUARDRAILS.write))
    async def delete_guardrail(
        self,
        rules: RulesDependency,
        precondition: NamedDependency[Precondition],
        name: FromPath[str],
    ) -> GuardrailView:
        """Delete a guardrail; returns its last state."""
        async with rules.write() as session:
            precondition.check(GuardrailView.of(await service.get_guardrail(session, name)))
            return GuardrailView.of(await service.delete_guardrail(session, name))
