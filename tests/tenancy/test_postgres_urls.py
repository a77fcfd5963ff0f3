"""PostgreSQL's URLs as libpq reads them, for both drivers."""

from __future__ import annotations

from pathlib import Path

import psycopg.conninfo
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import free_port

from moiety_platform.db.connection_errors import NoConnection
from moiety_platform.db.postgres_url import asyncpg_dsn, parse_postgres_url
from moiety_platform.db.session import Database
from moiety_platform.db.url import postgres_url, to_libpq_url, to_sync_url
from moiety_platform.db.url_errors import BadDatabaseUrl
from moiety_platform.errors import Unavailable

from .conftest import CuttableStore

words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=8)
hosts = st.sampled_from(["db", "10.0.0.1", "[::1]", "a.example", "%2Frun%2Fpg"])
ports = st.sampled_from(["", ":5433", ":6432"])


def percent(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode())


@given(
    user=words,
    password=words,
    authority=st.lists(st.tuples(hosts, ports), min_size=1, max_size=3),
    database=words,
    name=words,
    options=words,
)
def test_every_part_is_read_as_libpq_reads_it(
    user: str, password: str, authority: list[tuple[str, str]], database: str, name: str, options: str
) -> None:
    where = ",".join(host + port for host, port in authority)
    url = f"postgresql://{percent(user)}:{percent(password)}@{where}/{percent(database)}"
    url += f"?application_name={percent(name)}&connect_timeout=3&sslmode=prefer&options={percent(options)}"
    by_libpq = psycopg.conninfo.conninfo_to_dict(url)
    found = postgres_url(url)
    assert (found.user, found.password, found.database) == tuple(
        by_libpq[part] for part in ("user", "password", "dbname")
    )
    assert [host for host, _ in found.hosts] == str(by_libpq["host"]).split(",")
    assert ["" if port is None else str(port) for _, port in found.hosts] == str(by_libpq.get("port", "")).split(",")
    assert found.server_settings == {"application_name": name, "options": options}
    assert (
        psycopg.conninfo.conninfo_to_dict(to_libpq_url(url)).items()
        >= {key: value for key, value in by_libpq.items() if key != "port" or str(value).strip(",")}.items()
    )


@given(user=words, password=words, database=words)
def test_the_migrations_url_says_the_same(user: str, password: str, database: str) -> None:
    url = sa.make_url(to_sync_url(f"postgresql://{percent(user)}:{percent(password)}@db:5/{percent(database)}"))
    assert (url.username, url.password, url.host, url.port, url.database) == (user, password, "db", 5, database)


@pytest.mark.parametrize(
    "switch",
    [
        "pgbouncer=true",
        "prepareThreshold=0",
        "prepare_threshold=None",
        "statement_cache_size=0",
        "prepared_statement_cache_size=0",
        "prepared_statements=false",
        "pool_mode=transaction",
    ],
)
def test_a_poolers_switch_is_understood_and_sent_to_no_server(switch: str) -> None:
    found = postgres_url(f"postgresql://h/d?{switch}&sslmode=require")
    assert found.is_pooled
    assert switch.split("=", maxsplit=1)[0] not in found.to_libpq() + asyncpg_dsn(found, "h", None)
    assert not postgres_url("postgresql://h/d?pgbouncer=false&statement_cache_size=100").is_pooled


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("currentSchema=x", "the parameter 'currentSchema' is not supported"),
        ("channel_binding=require", "channel_binding=require is not available with asyncpg"),
        ("gssencmode=require", "gssencmode=require is not available"),
        ("sslmode=on", "sslmode=on is unknown; give one of disable, allow"),
        ("ssl=perhaps", "sslmode=perhaps is unknown"),
        ("target_session_attrs=best", "target_session_attrs=best is unknown"),
        ("connect_timeout=soon", "connect_timeout=soon is not a whole number"),
        ("sslrootcert=system&sslmode=require", "sslrootcert=system needs sslmode=verify-full"),
        ("application_name", "the parameter 'application_name' has no value"),
        ("application_name=%zz", "'%' is not a valid percent escape"),
        ("host=a,b&port=1,2,3", "3 ports are given for 2 hosts"),
        ("port=70000", "the port '70000' is not valid"),
        ("requirepeer=postgres", "'requirepeer' is not supported"),
        ("service=main", "'service' is not supported"),
        ("sslrootcert=/no/such/ca.pem", "sslrootcert=/no/such/ca.pem of the database's URL cannot be read"),
    ],
)
def test_parameters_that_a_driver_does_not_support_are_refused_by_name(query: str, told: str) -> None:
    with pytest.raises(BadDatabaseUrl) as caught:
        Database.open(f"postgresql://u:s3cret@h/d?{query}")
    assert told in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_password_with_an_at_sign_is_refused_and_not_shown() -> None:
    with pytest.raises(BadDatabaseUrl, match="write %40") as caught:
        Database.open("postgresql://u:pa@s3cret@h/d")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("mode", ["disable", "allow", "prefer", "require"])
