"""`/v1/receipts`: signed receipts of requests, and the public keys that verify them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter, SkipValidation

from moiety_platform.auth.client import AuthenticatedClient
from moiety_platform.openapi.described import fails
from moiety_platform.openapi.documents import ANTHROPIC_KEY, KEY
from moiety_platform.receipts.service import Receipts, jwk_of

MAX_LISTED = 1000
After = Annotated[int, QueryParameter(ge=0, description="Number of the chain after which the receipts are listed.")]
Limit = Annotated[int, QueryParameter(ge=1, le=MAX_LISTED, description="Largest number of receipts to return.")]


class Signature(msgspec.Struct, frozen=True):
    """Signature over `moiety receipt v1`, a line feed, and the receipt as canonical JSON; `value` is in base64."""

    algorithm: Literal["Ed25519"]
    key_id: str
    value: str


class CommitmentOpening(msgspec.Struct, frozen=True):
    """Salt of the commitments, in hexadecimal. A receipt can be shown without it."""

    salt: str


class Receipt(msgspec.Struct, frozen=True):
    """Signed receipt of one request. `hash` is that of `receipt`, which names the hash of the receipt before it.

    `opening` is null for a receipt without commitments to tokens.
    """

    object: Literal["receipt"]
    receipt: dict[str, Any]
    hash: str
    signature: Signature
    opening: CommitmentOpening | None


class ReceiptList(msgspec.Struct, frozen=True):
    """Receipts of the key's project in the order of the tenant's chain, whose other projects have the other numbers."""

    object: Literal["list"]
    data: list[Receipt]
    has_more: bool


class PublicKey(msgspec.Struct, frozen=True):
    """Public key as a JSON Web Key (RFC 8037). `kid` is the `key_id` of signatures."""

    kty: Literal["OKP"]
    crv: Literal["Ed25519"]
    use: Literal["sig"]
    alg: Literal["EdDSA"]
    kid: str
    x: str


class PublicKeyList(msgspec.Struct, frozen=True):
    """Public keys of all gateways of the deployment, also of those that were replaced."""

    keys: list[PublicKey]


class ReceiptController(Controller):
    """Routes of receipts."""

    path = "/v1/receipts"
    tags = ("text",)
    security = [{KEY: list[str]()}, {ANTHROPIC_KEY: list[str]()}]  # noqa: RUF012  read by the framework only

    @get()
    async def list_receipts(
        self,
        owner: AuthenticatedClient,
        receipts: NamedDependency[SkipValidation[Receipts]],
        after: After = 0,
        limit: Limit = 100,
    ) -> ReceiptList:
        """List the receipts of the key's project in the order of the chain."""
        found = await receipts.list_receipts(owner, after, limit + 1)
        shown = [msgspec.convert(one, Receipt) for one in found[:limit]]
        return ReceiptList("list", shown, len(found) > limit)

    @get("/{request_id:str}", opt=fails(404, 409))
    async def get_receipt(
        self,
        owner: AuthenticatedClient,
        receipts: NamedDependency[SkipValidation[Receipts]],
        request_id: FromPath[str],
    ) -> Receipt:
        """Return the receipt of one request, which is issued now if the request did not ask for one."""
        return msgspec.convert(await receipts.receipt_of(owner, request_id), Receipt)


class ReceiptKeyController(Controller):
    """Route of the public keys, which needs no key of the API: whoever gets a receipt can verify it."""

    path = "/v1/receipts/keys"
    tags = ("text",)

    @get()
    async def list_keys(self, receipts: NamedDependency[SkipValidation[Receipts]]) -> PublicKeyList:
        """List the public keys that verify receipts."""
        found = await receipts.public_keys()
        return PublicKeyList([msgspec.convert(jwk_of(key), PublicKey) for key in found.values()])
