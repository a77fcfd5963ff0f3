"""Engine addresses in the settings: `tcp://HOST:PORT`, `ipc://PATH`, and `dns+tcp://NAME:PORT` for several engines.

An external engine is `openai+http://HOST:PORT/v1?model=NAME&kind=KIND&tokenizer=FOLDER`, a hosted provider
`openai+https://HOST/v1?model=NAME&kind=hosted&context=TOKENS` or `anthropic+https://…`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

from moiety_platform.redaction import redact_text

DNS_SCHEME = "dns+tcp://"
EXTERNAL_SCHEMES = ("openai+http://", "openai+https://", "anthropic+http://", "anthropic+https://")
EXTERNAL_ADDRESS_FORM = "openai+http://HOST:PORT/v1?model=NAME&kind=KIND&tokenizer=FOLDER"
HOSTED_ADDRESS_FORM = "openai+https://HOST/v1?model=NAME&kind=hosted&context=TOKENS (or anthropic+https://…)"
HOSTED_FAMILIES = ("hosted-openai", "hosted-anthropic")  # the family of their model cards
LIMIT_FIELDS = ("max_completion_tokens", "max_tokens")
MAX_TIMEOUT_S, MAX_RETRIES = 3600, 5
SWITCH = {"on": True, "off": False}
_COMMON = ("model", "kind", "context", "key_file", "key_env", "image_tokens")
_OF_ENGINES = (*_COMMON, "tokenizer", "priority", "shared_cache")
_OF_PROVIDERS = (*_COMMON, "name", "max_output", "timeout", "retries", "limit_field")
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ExternalKind(StrEnum):
    """Supported kinds of external engines; `generic` is any server that implements OpenAI's documentation.

    `hosted` is a provider of a model whose tokenizer is not known: it gets conversations, and counts their tokens.
    """

    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMA_CPP = "llama.cpp"
    GENERIC = "generic"
    HOSTED = "hosted"


class ProviderProtocol(StrEnum):
    """API of an external engine. Only hosted providers have Anthropic's."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


@dataclass(frozen=True, slots=True)
class HostedTerms:
    """Terms of a hosted provider, beside those that all external engines have."""

    max_output_tokens: int | None = None  # most output tokens of a request; None: the rest of the context
    timeout_s: float = 120.0  # without a byte of the answer
    retries: int = 2  # of requests that the provider did not begin
    limit_field: str = LIMIT_FIELDS[0]  # the field of OpenAI's chats for the most output tokens


@dataclass(frozen=True, slots=True)
class ExternalAddress:
    """An external engine and the facts that must be configured."""

    base_url: str  # up to and including /v1
    model: str
    kind: ExternalKind
    tokenizer: Path | None  # folder of a checkpoint, or its tokenizer.json; None for a hosted provider
    context_tokens: int | None = None  # None: the server reports it
    key_file: Path | None = None
    priority: bool = False  # the server schedules by priority
    image_tokens: int | None = None  # reserved for each image; None: the model reads text only
    shared_cache: bool = False  # prompts may share a prefix cache that cannot be separated by tenant
    key_env: str | None = None  # environment variable with the API key
    protocol: ProviderProtocol = ProviderProtocol.OPENAI
    served_name: str = ""  # the clients' name of the model, if it is another one
    hosted: HostedTerms | None = None

    @property
    def name(self) -> str:
        """Name of the engine in logs, metrics and routing."""
        return f"{self.protocol}+{self.base_url}?{urlencode({'model': self.model}, safe='/:')}"

    @property
    def root_url(self) -> str:
        """URL without /v1, for health and metrics."""
        return self.base_url.removesuffix("/v1")

    @classmethod
    def parse(cls, address: str) -> Self:
        """Return the parsed address. Raises ValueError, which says what to write."""
        scheme, _, url = address.partition("+")
        parts = urlsplit(url)
        _check_user(address.partition("?")[0], "; set the key's file with key_file=PATH")
        _check_place(address, parts)
        pairs = parse_qsl(parts.query, keep_blank_values=True)
        given = dict(pairs)
        is_hosted = given.get("kind") == ExternalKind.HOSTED or scheme == ProviderProtocol.ANTHROPIC
        known = _OF_PROVIDERS if is_hosted else _OF_ENGINES
        if len(given) != len(pairs) or not given.keys() <= set(known):
            raise ValueError(
                f"engine address {_shown(address)} may have each of {', '.join(known)} once, and nothing else"
            )
        needs = {"model": "the model's name at that server", "kind": f"one of {', '.join(ExternalKind)}"}
        if is_hosted:
            needs["context"] = "the model's context length in tokens"
        else:
            needs["tokenizer"] = "the folder with the model's tokenizer.json, by which prompts are counted exactly"
        for name, what in needs.items():
            if not given.get(name):
                form = HOSTED_ADDRESS_FORM if is_hosted else EXTERNAL_ADDRESS_FORM
                raise ValueError(f"engine address {_shown(address)} lacks {name}=…, {what}; its form is {form}")
        if given["kind"] not in list(ExternalKind):
            raise ValueError(f"engine address {_shown(address)}: kind must be one of {', '.join(ExternalKind)}")
        if is_hosted and given["kind"] != ExternalKind.HOSTED:
            raise ValueError(f"engine address {_shown(address)}: kind must be hosted with {scheme}+")
        return cls(
            f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}",
            given["model"],
            ExternalKind(given["kind"]),
            None if is_hosted else Path(given["tokenizer"]),
            _count(address, given, "context"),
            Path(given["key_file"]) if given.get("key_file") else None,
            _switch(address, given, "priority"),
            _count(address, given, "image_tokens"),
            _switch(address, given, "shared_cache"),
            _environment_name(address, given),
            ProviderProtocol(scheme),
            given.get("name", ""),
            _hosted_terms(address, given) if is_hosted else None,
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


def _environment_name(address: str, given: dict[str, str]) -> str | None:
    name = given.get("key_env")
    if name is not None and not _ENVIRONMENT_NAME.fullmatch(name):
        raise ValueError(f"engine address {_shown(address)}: key_env must be the name of an environment variable")
    if name is not None and given.get("key_file"):
        raise ValueError(f"engine address {_shown(address)} may have key_file or key_env, and not both")
    return name


def _hosted_terms(address: str, given: dict[str, str]) -> HostedTerms:
    limit_field, timeout, retries = (
        given.get("limit_field", LIMIT_FIELDS[0]),
        given.get("timeout"),
        given.get("retries"),
    )
    if limit_field not in LIMIT_FIELDS:
        raise ValueError(f"engine address {_shown(address)}: limit_field must be one of {', '.join(LIMIT_FIELDS)}")
    if timeout is not None and not (timeout.isascii() and timeout.isdigit() and 0 < int(timeout) <= MAX_TIMEOUT_S):
        raise ValueError(f"engine address {_shown(address)}: timeout must be 1 to {MAX_TIMEOUT_S} seconds")
    if retries is not None and not (retries.isascii() and retries.isdigit() and int(retries) <= MAX_RETRIES):
        raise ValueError(f"engine address {_shown(address)}: retries must be 0 to {MAX_RETRIES}")
    standard = HostedTerms()
    return HostedTerms(
        _count(address, given, "max_output"),
        standard.timeout_s if timeout is None else float(timeout),
        standard.retries if retries is None else int(retries),
        limit_field,
    )


def _switch(address: str, given: dict[str, str], name: str) -> bool:
    text = given.get(name, "off")
    if text not in SWITCH:
        raise ValueError(f"engine address {_shown(address)}: {name} must be on or off")
    return SWITCH[text]
