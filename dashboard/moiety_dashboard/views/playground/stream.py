"""Streams answers of the gateway's chat API with the entered key. Knows no page; threads touch only the queue."""

from __future__ import annotations

import json
import queue
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from moiety_dashboard.client import read_error, read_message
from moiety_dashboard.escaping import show_unseen
from moiety_dashboard.formatting import time_left

TIMEOUT_S = 120.0
LIMIT_HEADERS = ("x-ratelimit-", "ratelimit")


class Refused(Exception):
    """The gateway rejected or failed the request; the message gives the reason."""


@dataclass
class StreamedAnswer:
    """One request and what has arrived of its answer. Written by the thread that streams it."""

    model: str
    started_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    ended_s: float | None = None
    trace_id: str = field(default_factory=lambda: secrets.token_hex(16))
    request_id: str = ""  # of the response header; empty until a gateway has answered
    completion_id: str = ""  # under which the request log has the request; empty for a refused one
    tier: str = ""
    text: str = ""
    reasoning: str = ""
    error: str = ""
    finish_reason: str = ""
    cost_nanodollars: int | None = None  # as the request log has it, once it is known
    usage: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_s is None else (self.first_s - self.started_s) * 1000

    @property
    def duration_ms(self) -> float:
        return ((self.ended_s or time.monotonic()) - self.started_s) * 1000

    @property
    def decode_speed(self) -> float | None:
        """Output tokens per second after the first one; None without two tokens."""
        output = self.usage.get("completion_tokens")
        decode_s = (self.ended_s or time.monotonic()) - self.first_s if self.first_s is not None else 0.0
        return (output - 1) / decode_s if output and output > 1 and decode_s > 0 else None


@contextmanager
def streaming(
    url: str, key: str, bodies: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[list[StreamedAnswer], Iterator[None]]]:
    """Stream an answer to each body at the same time; yield them, and an iterator that steps as parts arrive.

    At the end of the block, also by an exception, unfinished requests are cancelled at their next part.
    """
    answers = [StreamedAnswer(str(body["model"])) for body in bodies]
    news: queue.Queue[bool] = queue.Queue()
    stopping = threading.Event()
    threads = [
        threading.Thread(target=_stream, args=(url, key, body, answer, news, stopping), daemon=True)
        for body, answer in zip(bodies, answers, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        yield answers, _steps(news, len(threads))
    finally:
        stopping.set()


def _steps(news: queue.Queue[bool], num_left: int) -> Iterator[None]:
    """Step whenever something has arrived, until all streams have ended."""
    while num_left:
        arrived = [news.get()]
        while not news.empty():
            arrived.append(news.get())
        num_left -= sum(arrived)
        yield


def _stream(
    url: str,
    key: str,
    body: Mapping[str, Any],
    answer: StreamedAnswer,
    news: queue.Queue[bool],
    stopping: threading.Event,
) -> None:
    try:
        for _ in arriving(url, key, body, answer):
            news.put(False)
            if stopping.is_set():
                break
    except Refused as exc:
        answer.error = str(exc)
    except httpx.HTTPError as exc:
        answer.error = f"The connection to the gateway failed ({type(exc).__name__}). Check that it is running."
    except (ValueError, KeyError, TypeError) as exc:  # an answer that is not of the chat API
        answer.error = f"The answer is not a stream of chat completions ({type(exc).__name__})."
    finally:
        answer.ended_s = time.monotonic()
        news.put(True)


def arriving(url: str, key: str, body: Mapping[str, Any], answer: StreamedAnswer) -> Iterator[None]:
    """Add the parts of an answer as they arrive; yield after each. Raises Refused, or httpx.HTTPError."""
    traceparent = f"00-{answer.trace_id}-{secrets.token_hex(8)}-01"  # makes its trace easy to find
    headers = {"Authorization": f"Bearer {key}", "traceparent": traceparent}
    with (
        httpx.Client(timeout=TIMEOUT_S) as http,
        http.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as response,
    ):
        answer.request_id = response.headers.get("x-request-id", "")
        answer.limits = {name: value for name, value in response.headers.items() if name.startswith(LIMIT_HEADERS)}
        if response.is_error:
            response.read()
            raise Refused(refusal(response))
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if line.startswith("data: ") and data != "[DONE]":
                take(json.loads(data), answer)
                yield


def take(event: Mapping[str, Any], answer: StreamedAnswer) -> None:
    """Add one event to the answer. Raises Refused for an answer that failed midway."""
    if "error" in event:
        raise Refused(f"The answer failed midway: {show_unseen(str(event['error']['message']))}")
    answer.completion_id = event.get("id") or answer.completion_id
    answer.tier = event.get("service_tier") or answer.tier
    answer.usage = event.get("usage") or answer.usage
    for choice in event.get("choices", []):
        delta = choice["delta"]
        text, reasoning = delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or ""
        if text or reasoning:
            answer.first_s = answer.first_s or time.monotonic()
        answer.text += text
        answer.reasoning += reasoning
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def refusal(response: httpx.Response) -> str:
    """Return status, code, message, and the time to retry."""
    code = read_error(response, "code") or "error"
    message, after = read_message(response), response.headers.get("retry-after", "")
    said = message if message.endswith((".", "!", "?")) else f"{message}."
    wait = f"{after} s" if len(after) < 3 else time_left(float(after)) if after.isdecimal() else after
    return f"{response.status_code} {code}: {said}" + (f" Retry after {wait}." if after else "")
