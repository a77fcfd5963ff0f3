"""lm_eval: its `local-completions` model with log-probabilities of prompts, and its `local-chat-completions`."""

from __future__ import annotations

from typing import Any

import tasks
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from tasks import LONG_TEXT, QUESTION, Server, expect


def requests_of(kind: str, *arguments: Any) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=arguments, idx=0)]


def settings_of(server: Server, path: str) -> dict[str, Any]:
    return {
        "model": server.model,
        "base_url": f"{server.openai_url}/{path}",
        "tokenizer_backend": None,
        "tokenized_requests": False,
        "max_retries": 1,
        "header": {"Authorization": f"Bearer {server.key}"},
    }


def chat(server: Server) -> None:
    model = LocalChatCompletion(**settings_of(server, "chat/completions"))
    messages = model.apply_chat_template([{"role": "user", "content": QUESTION}])
    found = model.generate_until(requests_of("generate_until", messages, {"max_gen_toks": 8, "until": ["\n"]}))
    expect(len(found) == 1, found)


def long_prompt(server: Server) -> None:
    model = LocalCompletionsAPI(**settings_of(server, "completions"))
    found = model.generate_until(requests_of("generate_until", LONG_TEXT, {"max_gen_toks": 8, "until": ["\n\n"]}))
    expect(len(found) == 1, found)


if __name__ == "__main__":
    only = "it asks for whole texts and scores only"
    absent = ("stream", "tools", "structured output", "thoughts", "images", "cancel")
    tasks.main(globals(), dict.fromkeys(absent, only))
