"""Sizes in bytes as texts."""

from __future__ import annotations

import pytest
import typer
from hypothesis import given
from hypothesis.strategies import integers

from moiety_options.sizes import format_size, parse_size, size_parser


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1500", 1500),
        (1501, 1501),
        ("2K", 2048),
        ("2KB", 2000),
        ("1.5GiB", 3 << 29),
        ("4 gb", 4 * 10**9),
        ("1TiB", 1 << 40),
        ("7B", 7),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str | int, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "G", "-1", "4X", "1e9"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="4GiB"):
        parse_size(text)


@given(integers(0, 1 << 50))
def test_a_formatted_size_is_read_as_the_same_number(num_bytes: int) -> None:
    assert parse_size(format_size(num_bytes)) == num_bytes


def test_a_size_below_the_least_one_is_refused_with_the_least_one() -> None:
    parse = size_parser(4096)
    assert parse("4KiB") == parse(4096) == 4096
    with pytest.raises(typer.BadParameter, match="at least 4KiB"):
        parse("4095")
