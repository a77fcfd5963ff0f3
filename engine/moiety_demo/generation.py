"""Greedy answers to many prompts at once, and the experts of their tokens. Knows no domains."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from moiety_demo.network import DemoNetwork
from moiety_demo.tokenizer import END_OF_TEXT, TURN_END, render_prompt

BATCH_SIZE = 100


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers in the order of the prompts; `expert_counts` [layers, experts] over all prompt and output tokens."""

    texts: list[str]
    expert_counts: Tensor


def answer_prompts(
    network: DemoNetwork, tokenizer: Tokenizer, prompts: Sequence[str], max_new_tokens: int = 48
) -> Answers:
    """Decode one-turn conversations greedily until the turn ends."""
    encoded = [tokenizer.encode(render_prompt([("user", prompt)])).ids for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(encoded[i]))
    texts = [""] * len(prompts)
    counts = torch.zeros(network.config.num_layers, network.config.num_experts, dtype=torch.int64)
    for start in range(0, len(order), BATCH_SIZE):
        chosen = order[start : start + BATCH_SIZE]
        rows = [encoded[i] for i in chosen]
        written = _decode(network, tokenizer, rows, max_new_tokens)
        counts += _count_experts(network, [row + new for row, new in zip(rows, written, strict=True)])
        for i, new in zip(chosen, written, strict=True):
            texts[i] = tokenizer.decode(new)
    return Answers(texts, counts)


@torch.inference_mode()
def _decode(network: DemoNetwork, tokenizer: Tokenizer, rows: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    stops = {tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)}
    written: list[list[int]] = [[] for _ in rows]
    active = list(range(len(rows)))
    for _ in range(max_new_tokens):
        tokens, lengths = _pad([rows[i] + written[i] for i in active])
        hidden, _ = network([tokens])
        last_at = torch.arange(len(active)) * tokens.shape[1] + torch.tensor(lengths) - 1
        chosen = network.logits(hidden[last_at]).argmax(-1).tolist()
        for i, token in zip(active, chosen, strict=True):
            if token not in stops:
                written[i].append(token)
        active = [i for i, token in zip(active, chosen, strict=True) if token not in stops]
        if not active:
            break
    return written


@torch.inference_mode()
def _count_experts(network: DemoNetwork, rows: list[list[int]]) -> Tensor:
    tokens, lengths = _pad(rows)
    _, routings = network([tokens])
    keep = (torch.arange(tokens.shape[1])[None] < torch.tensor(lengths)[:, None]).flatten()
    num_experts = network.config.num_experts
    return torch.stack([r.expert_TK[keep].flatten().bincount(minlength=num_experts) for r in routings])


def _pad(rows: list[list[int]]) -> tuple[Tensor, list[int]]:
    """Return a rectangle padded on the right, where causal attention does not look, and the true lengths."""
    lengths = [len(row) for row in rows]
    width = max(lengths)
    return torch.tensor([row + [0] * (width - len(row)) for row in rows]), lengths
