"""Replacement of the PostgreSQL image's entry point: it creates a database if there is none, and becomes the server."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path


def main(environment: Mapping[str, str]) -> None:
    """Create the database if needed and become the server; it never returns."""
    data = Path(environment["PGDATA"])
    user, name = environment["POSTGRES_USER"], environment["POSTGRES_DB"]
    if not (data / "PG_VERSION").exists():
        with tempfile.NamedTemporaryFile("w") as password:
            password.write(environment["POSTGRES_PASSWORD"])
            password.flush()
            words = ["initdb", "-D", str(data), "-U", user, "--pwfile", password.name, "--auth=scram-sha-256"]
            subprocess.run(words, check=True)
        single = ["postgres", "--single", "-D", str(data), "postgres"]
        subprocess.run(single, input=f'CREATE DATABASE "{name}";\n', text=True, check=True)
        with (data / "pg_hba.conf").open("a") as access:
            access.write("host all all all scram-sha-256\n")
    data.chmod(0o700)
    os.execvp("postgres", ["postgres", "-D", str(data), "-c", "listen_addresses=*"])


if __name__ == "__main__":
    main(os.environ)
