"""Keys as text and hash."""

from __future__ import annotations

import re
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.auth.keys import (
    ID_LENGTH,
    SECRET_LENGTH,
    KeyText,
    derive_cache_salt,
    generate_key,
    hash_key,
    hashes_match,
    parse_key,
)
from moiety_platform.auth.pepper import BadPepper, resolve_pepper

BASE62 = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

key_texts = st.builds(
    KeyText,
    key_id=st.text(BASE62, min_size=ID_LENGTH, max_size=ID_LENGTH),
    secret=st.text(BASE62, min_size=SECRET_LENGTH, max_size=SECRET_LENGTH),
)


@given(key_texts)
def test_a_key_is_parsed_from_what_it_is_written_as(key: KeyText) -> None:
    assert parse_key(key.text) == key


@given(st.one_of(st.text(), key_texts.map(lambda key: key.text + "\n"), key_texts.map(lambda key: " " + key.text)))
def test_keys_round_trip_through_parsing_and_invalid_ones_are_refused(text: str) -> None:
    key = parse_key(text)
    assert key is None or key.text == text


@given(key_texts, st.integers(0, 200), st.characters())
def test_one_changed_character_changes_the_hash_or_breaks_the_form(key: KeyText, at: int, char: str) -> None:
    at %= len(key.text)
    changed = key.text[:at] + char + key.text[at + 1 :]
    parsed = parse_key(changed)
    if changed != key.text and parsed is not None:
        assert not hashes_match(hash_key(parsed, b"pepper"), hash_key(key, b"pepper"))


@given(key_texts, st.binary(min_size=1, max_size=64), st.binary(min_size=1, max_size=64))
def test_the_hash_depends_on_the_pepper(key: KeyText, one: bytes, other: bytes) -> None:
    same = one.ljust(64, b"\0") == other.ljust(64, b"\0")  # HMAC pads its key with zeros
    assert hashes_match(hash_key(key, one), hash_key(key, other)) == same


def test_generated_keys_have_the_promised_form_and_differ() -> None:
    keys = [generate_key() for _ in range(500)]
    assert all(re.fullmatch(r"mty_[A-Za-z0-9]{16}\.[A-Za-z0-9]{32}", key.text) for key in keys)
    assert len({key.key_id for key in keys}) == len({key.secret for key in keys}) == 500


def test_a_key_in_a_log_shows_no_secret() -> None:
    key = generate_key()
    assert key.secret not in repr(key)
    assert key.secret not in f"{key}"


def test_each_tenant_has_a_cache_salt_of_its_own_that_the_pepper_hides() -> None:
    assert derive_cache_salt("a", b"p" * 32) == derive_cache_salt("a", b"p" * 32)
    assert derive_cache_salt("a", b"p" * 32) != derive_cache_salt("b", b"p" * 32)
    assert derive_cache_salt("a", b"p" * 32) != derive_cache_salt("a", b"q" * 32)


def test_the_pepper_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    made = resolve_pepper(None, tmp_path / "data")
    assert len(made) >= 32
    assert resolve_pepper(None, tmp_path / "data") == made
    assert stat.S_IMODE((tmp_path / "data" / "pepper").stat().st_mode) == 0o600
    assert resolve_pepper("x" * 40, tmp_path / "data") == b"x" * 40


def test_starts_at_the_same_time_agree_on_one_pepper(tmp_path: Path) -> None:
    found: list[bytes] = []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait()
        found.append(resolve_pepper(None, tmp_path))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["pepper"]


def test_a_weak_pepper_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadPepper, match="at least 16 random ones"):
        resolve_pepper("short", tmp_path)
