"""The repository contains nothing that looks like a key."""

from __future__ import annotations

import random
import re
import secrets
import string
import subprocess
from collections import Counter
from collections.abc import Iterator
from math import log2
from pathlib import Path

import pytest

from moiety_platform.auth.keys import generate_key

ROOT = Path(__file__).parents[2]
KINDS = {
    "a private key": re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+([A-Za-z0-9+/=\s]{64})"),
    "a key of ours": re.compile(rb"\bmty_[A-Za-z0-9]{16}\.([A-Za-z0-9]{32})"),
    "a key of a cloud": re.compile(rb"\b(?:AKIA|ASIA)([0-9A-Z]{16})\b|\bAIza([0-9A-Za-z_-]{35})"),
    "a token of a forge": re.compile(rb"\bgh[pousr]_([A-Za-z0-9]{36})|\bglpat-([\w-]{20})|\bhf_([A-Za-z]{34})\b"),
    "a token of a registry": re.compile(rb"\bpypi-([A-Za-z0-9_-]{50,})|\bnpm_([A-Za-z0-9]{36})\b"),
    "a key of a model's vendor": re.compile(rb"\bsk-(?:proj-|ant-[a-z0-9]+-)?([A-Za-z0-9_-]{32,})"),
    "a signed token": re.compile(rb"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.([\w-]{20,})"),
    "an address with a password": re.compile(rb"\b[a-z][a-z0-9+]{2,}://[\w.-]+:([A-Za-z0-9%+/_-]{16,})@"),
    "a secret that is set": re.compile(
        rb"(?i)(?:password|passwd|secret|token|api_?key|pepper)[\"']?\s*[:=]\s*[\"']?([A-Za-z0-9+/_-]{24,})={0,2}(?![\w.(\[])"
    ),
}
MIN_BITS = 3.4  # a character: names, words and a digit again and again have less, 24 random hexadecimal digits more
NEWLINE = b"\n"
NEVER_READ = {".png", ".safetensors", ".ttf", ".woff2"}


def findings(text: bytes) -> Iterator[str]:
    for kind, pattern in KINDS.items():
        for found in pattern.finditer(text):
            value = next(group for group in found.groups() if group)
            if _bits(value) >= MIN_BITS and any(char in b"0123456789" for char in value):
                yield f"{kind} in line {text[: found.start()].count(NEWLINE) + 1}"


def _bits(value: bytes) -> float:
    """Return Shannon's entropy of the characters, in bits."""
    return -sum(count / len(value) * log2(count / len(value)) for count in Counter(value).values())


def test_no_file_of_the_repository_holds_what_looks_like_a_secret() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = [name for name in listed.split("\0") if name and Path(name).suffix not in NEVER_READ]
    assert len(names) > 500
    found = {name: list(findings((ROOT / name).read_bytes())) for name in names if (ROOT / name).is_file()}
    assert {name: kinds for name, kinds in found.items() if kinds} == {}


def random_text(length: int, letters: str = string.ascii_letters + string.digits) -> str:
    return "".join(secrets.choice(letters) for _ in range(length - 1)) + "7"


def random_hex(repeats: int) -> str:
    """Every hexadecimal digit equally often, in random order: drawn digit by digit, one text in some hundred has too
    few different ones to be found."""
    return "".join(random.SystemRandom().sample("0123456789abcdef" * repeats, 16 * repeats))


PLANTED = {
    "a private key": lambda: f"-----BEGIN EC {'PRIVATE'} KEY-----\n{random_text(64)}",
    "a key of ours": lambda: f'key = "{generate_key().text}"',
    "a key of a cloud": lambda: f"AKIA{'Q3ZT7WXB2KLM9PVN'}",
    "a token of a forge": lambda: f"ghp_{random_text(36)}",
    "a token of a registry": lambda: f"pypi-{random_text(80)}",
    "a key of a model's vendor": lambda: f"sk-proj-{random_text(48)}",
    "a signed token": lambda: f"eyJ{random_text(20)}.eyJ{random_text(40)}.{random_text(43)}",
    "an address with a password": lambda: f"postgresql://moiety:{random_hex(2)}@db/moiety",
    "a secret that is set": lambda: f"pepper: {random_hex(4)}",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_secret_of_each_kind_would_be_found(kind: str) -> None:
    text = f"first line\n{PLANTED[kind]()}\n"
    assert f"{kind} in line 2" in list(findings(text.encode()))


def test_names_places_and_expressions_are_no_secrets() -> None:
    text = b"""token = settings.traces_token.get_secret_value()
password: ${MOIETY_DATABASE_PASSWORD:-moiety}
postgresql://USER:PASSWORD@HOST/NAME
secret = "x" * 40
key_pepper="a long text that nobody else knows"
"""
    assert list(findings(text)) == []
