"""Fetches images and documents that requests name by links, under the address checks of webhooks.

Off by default, for each kind of files. An image is shown to a model only if it decodes, but the text of a document can
be anything that a host returns, so the operator permits private networks and links for each kind separately. Clients
choose the links, so everything is bounded: where a link may lead, the links of a request, its time, the bytes of a file
and of all files, and the fetches of a tenant and of the process at the same time. A fetch looks up one name, so there
are as many threads for look-ups as fetches, and tenants share both fairly.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import httpx

from moiety_platform.admission.gate import OpenCounts
from moiety_platform.errors import RateLimited
from moiety_platform.inference.dns_lookups import MAX_LOOKUPS, DnsLookup, new_pool
from moiety_platform.inference.tenant_slots import TenantSlots
from moiety_platform.webhooks.addresses import (
    ADDRESS_NOT_ALLOWED,
    MAX_PORT,
    MIN_PORT,
    NAME_NOT_RESOLVED,
    AddressPolicy,
    CannotReach,
)
from moiety_platform.webhooks.guarded_http import guarded_client, guarded_request

_REASONS = {
    ADDRESS_NOT_ALLOWED: "leads to an address that is not in the public internet; link to a public one",
    NAME_NOT_RESOLVED: "is not known; correct it",
}


class CannotFetch(Exception):
    """A file cannot be fetched. The message says what is at fault, for example a part of its link."""


class NoSuchFile(CannotFetch):
    """There is no file with this id, for this key."""


@dataclass(frozen=True, slots=True)
class LinkedKind:
    """Kind of files that links lead to."""

    noun: str
    accept: str  # media types that hosts are asked for
    too_many_code: str  # error code where a tenant has too many requests with links


IMAGE = LinkedKind("image", "image/png, image/jpeg, image/webp, image/gif", "too_many_image_links")
DOCUMENT = LinkedKind("document", "application/pdf, text/plain, text/*;q=0.9, */*;q=0.1", "too_many_document_links")


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Limits on links to images and documents. They can change while the gateway runs."""

    max_image_links: int = 0  # different ones in a request; 0: they are not followed
    max_document_links: int = 0  # as above
    timeout_s: float = 10.0  # of all fetches of one kind of a request together
    max_per_tenant: int = 4  # fetches at the same time
    max_requests_per_tenant: int = 16  # that fetch or wait to

    def max_links(self, kind: LinkedKind) -> int:
        """Return the largest number of links of a kind in a request."""
        return self.max_document_links if kind is DOCUMENT else self.max_image_links


@dataclass(slots=True)
class _Budget:
    """Bytes that the files of one request may still have."""

    left: int
    kind: LinkedKind


@dataclass(slots=True)
class LinkFetcher:
    """Fetcher of one gateway process, closed by its owner. `image_reach`, `document_reach` and `limits` can change."""

    image_reach: AddressPolicy = field(default_factory=AddressPolicy)
    limits: LinkLimits = LinkLimits()
    document_reach: AddressPolicy = field(default_factory=AddressPolicy)
    tls: ssl.SSLContext | None = None
    _names: ThreadPoolExecutor = field(default_factory=new_pool)
    _http: httpx.AsyncClient | None = None
    _requests: OpenCounts = field(default_factory=OpenCounts)
    _slots: TenantSlots = field(default_factory=lambda: TenantSlots(MAX_LOOKUPS))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.aclose()
        self._names.shutdown(wait=False, cancel_futures=True)

    async def fetch_all(
        self,
        links: Sequence[str],
        tenant_id: str,
        max_bytes: int,
        max_total_bytes: int,
        kind: LinkedKind = IMAGE,
    ) -> dict[str, bytes | CannotFetch]:
        """Return the file of each link, or why it cannot be fetched.

        Raises RateLimited if too many requests of the tenant fetch or wait to.
        """
        if not links:
            return {}
        if refusal := self._refusal_of(links, kind):
            return dict.fromkeys(links, refusal)
        with self._counted_request(tenant_id, kind):
            return await self._fetch_within(links, tenant_id, max_bytes, max_total_bytes, kind)

    @contextmanager
    def open_links(self, links: Sequence[str], tenant_id: str, max_bytes: int, kind: LinkedKind) -> Iterator[OpenLinks]:
        """Yield the links of a request, whose files are fetched one by one and have `max_bytes` together.

        Raises RateLimited if too many requests of the tenant fetch or wait to.
        """
        refusal = self._refusal_of(links, kind)
        opened = OpenLinks(self, tenant_id, max_bytes, _Budget(max_bytes, kind), self.limits.timeout_s, refusal)
        if not links or refusal:
            yield opened
            return
        with self._counted_request(tenant_id, kind):
            yield opened

    async def fetch_one(self, link: str, tenant_id: str, max_bytes: int, budget: _Budget) -> bytes:
        """Return the file of a link, fetched in one of the tenant's slots. Raises CannotFetch."""
        async with self._slot(tenant_id) as lookup:
            return await self._fetch(link, max_bytes, budget, lookup)

    def _refusal_of(self, links: Sequence[str], kind: LinkedKind) -> CannotFetch | None:
        """Return why none of a request's links is followed, or None."""
        if (most := self.limits.max_links(kind)) == 0:
            return CannotFetch(f"this server follows no links to {kind.noun}s; send the {kind.noun} itself, as base64")
        if len(links) > most:
            return CannotFetch(f"there are {len(links)} links to {kind.noun}s; a request may have {most}. Send fewer")
        return None

    def _counted_request(self, tenant_id: str, kind: LinkedKind) -> AbstractContextManager[None]:
        """Count a request of the tenant that fetches. Raises RateLimited where it has too many."""
        most = self.limits.max_requests_per_tenant
        message = f"{most} requests with links are running; wait, or send {kind.noun}s"
        return self._requests.counted(
            tenant_id, most, lambda: RateLimited(message, code=kind.too_many_code, retry_after_s=1)
        )

    async def _fetch_within(
        self, links: Sequence[str], tenant_id: str, max_bytes: int, max_total_bytes: int, kind: LinkedKind
    ) -> dict[str, bytes | CannotFetch]:
        """Return the results of `fetch_all` within the time of a request."""
        limits = self.limits
        budget, found = _Budget(max_total_bytes, kind), dict[str, bytes | CannotFetch]()

        async def fetch(link: str) -> None:
            try:
                found[link] = await self.fetch_one(link, tenant_id, max_bytes, budget)
            except CannotFetch as exc:
                found[link] = exc

        try:
            async with asyncio.timeout(limits.timeout_s), asyncio.TaskGroup() as group:
                for link in links:
                    group.create_task(fetch(link))
        except TimeoutError:
            for link in links:
                host = _host_of(link)
                found.setdefault(link, CannotFetch(f"its host {host!r} did not send it within {limits.timeout_s:g} s"))
        return found

    @asynccontextmanager
    async def _slot(self, tenant_id: str) -> AsyncIterator[DnsLookup]:
        """Hold one of the tenant's fetches, until the look-up of the name has ended too."""
        await self._slots.acquire(tenant_id, self.limits.max_per_tenant)
        lookup = DnsLookup(self._names)
        try:
            yield lookup
        finally:
            lookup.when_ended(partial(self._slots.release, tenant_id))

    async def _fetch(self, link: str, max_bytes: int, budget: _Budget, lookup: DnsLookup) -> bytes:
        """Return the file of a link. Raises CannotFetch."""
        reach = self.document_reach if budget.kind is DOCUMENT else self.image_reach
        url, noun = _checked(link, reach), budget.kind.noun
        headers = {"Accept": budget.kind.accept, "Accept-Encoding": "identity"}
        if self._http is None:
            self._http = guarded_client(self.limits.timeout_s, self.tls)
        try:
            request = await guarded_request(self._http, reach, "GET", url, headers, lookup=lookup)
            answer = await self._http.send(request, stream=True)
            try:
                return await _read(answer, max_bytes, budget)
            finally:
                await answer.aclose()
        except CannotReach as exc:
            raise CannotFetch(f"its host {url.host[:128]!r} {_REASONS[exc.code]}") from exc
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, ValueError, OverflowError) as exc:
            raise CannotFetch(f"its host {url.host[:128]!r} cannot be reached; try again, or send the {noun}") from exc


