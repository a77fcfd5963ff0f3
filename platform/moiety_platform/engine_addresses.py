"""Engine addresses in the settings: `tcp://HOST:PORT`, `ipc://PATH`, and `dns+tcp://NAME:PORT` for several engines.

An external engine is `openai+http://HOST:PORT/v1?model=NAME&kind=KIND&tokenizer=FOLDER`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

from moiety_platform.redaction import redact_text

DNS_SCHEME = "dns+tcp://"
EXTERNAL_SCHEMES = ("openai+http://", "openai+https://")
EXTERNAL_ADDRESS_FORM = "openai+http://HOST:PORT/v1?model=NAME&kind=KIND&tokenizer=FOLDER"
SWITCH = {"on": True, "off": False}


class ExternalKind(StrEnum):
    """Supported kinds of external engines; `generic` is any server that implements OpenAI's documentation."""

    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMA_CPP = "llama.cpp"
    GENERIC = "generic"


@dataclass(frozen=True, slots=True)
class ExternalAddress:
    """An external engine and the facts that must be configured."""

    base_url: str  # up to and including /v1
    model: str
    kind: ExternalKind
    tokenizer: Path  # folder of a checkpoint, or its tokenizer.json
    context_tokens: int | None = None  # None: the server reports it
    key_file: Path | None = None
    priority: bool = False  # the server schedules by priority
    image_tokens: int | None = None  # reserved for each image; None: the model reads text only
    shared_cache: bool = False  # prompts may share a prefix cache that cannot be separated by tenant

    @property
    def name(self) -> str:
        """Name of the engine in logs, metrics and routing."""
        return f"openai+{self.base_url}?{urlencode({'model': self.model}, safe='/:')}"

    @property
    def root_url(self) -> str:
        """URL without /v1, for health and metrics."""
        return self.base_url.removesuffix("/v1")

    @classmethod
    def parse(cls, address: str) -> Self:
        """Return the parsed address. Raises ValueError, which says what to write."""
        parts = urlsplit(address.removeprefix("openai+"))
        _check_user(address.partition("?")[0], "; set the key's file with key_file=PATH")
        _check_place(address, parts)
        pairs = parse_qsl(parts.query, keep_blank_values=True)
        given = dict(pairs)
        known = ("model", "kind", "tokenizer", "context", "key_file", "priority", "image_tokens", "shared_cache")
        if len(given) != len(pairs) or not given.keys() <= set(known):
            raise ValueError(
                f"engine address {_shown(address)} may have each of {', '.join(known)} once, and nothing else"
            )
        for name, what in (
            ("model", "the model's name at that server"),
            ("kind", f"one of {', '.join(ExternalKind)}"),
            ("tokenizer", "the folder with the model's tokenizer.json, by which prompts are counted exactly"),
        ):
            if not given.get(name):
                raise ValueError(
                    f"engine address {_shown(address)} lacks {name}=…, {what}; its form is {EXTERNAL_ADDRESS_FORM}"
                )
        if given["kind"] not in list(ExternalKind):
            raise ValueError(f"engine address {_shown(address)}: kind must be one of {', '.join(ExternalKind)}")
        return cls(
            f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}",
            given["model"],
            ExternalKind(given["kind"]),
            Path(given["tokenizer"]),
            _count(address, given, "context"),
            Path(given["key_file"]) if given.get("key_file") else None,
            _switch(address, given, "priority"),
            _count(address, given, "image_tokens"),
            _switch(address, given, "shared_cache"),
        )


def is_name(address: str) -> bool:
    """Return whether the address is a DNS name, which represents one engine per resolved address."""
    return address.startswith(DNS_SCHEME)


def is_external(address: str) -> bool:
    """Return whether the address is that of an external engine."""
    return address.startswith(EXTERNAL_SCHEMES)


def split_name(address: str) -> tuple[str, int]:
    """Return (name, port) of `dns+tcp://NAME:PORT`. Raises ValueError."""
    _check_user(address)
    name, _, port = address.removeprefix(DNS_SCHEME).rpartition(":")
    if not is_name(address) or not name or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"engine address {_shown(address)} must be {DNS_SCHEME}NAME:PORT")
    return name, int(port)


def identity(address: str) -> str:
    """Return the identity that all addresses of one engine share. Raises ValueError for an invalid address."""
    if is_external(address):
        return ExternalAddress.parse(address).name
    if is_name(address):
        split_name(address)
    elif address.startswith("tcp://"):
        _check_user(address)
    elif not address.startswith("ipc://"):
        raise ValueError(
            f"engine address {_shown(address)} must start with tcp://, ipc:// or {DNS_SCHEME}, or be "
            f"{EXTERNAL_ADDRESS_FORM}"
        )
    return address


def _shown(address: str) -> str:
    """Return an address that cannot be used, without what may be a secret, for errors."""
    return repr(redact_text(address, ()))


def _check_user(address: str, advice: str = "") -> None:
    if "@" in address:
        raise ValueError(f"an engine address must not contain a user or password{advice}")


def _check_place(address: str, parts: SplitResult) -> None:
    try:
        port = parts.port
    except ValueError:
        port = 0
    if not parts.hostname or port == 0 or parts.fragment or not parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"engine address {_shown(address)} must have the form {EXTERNAL_ADDRESS_FORM}")


def _count(address: str, given: dict[str, str], name: str) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 1):
        raise ValueError(f"engine address {_shown(address)}: {name} must be a number of tokens")
    return int(text)


def _switch(address: str, given: dict[str, str], name: str) -> bool:
    text = given.get(name, "off")
    if text not in SWITCH:
        raise ValueError(f"engine address {_shown(address)}: {name} must be on or off")
    return SWITCH[text]
