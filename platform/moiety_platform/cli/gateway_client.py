"""Shared client code of the commands: the gateway's address, the key, responses, and errors with an exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import httpx

from moiety_platform.cli.errors import CommandError, NotAllowed, NotReachable, Refused
from moiety_platform.redaction import hide_url_passwords
from moiety_platform.supervisor.data_dir import FirstKeys, read_first_keys, read_url
from moiety_platform.supervisor.errors import SupervisorError

DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class DefaultKey:
    """Choice of a key of a local serve, and the error message if there is none."""

    select: Callable[[FirstKeys], str]
    missing_message: str


def local_keys(data_dir: Path, missing_message: str) -> FirstKeys:
    """Return the keys of a local serve. Raises CommandError with `missing_message`, which says what to give."""
    try:
        keys = read_first_keys(data_dir)
    except SupervisorError as exc:
        raise CommandError(str(exc)) from exc
    if keys is None:
        raise CommandError(f"{missing_message}, or a --data-dir that a serve has used (there is none in {data_dir})")
    return keys


def connect(url: str | None, key: str | None, data_dir: Path, needed: DefaultKey, timeout_s: float) -> httpx.Client:
    """Return a client for the given gateway and key, by default those of a local serve's data directory.

    Raises CommandError if there is no key.
    """
    if key is None:
        key = needed.select(local_keys(data_dir, needed.missing_message))
    address = url or read_url(data_dir) or DEFAULT_URL
    return httpx.Client(base_url=address, headers={"Authorization": f"Bearer {key}"}, timeout=timeout_s)


@dataclass(frozen=True, slots=True)
class GatewayClient:
    """Client of one gateway with one key. Classes that extend it name the key, and how long a response may take."""

    http: httpx.Client

    default_key: ClassVar[DefaultKey]
    timeout_s: ClassVar[float]

    @classmethod
    def connect(cls, url: str | None, key: str | None, data_dir: Path) -> Self:
        """Return a client, as `connect` makes it. Raises CommandError if there is no key."""
        return cls(connect(url, key, data_dir, cls.default_key, cls.timeout_s))


def call(http: httpx.Client, method: str, path: str, **request: Any) -> Any:
    """Return the decoded response. Raises NotReachable, NotAllowed or Refused."""
    return answer(http, method, path, **request).json()


def answer(http: httpx.Client, method: str, path: str, **request: Any) -> httpx.Response:
    """Return the response of a successful request. Raises NotReachable, NotAllowed or Refused."""
    with reaching(http):
        response = http.request(method, path, **request)
    raise_for_status(response)
    return response


@contextmanager
def reaching(http: httpx.Client) -> Iterator[None]:
    """Raise NotReachable in place of any HTTP client error."""
    try:
        yield
    except httpx.HTTPError as exc:
        kind = type(exc).__name__
        raise NotReachable(
            f"the gateway at {hide_url_passwords(str(http.base_url))} does not answer ({kind}); is it running?"
        ) from exc


def raise_for_status(response: httpx.Response) -> None:
    """Raise NotAllowed or Refused for an error response, whose body has been read."""
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise NotAllowed(_message(response))
    if response.is_error:
        raise Refused(_message(response), _param(response))


def _message(response: httpx.Response) -> str:
    """Return the message of an error response, or a description if the body has none."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        url = hide_url_passwords(str(response.request.url))
        return f"{url} answered {response.status_code}; is it a Moiety gateway?"


def _param(response: httpx.Response) -> str | None:
    try:
        return response.json()["error"].get("param")  # type: ignore[no-any-return]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