@dataclass(slots=True)
class OpenLinks:
    """Links of one request while it runs, fetched one by one by a fetcher within the bytes and the time of all.

    Only the fetches take from the time, not what the request does between them.
    """

    fetcher: LinkFetcher
    tenant_id: str
    max_bytes: int
    budget: _Budget
    left_s: float
    refusal: CannotFetch | None  # of all of them

    def check_followed(self) -> None:
        """Raise CannotFetch if none of the links is followed."""
        if self.refusal:
            raise CannotFetch(str(self.refusal))

    async def fetch(self, link: str) -> bytes:
        """Return the file of a link. Raises CannotFetch."""
        self.check_followed()
        begun_s, timeout_s = time.monotonic(), self.fetcher.limits.timeout_s
        try:
            async with asyncio.timeout(max(self.left_s, 0)):
                return await self.fetcher.fetch_one(link, self.tenant_id, self.max_bytes, self.budget)
        except TimeoutError:
            noun = self.budget.kind.noun
            raise CannotFetch(
                f"its host {_host_of(link)!r} did not send it within the {timeout_s:g} s for all linked {noun}s"
            ) from None
        finally:
            self.left_s -= time.monotonic() - begun_s


def _checked(link: str, reach: AddressPolicy) -> httpx.URL:
    """Return the URL of a link that may be followed. Raises CannotFetch."""
    try:
        url = httpx.URL(link)
    except httpx.InvalidURL:
        raise CannotFetch("its link is not a valid URL; correct it") from None
    if url.scheme != "https" and not reach.networks:
        raise CannotFetch(f"its scheme is {url.scheme[:16]!r}; link to it with https://")
    if url.port is not None and not MIN_PORT <= url.port <= MAX_PORT:
        raise CannotFetch(f"its port must be from {MIN_PORT} to {MAX_PORT}; correct the link")
    if not url.host or url.userinfo:
        raise CannotFetch("its link must name a host, and no user or password")
    return url


async def _read(answer: httpx.Response, max_bytes: int, budget: _Budget) -> bytes:
    """Return the body of a successful answer. Raises CannotFetch."""
    if answer.is_redirect:
        raise CannotFetch("its link is redirected, and redirects are not followed; link to the file itself")
    if answer.status_code != 200:
        raise CannotFetch(f"its host answers with status {answer.status_code}; correct the path of the link")
    if answer.headers.get("content-encoding", "identity").lower() != "identity":
        raise CannotFetch(f"its host sends it compressed; send the {budget.kind.noun} itself, as base64")
    body = bytearray()
    async for chunk in answer.aiter_raw():
        body += chunk
        budget.left -= len(chunk)
        if len(body) > max_bytes:
            raise CannotFetch(f"it has more than {max_bytes:,} bytes; make it smaller")
        if budget.left < 0:
            raise CannotFetch(
                f"the {budget.kind.noun}s of the request have too many bytes together; send fewer or smaller"
            )
    return bytes(body)


def _host_of(link: str) -> str:
    try:
        return httpx.URL(link).host[:128]
    except httpx.InvalidURL:
        return ""
