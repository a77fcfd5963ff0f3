"""Training batches: conversations as token ids, grouped by length to limit padding. Knows no network."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from moiety_demo.conversation import Conversation, sample_conversation
from moiety_demo.tokenizer import END_OF_TEXT, TURN_END, TURN_START, token_id

NUM_GROUPS = 10


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Rectangles of token ids [B, S] each, and flat data about their concatenated tokens.

    `answer_at` are the flat positions that predict an answer's token, `answer_ids` those tokens, `sequence_T` the
    conversation number of each token (-1 for padding).
    """

    groups: list[Tensor]
    answer_at: Tensor
    answer_ids: Tensor
    sequence_T: Tensor
    num_tokens: int


class BatchSource:
    """Endless, seeded source of batches; owns its random generator."""

    def __init__(self, tokenizer: Tokenizer, batch_tokens: int, seed: int) -> None:
        self._encoder = TrainingEncoder(tokenizer)
        self._batch_tokens = batch_tokens
        self._rng = Random(f"batches {seed}")

    def __iter__(self) -> Iterator[TrainingBatch]:
        while True:
            rows, num_tokens = [], 0
            while num_tokens < self._batch_tokens:
                rows.append(self._encoder.encode(sample_conversation(self._rng)))
                num_tokens += len(rows[-1][0])
            yield collate(rows, self._encoder.padding_id)


class TrainingEncoder:
    """Encoder of conversations to token ids and a mask of learned tokens: the answers and the ends of their turns."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.padding_id = token_id(tokenizer, END_OF_TEXT)
        self._turn_end = token_id(tokenizer, TURN_END)
        self._newline = tokenizer.encode("\n").ids
        self._head = {
            role: [token_id(tokenizer, TURN_START), token_id(tokenizer, f"{role}\n")]
            for role in ("system", "user", "assistant")
        }

    def encode(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        learned: list[bool] = []
        messages = [("system", conversation.system)] if conversation.system else []
        for task in conversation.turns:
            messages += [("user", task.prompt), ("assistant", task.answer)]
        for role, content in messages:
            body = [*self._tokenizer.encode(content).ids, self._turn_end]
            ids += [*self._head[role], *body, *self._newline]
            learned += [False] * len(self._head[role]) + [role == "assistant"] * len(body) + [False]
        return ids, learned


def collate(rows: Sequence[tuple[list[int], list[bool]]], padding_id: int) -> TrainingBatch:
    """Sort encoded conversations by length into a few rectangles."""
    ordered = sorted(rows, key=lambda row: len(row[0]))
    step = -(-len(ordered) // NUM_GROUPS)
    groups, learned, sequence = [], [], []
    for start in range(0, len(ordered), step):
        part = ordered[start : start + step]
        length = len(part[-1][0])
        groups.append(torch.tensor([ids + [padding_id] * (length - len(ids)) for ids, _ in part]))
        learned.append(torch.tensor([mask + [False] * (length - len(mask)) for _, mask in part]))
        numbers = [[start + i] * len(ids) + [-1] * (length - len(ids)) for i, (ids, _) in enumerate(part)]
        sequence.append(torch.tensor(numbers))
    target_at = torch.cat([mask.flatten() for mask in learned]).nonzero().squeeze(1)
    flat_ids = torch.cat([group.flatten() for group in groups])
    num_tokens = sum(len(ids) for ids, _ in ordered)
    sequence_T = torch.cat([numbers.flatten() for numbers in sequence])
    return TrainingBatch(groups, target_at - 1, flat_ids[target_at], sequence_T, num_tokens)
