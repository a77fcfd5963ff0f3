"""Quality of a model: its perplexity on a text, and for the demo model its accuracy on held-out tasks.

T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tokenizers
import torch

from moiety_demo.domains import DOMAINS, Split, sample_tasks
from moiety_demo.tokenizer import END_OF_TEXT, TURN_END, render_prompt, token_id
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.batch import Batch
from moiety_engine.offline import run_all
from moiety_wire.classes import BATCH
from moiety_wire.messages import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from moiety_engine.model.transformer import Transformer

_BLOCK = 16
_MAX_ANSWER_TOKENS = 48
_SEED = 1234


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Evaluation data of a model.

    `texts`: token ids, and the position (at least 1) of the first token to predict. `questions`: prompts with their
    exact answers.
    """

    texts: Sequence[tuple[list[int], int]]
    questions: Sequence[tuple[list[int], list[int]]]
    stop_ids: list[int]


@dataclass(frozen=True, slots=True)
class QualityScores:
    """Evaluation results. `accuracy` is None if there were no questions."""

    perplexity: float
    accuracy: float | None


def demo_evaluation_set(folder: Path, per_domain: int) -> EvaluationSet:
    """Return the held-out tasks of all domains as questions, and with their answers as texts."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    stops = [token_id(tokenizer, name) for name in (TURN_END, END_OF_TEXT)]
    tasks = [task for domain in DOMAINS for task in sample_tasks(domain, Split.HELD_OUT, per_domain, _SEED)]
    questions = [
        (tokenizer.encode(render_prompt([("user", task.prompt)])).ids, tokenizer.encode(task.answer).ids)
        for task in tasks
    ]
    texts = [(prompt + answer + stops[:1], len(prompt)) for prompt, answer in questions]
    return EvaluationSet(texts, questions, stops)


def text_evaluation_set(folder: Path, text: str, context: int) -> EvaluationSet:
    """Return a text as pieces of `context` tokens."""
    ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return EvaluationSet([(ids[start : start + context], 1) for start in range(0, len(ids) - 1, context)], [], [])


def evaluate_quality(loop: EngineLoop, data: EvaluationSet, progress: Callable[[int, int], None]) -> QualityScores:
    """Evaluate the loop's model on `data`. `progress` is called with (texts and questions done, in all)."""
    total = len(data.texts) + len(data.questions)
    total_nll = num_tokens = 0.0
    for number, (ids, first) in enumerate(data.texts):
        total_nll += _negative_log_likelihood(loop.executor.model, ids, first)
        num_tokens += len(ids) - first
        progress(number + 1, total)
    perplexity = math.exp(total_nll / num_tokens) if num_tokens else math.nan
    if not data.questions:
        return QualityScores(perplexity, None)
    results = run_all(
        loop,
        [_request_for(key, prompt, data.stop_ids) for key, (prompt, _) in enumerate(data.questions)],
        on_step=lambda done: progress(len(data.texts) + done, total),
    )
    exact = sum(
        [token for token in results[key].token_ids if token not in data.stop_ids] == answer
        for key, (_, answer) in enumerate(data.questions)
    )
    return QualityScores(perplexity, exact / len(data.questions))


@torch.inference_mode()
def _negative_log_likelihood(model: Transformer, ids: list[int], first: int) -> float:
    """Return Σ -log p of each token from `first` on, given the tokens before it."""
    count = len(ids)
    if count < 2:
        return 0.0
    num_blocks = -(-count // _BLOCK)
    device = model.device
    batch = Batch(
        token_ids_T=torch.tensor(ids, device=device),
        positions_T=torch.arange(count, device=device),
        slots_T=torch.arange(count, device=device),
        query_start_S1=torch.tensor([0, count], dtype=torch.int32, device=device),
        context_len_S=torch.tensor([count], dtype=torch.int32, device=device),
        block_table_SB=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
        wanted_rows_L=torch.arange(first - 1, count - 1, device=device),
        num_decode=0,
        max_context=count,
        max_query=count,
    )
    logprobs_TV = model.forward(batch, model.allocate_kv(num_blocks, _BLOCK)).log_softmax(-1)
    return -float(logprobs_TV.gather(1, torch.tensor(ids[first:], device=device)[:, None]).sum())


def _request_for(key: int, prompt_ids: list[int], stop_ids: list[int]) -> CoreSubmit:
    return CoreSubmit(
        key=key,
        tenant_id="quantize",
        service=BATCH,
        prompt_ids=prompt_ids,
        sampling=Sampling(temperature=0.0),
        max_tokens=_MAX_ANSWER_TOKENS,
        min_tokens=0,
        stop_token_ids=stop_ids,
        credit_tokens=_MAX_ANSWER_TOKENS,
        cache_salt=b"quantize",
        arrival_unix_ns=0,
    )
