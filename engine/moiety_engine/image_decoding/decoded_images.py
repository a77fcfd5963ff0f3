"""Cache of decoded images in host memory, by tenant, cache salt and file, so that a conversation decodes each once."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moiety_engine.images.prompt_images import PromptImage

ImageKey = tuple[str, bytes, bytes]  # tenant, cache salt, digest of the file


class DecodedImageCache:
    """Decoded images of recent requests, at most `max_bytes` of pixels; the least recently used are dropped.

    A tenant finds its own images only. Used by the engine server's event loop.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._images: OrderedDict[ImageKey, PromptImage] = OrderedDict()
        self._forgotten: set[str] = set()  # deleted tenants, whose images are not kept
        self.num_bytes = 0
        self.hits_total = self.misses_total = self.evictions_total = 0

    def __contains__(self, key: ImageKey) -> bool:
        return key in self._images

    def find_image(self, key: ImageKey) -> PromptImage | None:
        """Return the image, which is then the most recently used; None if it is not here."""
        found = self._images.get(key)
        if found is None:
            self.misses_total += 1
            return None
        self.hits_total += 1
        self._images.move_to_end(key)
        return found

    def add_image(self, key: ImageKey, image: PromptImage) -> None:
        """Keep an image, unless its tenant was deleted or it is larger than the cache."""
        num_bytes = len(image.pixels)
        if key in self._images or key[0] in self._forgotten or num_bytes > self._max_bytes:
            return
        self._images[key] = image
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            _, dropped = self._images.popitem(last=False)
            self.num_bytes -= len(dropped.pixels)
            self.evictions_total += 1

    def forget_tenants(self, tenant_ids: Iterable[str]) -> None:
        """Drop the images of these tenants, and keep none of them from now on."""
        self._forgotten.update(tenant_ids)
        for key in [key for key in self._images if key[0] in self._forgotten]:
            self.num_bytes -= len(self._images.pop(key).pixels)
