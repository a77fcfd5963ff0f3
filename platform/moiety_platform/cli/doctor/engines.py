"""Checks of the engines, each contacted over its own address as a gateway would."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import zmq

from moiety_platform.cli.doctor.finding import Finding, fail, ok
from moiety_platform.engine_addresses import ExternalAddress, ProviderProtocol, is_external, is_name
from moiety_platform.engine_client.curve import CurveKeys
from moiety_platform.external_engines.anthropic_messages import VERSION_HEADERS
from moiety_wire.codec import decode_to_gateway, encode
from moiety_wire.errors import UndecodableMessage
from moiety_wire.messages import PROTOCOL_VERSION, Hello, ModelCard
from moiety_wire.roles import EngineRole

AREA = "engines"
TIMEOUT_S = 3.0
GREETING_BYTES = 64
SIGNATURE, MECHANISM = slice(0, 1), slice(12, 32)  # of ZMTP's greeting
VERSION = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01"  # just enough to receive the peer's mechanism


@dataclass(frozen=True)
class Settings:
    """Engine settings of a gateway. `external_engine_key` is for external engines whose address names no key file."""

    addresses: Sequence[str]
    curve: CurveKeys | None
    external_engine_key: str | None = None


def check_engines(settings: Settings, timeout_s: float = TIMEOUT_S) -> Iterator[Finding]:
    """Check that each engine answers, and that those of one model agree."""
    if not settings.addresses:
        advice = "configure the gateway's engines: --engine, MOIETY_ENGINES, or `engines` in the configuration file"
        yield fail(AREA, "no_engines", "no engine is configured", advice)
    cards: list[tuple[str, ModelCard]] = []
    for address in settings.addresses:
        if is_external(address):
            yield _check_external_engine(address, settings.external_engine_key, timeout_s)
            continue
        places = list(_resolve(address)) if is_name(address) else [address]
        if not places:
            advice = "correct the name; in Kubernetes it is that of the headless Service of the engines' pool"
            yield fail(AREA, "engine_name_unknown", f"{address}: the name does not exist, or has no addresses", advice)
        for place in places:
            found = _ask(place, settings.curve, timeout_s)
            if isinstance(found, ModelCard):
                cards.append((place, found))
                found = ok(AREA, "engine", f"{place}: {found.model} ({found.family}) on {found.device}")
            yield found
    yield from _disagreements(cards)
    yield from _half_pools(cards)


def _resolve(address: str) -> Iterator[str]:
    parts = urlsplit(address)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except OSError:
        return
    for host in sorted({str(one[4][0]) for one in found}):
        yield f"tcp://[{host}]:{parts.port}" if ":" in host else f"tcp://{host}:{parts.port}"


def _ask(address: str, curve: CurveKeys | None, timeout_s: float) -> ModelCard | Finding:
    try:
        greeting = _greet(address, timeout_s)
    except OSError as exc:
        advice = "start the engine, or correct its address or port; a network policy may block the connection"
        return fail(AREA, "engine_away", f"{address}: {exc.strerror or exc}", advice)
    if greeting[SIGNATURE] != b"\xff" or len(greeting) < GREETING_BYTES:
        advice = "correct the port: it is that of `moiety engine --listen`, not of its metrics or of another server"
        return fail(AREA, "not_an_engine", f"{address}: another server, not an engine, listens there", advice)
    wants_curve = greeting[MECHANISM].rstrip(b"\0") == b"CURVE"
    if wants_curve and curve is None:
        advice = "set curve_server_key, curve_public_key and curve_secret_key of the gateway (MOIETY_CURVE_…)"
        return fail(
            AREA, "curve_missing", f"{address}: the engine requires CURVE keys, but the gateway has none", advice
        )
    if curve is not None and not wants_curve:
        advice = "start the engine with --curve-key-file, or remove the gateway's three CURVE keys"
        return fail(AREA, "curve_unwanted", f"{address}: the gateway has CURVE keys, the engine has none", advice)
    return _hello(address, curve, timeout_s)


def _greet(address: str, timeout_s: float) -> bytes:
    """Return the first bytes that the listener sends. Raises OSError."""
    parts = urlsplit(address)
    if parts.scheme == "ipc":
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        place: object = address.removeprefix("ipc://")
    else:
        connection = socket.socket(socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET)
        connection.settimeout(timeout_s)
        place = (parts.hostname, parts.port)
    with connection:
        connection.connect(place)  # type: ignore[arg-type]
        connection.sendall(VERSION)
        received = b""
        try:
            while len(received) < GREETING_BYTES and (more := connection.recv(GREETING_BYTES)):
                received += more
        except TimeoutError:
            pass  # it does not speak first, unlike an engine
        return received


def _hello(address: str, curve: CurveKeys | None, timeout_s: float) -> ModelCard | Finding:
    """Return the model card as a gateway receives it, or a finding."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        if curve is not None:
            dealer.curve_serverkey, dealer.curve_publickey = curve.server_public, curve.client_public
            dealer.curve_secretkey = curve.client_secret
        dealer.connect(address)
        dealer.send(encode(Hello("doctor")))
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0 and dealer.poll(int(left * 1000)):
            try:
                cards = [one for one in decode_to_gateway(dealer.recv()) if isinstance(one, ModelCard)]
            except UndecodableMessage:
                break
            if cards:
                return _of_this_release(address, cards[0])
    if curve is not None:
        advice = (
            "set curve_server_key to the public key of the engine's --curve-key-file (its `engine_ready` line), and "
            "put curve_public_key on the engine's --gateway-keys-file"
        )
        return fail(AREA, "curve_wrong", f"{address}: the engine refuses the gateway's CURVE keys", advice)
    advice = f"run the same release everywhere (here it speaks protocol {PROTOCOL_VERSION}), or restart the engine"
    return fail(
        AREA, "engine_silent", f"{address}: an engine listens, but does not answer the gateway's first message", advice
    )


