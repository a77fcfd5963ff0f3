"""An issuer of JWTs that publishes its keys on the loopback."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

AUDIENCE = "moiety"
RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()


class TokenIssuer:
    """Publishes its keys over HTTP, and counts how often it is asked for them. `away` drops every connection."""

    def __init__(self) -> None:
        self.url = ""
        self.away = False
        self.num_fetches = 0
        self.num_waiting = 0
        self.paths: list[str] = []
        self.held: asyncio.Event | None = None  # that answers wait for
        self.calls_itself: str | None = None
        self.key_document: bytes | None = None  # in the place of `keys`
        self.key_headers = b""  # further headers of the response with the keys
        self.request_heads: list[bytes] = []
        self.keys: list[dict[str, Any]] = [
            {**jwt.algorithms.RSAAlgorithm.to_jwk(RSA.public_key(), as_dict=True), "kid": "rsa", "alg": "RS256"},
            {**jwt.algorithms.ECAlgorithm.to_jwk(EC.public_key(), as_dict=True), "kid": "ec"},
            {**jwt.algorithms.OKPAlgorithm.to_jwk(ED.public_key(), as_dict=True), "kid": "ed"},
            {"kty": "oct", "kid": "shared", "k": base64.urlsafe_b64encode(b"s" * 32).decode()},
            {"kty": "strange", "kid": "strange"},
        ]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.request_heads.append(head)
        path = head.split(b" ")[1]
        if self.held is not None:
            self.num_waiting += 1
            await self.held.wait()
        if not self.away:
            if path == b"/keys":
                self.num_fetches += 1
            self.paths.append(path.decode())
            found: dict[str, Any] = {"issuer": self.calls_itself or self.url, "jwks_uri": f"{self.url}/keys"}
            body, more = json.dumps(found).encode(), b""
            if path == b"/keys":
                body, more = self.key_document or json.dumps({"keys": self.keys}).encode(), self.key_headers
            fields = b"Content-Length: %d\r\nConnection: close\r\n%b" % (len(body), more)
            writer.write(b"HTTP/1.1 200 OK\r\n%b\r\n%b" % (fields, body))
            await writer.drain()
        writer.close()

    def claims(self, **claims: Any) -> dict[str, Any]:
        """Return the usual claims, with these in their place; None leaves one out."""
        now = int(time.time())  # of the library's own clock
        usual: dict[str, Any] = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "ada",
            "exp": now + 300,
            "moiety_roles": ["viewer"],
        }
        return {name: value for name, value in {**usual, **claims}.items() if value is not None}

    def token(self, key: Any = RSA, algorithm: str = "RS256", key_id: str | None = "rsa", **claims: Any) -> str:
        headers = {} if key_id is None else {"kid": key_id}
        return jwt.encode(self.claims(**claims), key, algorithm, headers=headers)

    def invalid_tokens(self) -> dict[str, str]:
        """Return tokens that no gateway accepts, by what is wrong with each."""
        return {
            "no audience": self.token(aud=None),
            "no end": self.token(exp=None),
            "no subject": self.token(sub=None),
            "not yet": self.token(nbf=int(time.time()) + 300),
            "another's signature": self.token(OTHER_RSA),
            "another key's id": self.token(EC, "ES256", "rsa"),
            "the key's other algorithm": self.token(RSA, "RS512"),
            "a published shared secret": self.token(b"s" * 32, "HS256", "shared"),
            "unsigned": self.token(None, "none"),
            "no key": self.token(key_id=None),
            "no token": "x.y.z",
            "brackets": base64.urlsafe_b64encode(b"[" * 12_000).decode().rstrip("=") + ".e30.c2ln",
            "other letters": "é.é.é",
        }


@asynccontextmanager
async def started_issuer() -> AsyncIterator[TokenIssuer]:
    """Start an issuer on a free port of the loopback."""
    issuer = TokenIssuer()
    server = await asyncio.start_server(issuer.serve, "127.0.0.1", 0)
    async with server:
        issuer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield issuer
