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
    "/v1/threads": "threads are not supported; use /v1/responses with 'previous_response_id'",
}


def advice_for(path: str) -> str | None:
    """Return what to use instead of an endpoint that is not served; None for paths of no known API."""
    return next((told for known, told in _ADVICE.items() if path == known or path.startswith(known + "/")), None)
