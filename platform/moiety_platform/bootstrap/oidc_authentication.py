"""Owner of the OIDC verifier, which exists while the settings name an issuer."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from moiety_platform.access.group_roles import parse_group_roles
from moiety_platform.clock import Clock
from moiety_platform.db.session import Database
from moiety_platform.live_settings import LiveSettings
from moiety_platform.settings import GatewaySettings

if TYPE_CHECKING:
    import httpx

    from moiety_platform.auth.authenticator import Authenticator
    from moiety_platform.auth.oidc import OidcVerifier

NAMES = (
    *("oidc_issuer", "oidc_audience", "oidc_roles_claim", "oidc_tenant_claim"),
    *("oidc_groups_claim", "oidc_group_roles"),
)


def limit_keys_by_roles(
    settings: GatewaySettings, live: LiveSettings[GatewaySettings], authenticator: Authenticator
) -> None:
    """Let keys of developers by groups end some days after the role was last seen, as the settings say."""

    def use(changed: GatewaySettings) -> None:
        authenticator.role_days = changed.oidc_key_days

    use(settings)
    live.follow(["oidc_key_days"], use)


class OidcAuthentication:
    """OIDC verifier that follows the settings. Entered by the entry point.

    After a change of settings, a verification under way continues with the verifier that it began with.
    """

    def __init__(self, settings: GatewaySettings, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._http: httpx.AsyncClient | None = None  # until there is an issuer, since it reads certificates
        self._verifier = self._of(settings)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._verifier is not None:
            await self._verifier.close()
        if self._http is not None:
            await self._http.aclose()

    def find(self) -> OidcVerifier | None:
        """Return the verifier; None where tokens are not accepted."""
        return self._verifier

    def followed_by(self, live: LiveSettings[GatewaySettings]) -> None:
        live.follow(NAMES, self.use)

    def use(self, settings: GatewaySettings) -> None:
        self._verifier = self._of(settings)

    def _of(self, settings: GatewaySettings) -> OidcVerifier | None:
        if settings.oidc_issuer is None or settings.oidc_audience is None:
            return None
        import httpx  # noqa: PLC0415  slow to import, and few gateways have an issuer

        from moiety_platform.auth.jwt_verification import FETCH_TIMEOUT_S  # noqa: PLC0415  likewise
        from moiety_platform.auth.oidc import OidcTerms, OidcVerifier  # noqa: PLC0415  likewise

        if self._http is None:
            self._http = httpx.AsyncClient(timeout=FETCH_TIMEOUT_S)
        terms = OidcTerms(
            settings.oidc_issuer,
            settings.oidc_audience,
            settings.oidc_roles_claim,
            settings.oidc_tenant_claim,
            settings.oidc_groups_claim,
            parse_group_roles(settings.oidc_group_roles),
        )
        return OidcVerifier(terms, self._database, self._http, self._clock)
