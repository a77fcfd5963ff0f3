"""PostgreSQL connection URLs by libpq's rules, for both drivers: asyncpg, which serves, and psycopg, which migrates.

Pure; imports no driver. A parameter that asyncpg does not support is refused by name, never sent to the server as an
unknown setting. Grammar: https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-CONNSTRING-URIS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
SESSIONS = ("any", "read-write", "read-only", "primary", "standby", "prefer-standby")
SYSTEM_CERTIFICATES = "system"

_URI = re.compile(
    r"(?:(?P<user>[^:@/]*)(?::(?P<password>[^@/]*))?@)?(?P<hosts>[^/?]*)(?:/(?P<database>[^?]*))?(?:\?(?P<query>.*))?",
    re.DOTALL,
)
_HOST = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\[\]]*))(?::(?P<port>\d*))?")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})|%00")

_TLS_PARAMETERS = frozenset(
    {"sslmode", "sslcert", "sslkey", "sslpassword", "sslrootcert", "sslcrl", "sslnegotiation"}
) | {
    "ssl_min_protocol_version",
    "ssl_max_protocol_version",
}
_LOGIN_PARAMETERS = frozenset({"passfile", "krbsrvname"})
_SESSION_PARAMETERS = frozenset({"application_name", "fallback_application_name", "options"})
_HOST_PARAMETERS = frozenset({"connect_timeout", "target_session_attrs", "load_balance_hosts"})
# Detection of a dead peer, which asyncpg does not support: each statement of a gateway has a time limit instead.
_SOCKET_PARAMETERS = frozenset(
    {"keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout"}
)
_SUPPORTED_PARAMETERS = (
    _TLS_PARAMETERS | _LOGIN_PARAMETERS | _SESSION_PARAMETERS | _HOST_PARAMETERS | _SOCKET_PARAMETERS
)

# Parameters of libpq that asyncpg does not implement, with the values that require nothing of it.
_IGNORED_PARAMETERS: dict[str, tuple[str, ...]] = {
    "channel_binding": ("disable", "prefer"),
    "client_encoding": ("auto", "utf8", "utf-8", "unicode"),
    "gssdelegation": ("0",),
    "gssencmode": ("disable", "prefer"),
    "max_protocol_version": ("3.0", "latest"),
    "min_protocol_version": ("3.0",),
    "sslcertmode": ("allow",),
    "sslcompression": ("0",),
    "sslsni": ("1",),
}

# Parameters that tell drivers of a pooler in front of the server, with the values that say so. They belong to the
# drivers, not to the server.
_POOLED_WHEN: dict[str, tuple[str, ...]] = {
    "pgbouncer": ("true", "1", "yes", "on"),
    "pool_mode": ("transaction",),
    "preparethreshold": ("0",),
    "prepare_threshold": ("0", "none"),
    "prepared_statement_cache_size": ("0",),
    "prepared_statements": ("false", "0", "no", "off"),
    "statement_cache_size": ("0",),
}


class BadPostgresUrl(ValueError):
    """The URL is malformed, or requires what a driver does not support; the message says which part, and what to do."""


@dataclass(frozen=True, slots=True)
class PostgresUrl:
    """Parsed PostgreSQL connection URL.

    `hosts` is empty if the drivers' default applies; a port is None if theirs does. `is_pooled` says that the URL
    itself declares a pooler in transaction mode.
    """

    hosts: tuple[tuple[str, int | None], ...] = ()
    user: str | None = None
    password: str | None = None
    database: str | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    is_pooled: bool = False

    @property
    def connect_timeout_s(self) -> float | None:
        """Return the connect timeout per host; None if the URL gives none, infinity for a wait without limit."""
        given = self.parameters.get("connect_timeout")
        if given is None:
            return None
        return float(given) if int(given) > 0 else float("inf")

    @property
    def session_role(self) -> str:
        """Return the required session type, one of SESSIONS."""
        return self.parameters.get("target_session_attrs", "any")

    @property
    def server_settings(self) -> dict[str, str]:
        """Return the session settings that are sent to the server at the start of the session."""
        settings = {}
        name = self.parameters.get("application_name") or self.parameters.get("fallback_application_name")
        if name:
            settings["application_name"] = name
        if "options" in self.parameters:
            settings["options"] = self.parameters["options"]
        return settings

    @property
    def trusts_system(self) -> bool:
        """Return whether the server's certificate is checked against the system's certificate authorities."""
        return self.parameters.get("sslrootcert") == SYSTEM_CERTIFICATES

    def tls_and_login(self) -> dict[str, str]:
        """Return the TLS and login parameters that asyncpg accepts under libpq's names."""
        of_context = {"sslmode", "sslrootcert"} if self.trusts_system else set()
        return {
            name: self.parameters[name]
            for name in (_TLS_PARAMETERS | _LOGIN_PARAMETERS) - of_context
            if name in self.parameters
        }

    def to_libpq(self, scheme: str = "postgresql") -> str:
        """Return the URL with only libpq's parameters."""
        query = {name: value for name, value in self.parameters.items() if value}
        netloc = _userinfo(self.user, self.password)
        if len(self.hosts) == 1 and not self.hosts[0][0].startswith("/"):
            netloc += _netloc(*self.hosts[0])
        elif self.hosts:
            query["host"] = ",".join(host for host, _ in self.hosts)
            if any(port is not None for _, port in self.hosts):
                query["port"] = ",".join("" if port is None else str(port) for _, port in self.hosts)
        database = "" if self.database is None else "/" + quote(self.database, safe="")
        return f"{scheme}://{netloc}{database or '/'}" + _query(query)