async def test_the_modes_of_tls_are_those_of_libpq(cuttable: CuttableStore, mode: str) -> None:
    database = Database.open(f"postgresql://postgres@127.0.0.1:{cuttable.wire.port}/migrated?sslmode={mode}")
    if mode == "require":  # which the server here does not offer
        with pytest.raises(Unavailable) as caught:
            await database.ping()
        assert "rejected SSL upgrade" in str(caught.value.__cause__)
    else:
        await database.ping()
    await database.close()


@pytest.mark.parametrize("mode", ["verify-ca", "verify-full"])
def test_a_certificate_is_checked_against_the_file_that_the_url_names(mode: str, tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    authority.write_text("none")
    found = postgres_url(f"postgresql://h/d?sslmode={mode}&sslrootcert={authority}")
    assert found.tls_and_login() == {"sslmode": mode, "sslrootcert": str(authority)}
    assert "sslrootcert" not in postgres_url("postgresql://h/d?sslrootcert=system").tls_and_login()


async def test_settings_of_the_session_reach_the_server(clean_postgres: str) -> None:
    options = "application_name=a%20b&connect_timeout=4&options=-c%20statement_timeout%3D1234%20-csearch_path%3Dpublic"
    database = Database.open(f"{clean_postgres}&{options}")
    async with database.read() as session:
        for name, value in (("application_name", "a b"), ("statement_timeout", "1234ms"), ("search_path", "public")):
            assert await session.scalar(sa.select(sa.func.current_setting(name))) == value
    await database.close()
    with psycopg.connect(to_libpq_url(f"{clean_postgres}&{options}")) as connection:
        assert connection.execute("SHOW search_path").fetchone() == ("public",)


async def test_a_host_that_is_away_is_passed_over(cuttable: CuttableStore) -> None:
    gone, there = free_port(), cuttable.wire.port
    url = f"postgresql://postgres@127.0.0.1:{gone},127.0.0.1:{there}/migrated?target_session_attrs="
    for wanted in ("any", "read-write", "primary", "prefer-standby"):
        database = Database.open(url + wanted)
        await database.ping()
        await database.close()
    database = Database.open(url + "standby")
    with pytest.raises(Unavailable) as caught:
        await database.ping()
    assert isinstance(caught.value.__cause__, NoConnection)
    assert "no host is standby" in str(caught.value.__cause__)
    await database.close()


def test_asyncpg_is_given_a_host_as_it_reads_it() -> None:
    found = parse_postgres_url("u%40x:p%2F@[::1]:6432/d%3F?sslcert=/a%20b.crt")
    assert asyncpg_dsn(found, *found.hosts[0]) == "postgresql://u%40x:p%2F@[::1]:6432/d%3F?sslcert=/a%20b.crt"
    assert asyncpg_dsn(found, "/run/pg", 5433) == (
        "postgresql://u%40x:p%2F@/d%3F?sslcert=/a%20b.crt&host=/run/pg&port=5433"
    )
