"""The preparation of images as the settings want it."""

from __future__ import annotations

from ipaddress import ip_network

from moiety_platform.inference.image_fetcher import ImageFetcher, LinkLimits
from moiety_platform.live_settings import LiveSettings
from moiety_platform.settings import GatewaySettings
from moiety_platform.webhooks.addresses import AddressPolicy

IMAGE_LINK_SETTINGS = ["image_link_networks", "max_image_links", "max_image_link_requests_per_tenant"]


def image_fetcher_of(settings: GatewaySettings, live: LiveSettings[GatewaySettings]) -> ImageFetcher:
    """Return a fetcher of images that follows the settings."""
    fetcher = ImageFetcher()

    def use(settings: GatewaySettings) -> None:
        fetcher.reach = AddressPolicy(tuple(map(ip_network, settings.image_link_networks)))
        fetcher.limits = LinkLimits(
            settings.max_image_links, max_requests_per_tenant=settings.max_image_link_requests_per_tenant
        )

    use(settings)
    live.follow(IMAGE_LINK_SETTINGS, use)
    return fetcher
