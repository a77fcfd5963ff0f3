"""Application of context edits to conversations, with the exact number of tokens that each edit clears."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moiety_platform.inference.context_edits import AppliedEdit, ContextEdit
from moiety_platform.inference.generation import Conversation, Generation
from moiety_platform.inference.model_texts import ModelText, encoding_scope
from moiety_platform.inference.request_record import RequestRecord
from moiety_text.segment_cache import Scope
from moiety_wire.messages import ModelCard


class EditedConversation(msgspec.Struct, frozen=True):
    """A conversation after its edits."""

    conversation: Conversation
    token_ids: list[int]  # its prompt, which may be longer than the model's context
    num_original_tokens: int  # of the prompt before the edits
    applied: tuple[AppliedEdit, ...]


async def edit_conversation(
    text: ModelText, conversation: Conversation, edits: Sequence[ContextEdit], card: ModelCard, scope: Scope
) -> EditedConversation:
    """Return the conversation after `edits`, which are made in their order.

    The conversation is encoded once, and once more for each edit that changes it. Raises the errors of
    `ModelText.encode_whole`.
    """
    token_ids, applied = await text.encode_whole(conversation, scope), list[AppliedEdit]()
    num_original_tokens = len(token_ids)
    for edit in edits:
        if not edit.is_triggered(conversation.messages, len(token_ids), card.max_context_tokens):
            continue
        messages, num_cleared = edit.edit(conversation.messages)
        if not num_cleared:
            continue
        edited = msgspec.structs.replace(conversation, messages=messages)
        edited_ids = await text.encode_whole(edited, scope)
        num_tokens = max(0, len(token_ids) - len(edited_ids))
        if edit.clears_enough(num_tokens):
            conversation, token_ids = edited, edited_ids
            applied.append(AppliedEdit(edit, num_cleared, num_tokens))
    return EditedConversation(conversation, token_ids, num_original_tokens, tuple(applied))


async def encode_edited(
    text: ModelText, generation: Generation, card: ModelCard, record: RequestRecord
) -> tuple[Generation, list[list[int]]]:
    """Return a generation of one conversation after its context edits, and the token ids of its prompt.

    The record has the edits that were made. Raises the errors of `edit_conversation`.
    """
    (conversation,) = generation.prompts
    assert isinstance(conversation, Conversation), "only conversations have context edits"
    scope = encoding_scope(record.principal.tenant_id, generation)
    edited = await edit_conversation(text, conversation, generation.context_edits, card, scope)
    record.applied_edits = edited.applied
    return msgspec.structs.replace(generation, prompts=(edited.conversation,)), [edited.token_ids]
