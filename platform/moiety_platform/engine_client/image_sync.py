"""References to images that an engine has decoded, in place of their files.

A conversation repeats its images with each request. A file is sent once to an engine; later requests of the tenant with
the same cache salt name its digest, and the files are sent again if the engine reports that it dropped one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

import msgspec

from moiety_platform.engine_client.stream import EngineStream
from moiety_wire.images import ImageInput, image_digest
from moiety_wire.messages import Accepted, Extend, Failed, FailureCode, Finished, Submit, ToEngine, Tokens

MAX_KNOWN = 8192  # images that the engine is known to have

_ImageKey = tuple[str, bytes, bytes]  # tenant, cache salt, digest


class ImageSync:
    """Images that the engine of one session has. `send` sends a message to it."""

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self._send = send
        self._known: OrderedDict[_ImageKey, None] = OrderedDict()  # least recently used first
        self.submits: dict[str, tuple[Submit, list[_ImageKey]]] = {}  # requests without an answer, with their files

    def with_references(self, submit: Submit) -> Submit:
        """Return the request as it is sent: with references to the images that the engine has."""
        keys = [
            (submit.tenant_id, submit.cache_salt, image.digest or image_digest(image.data)) for image in submit.images
        ]
        self.submits[submit.request_id] = submit, keys
        return msgspec.structs.replace(
            submit, images=[self._shortened(image, key) for image, key in zip(submit.images, keys, strict=True)]
        )

    def takes(self, message: Accepted | Tokens | Finished | Failed, streams: Mapping[str, EngineStream]) -> bool:
        """Return whether the engine lacks images of the request, which is then sent again with all files."""
        waiting = self.submits.pop(message.request_id, None)
        if waiting is None:
            return False
        submit, keys = waiting
        if not isinstance(message, Failed):
            self._note_images(keys)
            return False
        for key in keys:
            self._known.pop(key, None)
        stream = streams.get(message.request_id)
        if message.code is not FailureCode.IMAGES_MISSING or stream is None or not stream.wants_more:
            return False
        self._send(msgspec.structs.replace(submit, credit_tokens=stream.credit_tokens))
        if stream.credit_is_last:
            self._send(Extend(submit.request_id, submit.seq + 1, stream.credit_tokens, last=True))
        return True

    def forget_tenants(self, tenant_ids: list[str]) -> None:
        """Forget the images of deleted tenants."""
        for key in [key for key in self._known if key[0] in tenant_ids]:
            del self._known[key]

    def _note_images(self, keys: list[_ImageKey]) -> None:
        for key in keys:
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _shortened(self, image: ImageInput, key: _ImageKey) -> ImageInput:
        return image.reference() if key in self._known else image