def _of_this_release(address: str, card: ModelCard) -> ModelCard | Finding:
    """Return the card if a gateway of this release can use the engine, else a finding."""
    if card.protocol_version == PROTOCOL_VERSION:
        return card
    message = f"{address}: the engine speaks protocol {card.protocol_version}, this release {PROTOCOL_VERSION}"
    older = "engine" if card.protocol_version < PROTOCOL_VERSION else "gateway"
    advice = f"run one release of both: bring the {older} up to date, and leave it out until then"
    return fail(AREA, "engine_release", message, advice)


def _check_external_engine(text: str, default_key: str | None, timeout_s: float) -> Finding:
    try:
        address = ExternalAddress.parse(text)
        key = default_key if address.key_file is None else address.key_file.read_text().strip()
        if address.key_env is not None:
            key = os.environ.get(address.key_env)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        if address.protocol is ProviderProtocol.ANTHROPIC:
            headers = VERSION_HEADERS if key is None else VERSION_HEADERS | {"X-Api-Key": key}
        answer = httpx.get(f"{address.base_url}/models", headers=headers, timeout=timeout_s)
        answer.raise_for_status()
        told = answer.json()
        listed = told["data"] if isinstance(told, dict) else told
        names = [str(one.get("id")) for one in listed if isinstance(one, dict)]
    except (OSError, ValueError, KeyError, TypeError, httpx.HTTPError) as exc:
        advice = "start that server, or correct the address, key_file or model in it"
        return fail(AREA, "external_engine_away", f"{text}: {exc}", advice)
    if address.model not in names:
        advice = f"name one of: {', '.join(names)}"
        return fail(AREA, "external_engine_model", f"{address.base_url} does not serve {address.model!r}", advice)
    return ok(AREA, "engine", f"{address.base_url}: {address.model}")


def _disagreements(cards: list[tuple[str, ModelCard]]) -> Iterator[Finding]:
    """Yield engines of one model that requests cannot move between."""
    first: dict[str, tuple[str, ModelCard]] = {}
    for address, card in cards:
        other_address, other = first.setdefault(card.model, (address, card))
        different = [
            said
            for said, field in (
                ("tokenizer", "tokenizer_json"),
                ("chat template", "chat_template"),
                ("vocabulary", "vocab_size"),
                ("context length", "max_context_tokens"),
            )
            if getattr(card, field) != getattr(other, field)
        ]
        if different:
            message = f"{address} and {other_address} both serve {card.model!r} with another {', '.join(different)}"
            advice = "start both with the same checkpoint, or give one another --name"
            yield fail(AREA, "model_mismatch", message, advice)


def _half_pools(cards: list[tuple[str, ModelCard]]) -> Iterator[Finding]:
    """Yield models whose engines only prefill, without an engine that decodes."""
    able = {card.model for _, card in cards if card.role is not EngineRole.PREFILL}
    for model in sorted({card.model for _, card in cards} - able):
        message = f"all engines of {model!r} compute prompts only (--role prefill)"
        yield fail(
            AREA,
            "role_missing",
            message,
            "start an engine that generates answers: moiety engine --role decode, or both",
        )


def local_engine(data_dir: Path) -> tuple[str, ...]:
    """Return the address of the engine of a local serve, if one has run there."""
    place = data_dir.absolute() / "run" / "engine.sock"
    return (f"ipc://{place}",) if place.exists() else ()
