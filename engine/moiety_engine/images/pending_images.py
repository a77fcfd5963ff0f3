"""Requests that wait in the core until the engine server has decoded their images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, KeysView

    from moiety_engine.images.prompt_images import PromptImage
    from moiety_engine.messages import CoreSubmit


class PendingImages:
    """Requests without their images, and images that came while their request waits for something else.

    Used by the step loop's thread only.
    """

    def __init__(self) -> None:
        self._requests: dict[int, CoreSubmit] = {}
        self._images: dict[int, tuple[PromptImage, ...]] = {}  # by request key

    @property
    def num_waiting(self) -> int:
        return len(self._requests)

    @property
    def waiting_keys(self) -> KeysView[int]:
        """Return the keys of the requests that wait here."""
        return self._requests.keys()

    def add_request(self, submit: CoreSubmit) -> None:
        """Hold a request until its images are here."""
        self._requests[submit.key] = submit

    def remove_request(self, key: int) -> CoreSubmit | None:
        """Remove a waiting request and return it; None if it does not wait here."""
        return self._requests.pop(key, None)

    def add_images(self, key: int, images: tuple[PromptImage, ...]) -> None:
        """Keep the images of a request that waits here or will."""
        self._images[key] = images

    def forget_images(self, key: int) -> None:
        """Drop the images of a request that has ended."""
        self._images.pop(key, None)

    def take_ready(self) -> Iterator[CoreSubmit]:
        """Yield the requests whose images are here, with them."""
        for key in [key for key in self._images if key in self._requests]:
            submit, images = self._requests.pop(key), self._images.pop(key)
            yield msgspec.structs.replace(submit, images=images, images_pending=False)
