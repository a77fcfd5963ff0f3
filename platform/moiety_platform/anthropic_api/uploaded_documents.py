"""Documents that requests name by the id of an uploaded file: their text is read before the prompt is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from moiety_platform.anthropic_api.content_blocks import ContentBlock, DocumentBlock, ToolResultBlock
from moiety_platform.anthropic_api.turns import MessageTurn
from moiety_platform.auth.principal import Principal
from moiety_platform.inference.image_preparation import ImagePreparation


async def load_documents(turns: Sequence[MessageTurn], uploads: ImagePreparation, owner: Principal) -> None:
    """Read the text of each document in the turns that is an uploaded file of the owner's project.

    Raises BadRequest for a file that is not plain text or too large, NotFound, Gone and Unavailable.
    """
    uploaded = _uploaded_in(turns)
    if not uploaded:
        return
    texts = await uploads.read_documents([*dict.fromkeys(file_id for file_id, _ in uploaded)], owner)
    for file_id, block in uploaded:
        block.set_text(texts[file_id])


@contextmanager
def without_documents(turns: Sequence[MessageTurn]) -> Iterator[None]:
    """Let uploaded documents be empty within the context, to check a request without its files."""
    uploaded = _uploaded_in(turns)
    for _, block in uploaded:
        block.set_text("")
    try:
        yield
    finally:
        for _, block in uploaded:
            block.set_text(None)


def _uploaded_in(turns: Sequence[MessageTurn]) -> list[tuple[str, DocumentBlock]]:
    """Return the documents that are uploaded files, with the ids of the files."""
    documents = (block for turn in turns for block in _documents(turn.content))
    return [(block.file_id, block) for block in documents if block.file_id is not None]


def _documents(blocks: Sequence[ContentBlock]) -> Iterator[DocumentBlock]:
    for block in blocks:
        if isinstance(block, DocumentBlock):
            yield block
        elif isinstance(block, ToolResultBlock):
            yield from _documents(block.content or ())
