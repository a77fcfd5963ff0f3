"""`/admin/v1/issuers`: maps HTTP to the service. The admin router decides on access."""

from __future__ import annotations

from litestar import Controller, Response, delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody, SkipValidation

from moiety_platform.access.actions import needs
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.db.session import Database
from moiety_platform.etags import Precondition, tagged
from moiety_platform.jwt_issuers import service
from moiety_platform.jwt_issuers.admin_resource import ISSUERS
from moiety_platform.jwt_issuers.schemas import JwtIssuerView, JwtIssuerViews, NewJwtIssuer
from moiety_platform.jwt_issuers.submitted_issuer import HttpAddresses
from moiety_platform.openapi.described import fails


class JwtIssuerController(Controller):
    """Routes of issuers of JWTs. `reach` says which addresses their keys may be read from."""

    path = ISSUERS.path
    tags = ISSUERS.tags

    @get(opt=needs(ISSUERS.read))
    async def list_issuers(self, database: NamedDependency[Database]) -> JwtIssuerViews:
        """List all trusted issuers of JWTs by name."""
        async with database.read() as session:
            return JwtIssuerViews(await service.list_issuers(session))

    @get("/{name:str}", opt=needs(ISSUERS.read))
    async def get_issuer(self, database: NamedDependency[Database], name: FromPath[str]) -> Response[JwtIssuerView]:
        """Return one issuer."""
        async with database.read() as session:
            return tagged(await service.get_issuer(session, name))

    @put(opt=needs(ISSUERS.write) | fails(404, 409))
    async def set_issuer(
        self,
        store: NamedDependency[AuditedStore],
        authenticator: NamedDependency[Authenticator],
        reach: NamedDependency[SkipValidation[HttpAddresses]],
        precondition: NamedDependency[Precondition],
        data: JSONBody[NewJwtIssuer],
    ) -> Response[JwtIssuerView]:
        """Trust an issuer, or replace the issuer of that name.

        Grants that stay the same keep their keys, and with them their quotas.
        """
        async with store.write() as session:
            precondition.check(await service.find_issuer(session, data.name))
            view, changed = await service.set_issuer(session, data, reach, store.clock.now())
        authenticator.forget_issuers(changed)
        return tagged(view)

    @delete("/{name:str}", status_code=200, opt=needs(ISSUERS.write))
    async def delete_issuer(
        self,
        store: NamedDependency[AuditedStore],
        authenticator: NamedDependency[Authenticator],
        precondition: NamedDependency[Precondition],
        name: FromPath[str],
    ) -> JwtIssuerView:
        """Trust an issuer no longer; returns its last state. Its tokens are refused at once."""
        async with store.write() as session:
            precondition.check(await service.get_issuer(session, name))
            view, changed = await service.delete_issuer(session, name, store.clock.now())
        authenticator.forget_issuers(changed)
        return view
