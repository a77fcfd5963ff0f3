"""People who sign in at a loopback issuer, and an admin API that accepts their tokens and an owner's key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from tests.token_issuer import AUDIENCE, TokenIssuer

from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.oidc import OidcTerms, OidcVerifier
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database

from .conftest import PEPPER, Demo, admin_app, listening


@dataclass
class People:
    """`tokens` are those of people by their names; the owner is `owner`, a key."""

    http: httpx.AsyncClient
    issuer: TokenIssuer
    authenticator: Authenticator
    clock: ManualClock
    demo: Demo
    tokens: dict[str, str] = field(default_factory=dict)

    def token(self, who: str, **claims: Any) -> str:
        """Return a token of a person without a role in its claims."""
        usual = {"sub": who, "email": f"{who}@example.com", "moiety_roles": None}
        return self.issuer.token(**{**usual, **claims})

    async def ask(
        self, who: str, method: str, path: str, body: Any = None, tenant: str | None = None, **query: Any
    ) -> httpx.Response:
        """Return the answer to a person, or to the owner's key."""
        credential = self.demo.admin_key if who == "owner" else self.tokens.get(who) or self.token(who)
        headers = {"Authorization": f"Bearer {credential}"} | ({} if tenant is None else {"X-Moiety-Tenant": tenant})
        return await self.http.request(method, path, json=body, headers=headers, params=query)

    async def call(self, who: str, method: str, path: str, body: Any = None, expect: int = 200, **more: Any) -> Any:
        answer = await self.ask(who, method, path, body, **more)
        assert answer.status_code == expect, answer.text
        return answer.json()

    async def invite(self, who: str, role: str, tenant_id: str | None, **fields: Any) -> tuple[dict[str, Any], str]:
        """Create a user and return it with its invitation."""
        body = {"email": f"{who}@example.com", "role": role, "tenant_id": tenant_id, **fields}
        user = await self.call("owner", "POST", "users", body, 201)
        made = await self.call("owner", "POST", f"users/{user['id']}/invitation", expect=201)
        return user, made["secret"]

    async def join(self, who: str, role: str, tenant_id: str | None, **fields: Any) -> dict[str, Any]:
        """Create a user who has accepted the invitation; return it."""
        _, invitation = await self.invite(who, role, tenant_id, **fields)
        user: dict[str, Any] = await self.call(who, "POST", "invitations/accept", {"invitation": invitation})
        return user

    async def refuse(self, who: str, method: str, path: str, body: Any = None, **more: Any) -> tuple[int, str]:
        """Return status and code of a refusal."""
        answer = await self.ask(who, method, path, body, **more)
        return answer.status_code, answer.json()["error"]["code"]


@asynccontextmanager
async def people_of(
    database: Database, clock: ManualClock, demo: Demo, more: Sequence[Any] = ()
) -> AsyncIterator[People]:
    issuer = TokenIssuer()
    authenticator = Authenticator(database, PEPPER, clock)
    async with listening(issuer.serve) as issuer.url, httpx.AsyncClient() as http:
        oidc = OidcVerifier(OidcTerms(issuer.url, AUDIENCE, "moiety_roles", "moiety_tenant"), database, http, clock)
        app = admin_app(database, clock, authenticator=authenticator, oidc=lambda: oidc, more=more)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway/admin/v1/") as client:
            yield People(client, issuer, authenticator, clock, demo)
    await authenticator.close()


@pytest.fixture
async def people(database: Database, clock: ManualClock, demo: Demo) -> AsyncIterator[People]:
    """The people of the deployment `database`, and the provider that signs them in."""
    async with people_of(database, clock, demo) as opened:
        yield opened
