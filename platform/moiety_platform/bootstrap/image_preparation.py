"""The fetcher of linked images and documents as the settings want it."""

from __future__ import annotations

from ipaddress import ip_network

from moiety_platform.inference.link_fetcher import LinkFetcher, LinkLimits
from moiety_platform.live_settings import LiveSettings
from moiety_platform.settings import GatewaySettings
from moiety_platform.webhooks.addresses import AddressPolicy

LINK_SETTINGS = [
    "image_link_networks", "max_image_links", "document_link_networks", "max_document_links",
    "max_image_link_requests_per_tenant",
]  # fmt: skip


def link_fetcher_of(settings: GatewaySettings, live: LiveSettings[GatewaySettings]) -> LinkFetcher:
    """Return a fetcher of linked files that follows the settings."""
    fetcher = LinkFetcher()

    def use(settings: GatewaySettings) -> None:
        fetcher.image_reach = AddressPolicy(tuple(map(ip_network, settings.image_link_networks)))
        fetcher.document_reach = AddressPolicy(tuple(map(ip_network, settings.document_link_networks)))
        fetcher.limits = LinkLimits(
            settings.max_image_links,
            settings.max_document_links,
            max_requests_per_tenant=settings.max_image_link_requests_per_tenant,
        )

    use(settings)
    live.follow(LINK_SETTINGS, use)
    return fetcher
