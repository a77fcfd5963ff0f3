"""Documents that requests name by the id of an uploaded file: their text is read before the prompt is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moiety_platform.anthropic_api.content_blocks import ContentBlock, DocumentBlock, ToolResultBlock
from moiety_platform.anthropic_api.turns import MessageTurn
from moiety_platform.auth.principal import Principal
from moiety_platform.inference.image_preparation import ImagePreparation


async def load_documents(turns: Sequence[MessageTurn], uploads: ImagePreparation, owner: Principal) -> None:
    """Read the text of each document in the turns that is an uploaded file of the owner's project.

    Raises BadRequest for a file that is not plain text or too large, NotFound, Gone and Unavailable.
    """
    blocks = [block for turn in turns for block in _documents(turn.content)]
    file_ids = dict.fromkeys(block.file_id for block in blocks if block.file_id is not None)
    if not file_ids:
        return
    texts = await uploads.read_documents([*file_ids], owner)
    for block in blocks:
        if block.file_id is not None:
            block.set_text(texts[block.file_id])


def _documents(blocks: Sequence[ContentBlock]) -> Iterator[DocumentBlock]:
    for block in blocks:
        if isinstance(block, DocumentBlock):
            yield block
        elif isinstance(block, ToolResultBlock):
            yield from _documents(block.content or ())
