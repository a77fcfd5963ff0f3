"""`moiety doctor` on what speaks HTTP: faults that are planted are found, and its advice mends."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pydantic import SecretStr
from tests.conftest import free_port

from moiety_platform.cli.doctor.command import run_doctor
from moiety_platform.clock import SystemClock

from .conftest import TOKEN, Fault, Heals, complaints, each_fault, run_trace_store
from .test_store import ClockAhead


async def gateway_at_another_port(world: Any) -> AsyncIterator[Any]:
    broken = replace(world.patient, admin_key=None)
    yield replace(broken, url=f"http://127.0.0.1:{free_port()}")
    yield broken


async def administrators_key_that_is_unknown(world: Any) -> AsyncIterator[Any]:
    yield world.patient  # the store of this deployment, which is not that gateway's
    yield replace(world.patient, admin_key=world.gateway.admin_key)


async def gateway_without_engines(world: Any) -> AsyncIterator[Any]:
    world.gateway.engine.die()
    patient = replace(world.patient, admin_key=None)
    yield patient
    await world.gateway.engine.start()
    yield patient


async def trace_store_that_is_not_there(world: Any) -> AsyncIterator[Any]:
    port = free_port()
    patient = world.changed(traces_endpoint=f"http://127.0.0.1:{port}/otlp", traces_token=SecretStr(TOKEN))
    yield patient
    await world.stack.enter_async_context(run_trace_store(patient.settings.data_dir, port=port))
    yield patient


async def trace_store_with_another_token(world: Any) -> AsyncIterator[Any]:
    folder = world.patient.settings.data_dir
    endpoint = await world.stack.enter_async_context(run_trace_store(folder))
    yield world.changed(traces_endpoint=endpoint, traces_token=SecretStr("another token of gateways"))
    yield world.changed(traces_endpoint=endpoint, traces_token=SecretStr(TOKEN))


async def trace_store_of_a_running_gateway_that_is_not_there(world: Any) -> AsyncIterator[Any]:
    """The trace store of `moiety serve` is in the settings of its gateway only."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}/otlp"
    async with settings_page({"traces_endpoint": endpoint}) as url:
        patient = replace(world.patient, url=url)
        yield patient
        await world.stack.enter_async_context(run_trace_store(world.patient.settings.data_dir, port=port))
        yield patient


@asynccontextmanager
async def settings_page(values: dict[str, str]) -> AsyncIterator[str]:
    """Serve the settings of a gateway that has these values."""
    rows = [{"name": name, "value": value, "origin": "environment"} for name, value in values.items()]
    body = json.dumps({"file": None, "data": rows}).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    async with serving(f"{head}Connection: close\r\n\r\n".encode() + body) as url:
        yield url


async def test_what_the_running_gateway_has_is_not_called_unconfigured(world: Any) -> None:
    endpoint = await world.stack.enter_async_context(run_trace_store(world.patient.settings.data_dir))
    async with settings_page({"traces_endpoint": endpoint, "oidc_issuer": "http://127.0.0.1:1/issuer"}) as url:
        found = await run_doctor(replace(world.patient, url=url, only=frozenset({"traces", "login"})), world.clock)
    told = {one.area: one for one in found}
    assert told["traces"].found == f"the running gateway sends traces to {endpoint}, which is ready"
    assert told["login"].code == "issuer_away"


async def port_that_another_program_has(world: Any) -> AsyncIterator[Any]:
    broken = replace(world.patient, admin_key=None)
    async with serving(b"SSH-2.0-OpenSSH_9.2\r\n") as url:
        yield replace(broken, url=url)
    yield broken


async def clock_of_this_machine_that_runs_ahead(world: Any) -> AsyncIterator[Any]:
    world.clock = ClockAhead()
    yield replace(world.patient, admin_key=None)
    world.clock = SystemClock()
    yield replace(world.patient, admin_key=None)


@asynccontextmanager
async def serving(*answers: Any, tls: bool | None = None) -> AsyncIterator[str]:
    """Serve the first of the answers that matches a connection's first line; yield the server's address. An answer is
    (path, body), or bytes for any line. In a body {url} stands for the address."""
    url = ""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            line = await reader.readline()
            for one in answers:
                if isinstance(one, bytes):
                    writer.write(one)
                elif line.split(b" ")[1] == one[0].encode():
                    body = one[1].replace("{url}", url).encode()
                    writer.write(
                        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
                    )
            await writer.drain()
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls)
    url = f"http{'s' if tls else ''}://localhost:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield url