def parse_postgres_url(uri: str) -> PostgresUrl:
    """Parse a URL, of which `uri` is the part after `://`. Raises BadPostgresUrl."""
    found = _URI.fullmatch(uri)
    if found is None:
        raise BadPostgresUrl("write it as postgresql://user:password@host:5432/database?name=value")
    given = _read_query(found["query"] or "")
    hosts = _hosts(found["hosts"], given.pop("host", None), given.pop("port", None))
    is_pooled = _take_pooler_switches(given)
    _use_modes_of_ssl(given)
    parameters = {
        "user": given.pop("user", _decode(found["user"])),
        "password": given.pop("password", _decode(found["password"])),
        "database": given.pop("dbname", _decode(found["database"])),
    }
    given = {name: value for name, value in given.items() if value}
    for name, value in given.items():
        _check(name, value)
    if given.get("sslrootcert") == SYSTEM_CERTIFICATES:
        if given.setdefault("sslmode", "verify-full") != "verify-full":
            raise BadPostgresUrl("sslrootcert=system needs sslmode=verify-full, as libpq says")
        if given.keys() & {"sslcrl", "sslnegotiation"}:
            raise BadPostgresUrl(
                "sslrootcert=system cannot be combined with sslcrl or sslnegotiation; name a file instead"
            )
    filled = {name: value or None for name, value in parameters.items()}
    return PostgresUrl(hosts, filled["user"], filled["password"], filled["database"], given, is_pooled)


def asyncpg_dsn(url: PostgresUrl, host: str | None, port: int | None) -> str:
    """Return the URL of one host for asyncpg, without the server settings and the system's certificate authorities."""
    query = url.tls_and_login()
    netloc = _userinfo(url.user, url.password)
    if host is not None and host.startswith("/"):
        query["host"] = host
        if port is not None:
            query["port"] = str(port)
    elif host is not None:
        netloc += _netloc(host, port)
    elif port is not None:
        query["port"] = str(port)
    database = "" if url.database is None else quote(url.database, safe="")
    return f"postgresql://{netloc}/{database}" + _query(query)


def _read_query(text: str) -> dict[str, str]:
    given = {}
    for pair in text.split("&") if text else ():
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise BadPostgresUrl(f"the parameter {pair!r} has no value; write name=value")
        given[_decoded(name)] = _decoded(value)
    return given


