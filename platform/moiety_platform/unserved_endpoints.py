"""Endpoints of the vendors' APIs that the gateway does not serve, with what to use instead."""

from __future__ import annotations

ENDPOINT_NOT_SUPPORTED = "endpoint_not_supported"

_ADVICE = {
    "/v1/audio": "audio is not supported; send the transcript as text to /v1/chat/completions",
    "/v1/realtime": "audio and realtime sessions are not supported; stream /v1/responses or /v1/chat/completions",
    "/v1/images": "images are not generated; models that take images get them in chats, messages and responses",
    "/v1/videos": "videos are not generated; use another service for them",
    "/v1/moderations": "moderation is not supported; use /v1/classify with a classification model",
    "/v1/fine_tuning": "fine-tuning is not supported; train an adapter elsewhere and upload it",
    "/v1/vector_stores": "vector stores are not supported; use /v1/embeddings and /v1/rerank with a store of your own",
    "/v1/assistants": "assistants are not supported; use /v1/responses",
    "/v1/agents": "hosted agents are not run; run the agent at the client, with /v1/responses or /v1/messages",
    "/v1/sessions": "hosted agents are not run; run the agent at the client, with /v1/messages",
    "/v1/environments": "hosted agents are not run; run the agent at the client, with /v1/messages",
    "/v1/containers": "code is not run on the server; offer a tool of the client's instead",
    "/v1/skills": "skills are not stored; put their text into the system message",
    "/v1/evals": "evaluations are not run; use a client such as lm_eval or inspect-ai",
    "/v1/live": "audio and realtime sessions are not supported; stream /v1/responses or /v1/chat/completions",
    "/v1/chatkit": "ChatKit sessions are not supported; use /v1/responses",
    "/v1/complete": "Anthropic's text completions are not supported; use /v1/messages",
    "/v1/threads": "threads are not supported; use /v1/responses with 'previous_response_id'",
}


def advice_for(path: str) -> str | None:
    """Return what to use instead of an endpoint that is not served; None for paths of no known API."""
    return next((told for known, told in _ADVICE.items() if path == known or path.startswith(known + "/")), None)