CONFIGURATION = "/.well-known/openid-configuration"
ISSUER = (CONFIGURATION, '{"issuer": "{url}", "jwks_uri": "{url}/keys"}')
KEY = jwt.algorithms.ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP256R1()).public_key(), as_dict=True)
KEYS = ("/keys", json.dumps({"keys": [{**KEY, "kid": "one"}]}))


def login_by(world: Any, url: str) -> Any:
    return world.changed(oidc_issuer=url, oidc_audience="moiety")


async def issuer_that_is_away(world: Any) -> AsyncIterator[Any]:
    yield login_by(world, f"http://localhost:{free_port()}")
    async with serving(ISSUER, KEYS) as url:
        yield login_by(world, url)


async def issuer_under_another_name(world: Any) -> AsyncIterator[Any]:
    async with serving(ISSUER, KEYS) as url:
        yield login_by(world, f"{url}/")
        yield login_by(world, url)


async def issuer_without_a_key(world: Any) -> AsyncIterator[Any]:
    async with serving(ISSUER, ("/keys", '{"keys": []}')) as url:
        yield login_by(world, url)
    async with serving(ISSUER, KEYS) as url:
        yield login_by(world, url)


async def issuer_of_an_authority_of_ones_own(world: Any) -> AsyncIterator[Any]:
    certificate, tls = own_authority(world.patient.settings.data_dir)
    async with serving(ISSUER, KEYS, tls=tls) as url:
        advice: Any = yield login_by(world, url)
        assert "SSL_CERT_FILE" in advice.advice
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("SSL_CERT_FILE", str(certificate))
            yield login_by(world, url)


def own_authority(folder: Path) -> tuple[Any, ...]:
    """Return the file of a self-signed certificate for localhost, and a server's context with it."""
    key, name = (
        ec.generate_private_key(ec.SECP256R1()),
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")]),
    )
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    made = builder.sign(key, hashes.SHA256())
    certificate, private = folder / "certificate.pem", folder / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, *plain))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, private)
    return certificate, tls


async def address_with_more_than_its_end(world: Any) -> AsyncIterator[Any]:
    folder = world.patient.settings.data_dir
    endpoint = await world.stack.enter_async_context(run_trace_store(folder))
    token = SecretStr(TOKEN)
    yield world.changed(traces_endpoint=f"{endpoint}/v1", traces_token=token)
    yield world.changed(traces_endpoint=endpoint, traces_token=token)


async def dashboard_that_is_not_there(world: Any) -> AsyncIterator[Any]:
    yield replace(world.patient, dashboard=f"http://localhost:{free_port()}")
    async with serving(("/_stcore/health", "ok")) as url:
        yield replace(world.patient, dashboard=url)


@each_fault(
    {
        "gateway": {
            gateway_at_another_port: "gateway_away",
            port_that_another_program_has: "not_a_gateway",
            clock_of_this_machine_that_runs_ahead: "clock_skew",
            administrators_key_that_is_unknown: "admin_key_refused",
            gateway_without_engines: "not_ready",
        },
        "login": {
            issuer_that_is_away: "issuer_away",
            issuer_under_another_name: "issuer_other",
            issuer_without_a_key: "issuer_keys",
            issuer_of_an_authority_of_ones_own: "issuer_certificate",
        },
        "traces": {
            trace_store_that_is_not_there: "traces_away",
            trace_store_with_another_token: "traces_token",
            address_with_more_than_its_end: "traces_refuse",
        },
        "dashboard": {
            dashboard_that_is_not_there: "dashboard_away",
        },
    }
)
async def test_advice_mends_a_planted_fault(heals: Heals, area: str, fault: Fault, code: str) -> None:
    assert await heals(fault, area) == ([code], [])


async def test_doctor_reports_nothing_about_healthy_services(world: Any) -> None:
    endpoint = await world.stack.enter_async_context(run_trace_store(world.patient.settings.data_dir))
    engines = (await world.engine(), "dns+" + await world.engine())
    patient = world.changed(engines=engines, traces_endpoint=endpoint, traces_token=SecretStr(TOKEN))
    for area in ("store", "engines", "login", "traces"):
        assert await complaints(world, patient, area) == []
    well = replace(patient, admin_key=world.gateway.admin_key)
    assert await complaints(world, well, "gateway") == []