def _hosts(authority: str, named: str | None, ports: str | None) -> tuple[tuple[str, int | None], ...]:
    """Return the hosts and ports of the authority, unless the parameters `host` and `port` override them."""
    found: list[tuple[str, int | None]] = []
    for part in authority.split(","):
        match = _HOST.fullmatch(part)
        if "@" in part:
            raise BadPostgresUrl("there is more than one '@'; write %40 for one in the user's name or the password")
        if match is None:
            raise BadPostgresUrl(f"the host {part!r} cannot be read; write host:port, or [address]:port for IPv6")
        found.append((_decoded(match["v6"] or match["host"]), _port(match["port"])))
    if named is not None:
        names = named.split(",")
        by_place = [port for _, port in found]
        if len(by_place) not in (1, len(names)):
            raise BadPostgresUrl(f"{len(by_place)} ports are given for {len(names)} hosts; give one, or one for each")
        found = list(zip(names, by_place * len(names) if len(by_place) == 1 else by_place, strict=True))
    if ports is not None:
        each = [_port(port) for port in ports.split(",")]
        if len(each) not in (1, len(found)):
            raise BadPostgresUrl(f"{len(each)} ports are given for {len(found)} hosts; give one, or one for each")
        found = [(host, each[i] if len(each) > 1 else each[0]) for i, (host, _) in enumerate(found)]
    if any(not host for host, _ in found) and len(found) > 1:
        raise BadPostgresUrl("one of several hosts is empty; name each host")
    return () if found == [("", None)] else tuple(found)


def _port(text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise BadPostgresUrl(f"the port {text!r} is not valid; give a number from 1 to 65535")
    return int(text)


def _take_pooler_switches(given: dict[str, str]) -> bool:
    """Remove the pooler switches from `given`; return whether one of them declares a pooler."""
    is_pooled = False
    for name in [name for name in given if name.lower() in _POOLED_WHEN]:
        is_pooled |= given.pop(name).lower() in _POOLED_WHEN[name.lower()]
    return is_pooled


def _use_modes_of_ssl(given: dict[str, str]) -> None:
    """Translate `ssl`, which JDBC (true) and asyncpg (a mode) use for `sslmode`."""
    mode = given.pop("ssl", "")
    if mode:
        of_switch = {"true": "require", "1": "require", "false": "disable", "0": "disable"}
        given.setdefault("sslmode", of_switch.get(mode, mode))


def _check(name: str, value: str) -> None:
    if name in _IGNORED_PARAMETERS:
        if value.lower() not in _IGNORED_PARAMETERS[name]:
            allowed = " or ".join(_IGNORED_PARAMETERS[name])
            raise BadPostgresUrl(f"{name}={value} is not available with asyncpg; leave {name} out, or give {allowed}")
    elif name not in _SUPPORTED_PARAMETERS:
        raise BadPostgresUrl(f"the parameter {name!r} is not supported; leave it out")
    elif name == "sslmode" and value not in MODES:
        raise BadPostgresUrl(f"sslmode={value} is unknown; give one of {', '.join(MODES)}")
    elif name == "target_session_attrs" and value not in SESSIONS:
        raise BadPostgresUrl(f"target_session_attrs={value} is unknown; give one of {', '.join(SESSIONS)}")
    elif name == "load_balance_hosts" and value not in ("disable", "random"):
        raise BadPostgresUrl(f"load_balance_hosts={value} is unknown; give disable or random")
    elif name == "connect_timeout" and not re.fullmatch(r"-?\d+", value):
        raise BadPostgresUrl(f"connect_timeout={value} is not a whole number of seconds")


def _userinfo(user: str | None, password: str | None) -> str:
    if user is None and password is None:
        return ""
    secret = "" if password is None else ":" + quote(password, safe="")
    return quote(user or "", safe="") + secret + "@"


def _netloc(host: str, port: int | None) -> str:
    name = f"[{host}]" if ":" in host else quote(host, safe="")
    return name if port is None else f"{name}:{port}"


def _query(parameters: Mapping[str, str]) -> str:
    pairs = "&".join(f"{name}={quote(value, safe='/:')}" for name, value in parameters.items())
    return f"?{pairs}" if pairs else ""


def _decode(text: str | None) -> str | None:
    return None if text is None else _decoded(text)


def _decoded(text: str) -> str:
    wrong = _BAD_ESCAPE.search(text)
    if wrong is not None:
        raise BadPostgresUrl(f"{wrong[0]!r} is not a valid percent escape; write %25 for a percent sign")
    return unquote(text)
