"""The real `openai` client asks the real engine for decisions: probabilities are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tests.conftest import wait_for
from transformers import AutoModelForCausalLM, AutoTokenizer

import moiety_demo

STATEMENT = "Paris is the capital of France."
CITIES = ["Paris", "Rome", True, "true"]
INPUT = "What is the capital of France? " * 20  # longer than a block of the prefix cache
LAST = "Answer with exactly one of these JSON values and nothing else."
QUESTIONS: list[Any] = [
    {"type": "predicate", "instructions": STATEMENT},
    {"type": "choice", "instructions": "Which one?", "choices": [{"value": city} for city in CITIES]},
    {"type": "score", "instructions": "How big?", "levels": [{"label": "small"}, {"label": "big", "description": "2"}]},
]
TASKS = [
    (f"Statement about the input: {STATEMENT}\n\nIs the statement true? Answer with true or false only.", "true false"),
    (
        f'Which one?\n\nThe possible answers, as JSON:\n- "Paris"\n- "Rome"\n- true\n- "true"\n\n{LAST}',
        '"Paris" "Rome" true "true"',
    ),
    (
        f'How big?\n\nThe levels, from the lowest to the highest, as JSON:\n- "small"\n- "big": 2\n\n{LAST}',
        '"small" "big"',
    ),
]


def true_probabilities(model: Any, tokenizer: Any, task: str, options: list[str]) -> list[Any]:
    """The probabilities of whole texts by transformers, of one that is surely one of these."""
    message = {"role": "user", "content": f"<input>\n{INPUT}\n</input>\n\n{task}"}
    begun = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    sums = []
    for option in options:
        ids = tokenizer(begun + option, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.inference_mode():
            log_TV = model(ids).logits[0].double().log_softmax(-1)
        sums.append(log_TV[:-1].gather(1, ids[0, 1:, None]).sum())
    return [pytest.approx(float(one), rel=1e-3) for one in torch.stack(sums).softmax(0)]


def test_decisions_have_the_probabilities_that_transformers_gives_the_options(
    start_server: Any, tmp_path: Path
) -> None:
    path = moiety_demo.checkpoint_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    yes, choice, size = (true_probabilities(model, tokenizer, task, options.split()) for task, options in TASKS)
    with start_server(tmp_path, "--dtype", "float32") as server:
        with openai.OpenAI(api_key=server.key("tenant"), base_url=f"{server.url}/v1", max_retries=0) as client:
            decision = client.decisions.create(model=server.model, input=INPUT, questions=QUESTIONS)
        rows = wait_for(lambda: server.get("/admin/v1/usage/requests", limit=9)["data"], "the usage row")
    predicate, chosen, score = decision.answers
    assert (predicate.type, predicate.probability) == ("predicate", yes[0])
    assert chosen.type == "choice" and [one.value for one in chosen.probabilities] == CITIES
    assert [one.probability for one in chosen.probabilities] == choice
    assert score.type == "score" and [one.probability for one in score.probabilities] == size
    assert score.score == pytest.approx(score.probabilities[1].probability)
    usage, (row,) = decision.usage, rows
    assert (row["prompt_tokens"], row["output_tokens"]) == (usage.input_tokens, usage.output_tokens)
    assert usage.input_tokens_details.cached_tokens == row["cached_tokens"] > usage.input_tokens / 2
