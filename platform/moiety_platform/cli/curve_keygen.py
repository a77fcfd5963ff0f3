"""Command `moiety curve-keygen`: create a pair of CURVE keys for an engine or a gateway."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
import zmq

from moiety_platform.cli.errors import CommandError
from moiety_platform.cli.printing import print_line

OWNER_ONLY = 0o600


def curve_keygen(
    file: Annotated[Path, typer.Argument(help="File for the secret key. The public key is written to FILE.pub.")],
) -> None:
    """Create a CURVE key pair, write both keys to files, and print the public key.

    Only the owner can read the files (mode 0600). Existing files are never overwritten.
    """
    public_file = file.with_name(f"{file.name}.pub")
    public, secret = zmq.curve_keypair()
    _write_new(public_file, public)
    try:
        _write_new(file, secret)
    except CommandError:
        public_file.unlink()
        raise
    print_line(public.decode())


def _write_new(file: Path, key: bytes) -> None:
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
    except FileExistsError as exc:
        raise CommandError(f"{file} exists: keys are not overwritten; choose another name or remove it first") from exc
    except OSError as exc:
        raise CommandError(f"cannot write {file}: {exc.strerror}; choose a directory that can be written") from exc
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(key + b"\n")
