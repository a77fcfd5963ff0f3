"""Files of an export: CSV, and Parquet by pyarrow, which is optional. Pure; the same rows give the same bytes.

CSV is UTF-8 with a header and CRLF (RFC 4180); times are ISO 8601 in UTC, missing values are empty.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any

from moiety_platform.usage_exports.focus import COLUMNS, ColumnKind, Value

Rows = Iterable[Mapping[str, Value]]

_FORMULA = re.compile(r"[\s\x00]*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
_COST_DIGITS, _COST_DECIMALS = 38, 9


class ExportFormat(StrEnum):
    CSV = "csv"
    PARQUET = "parquet"


def encode_csv(rows: Rows) -> bytes:
    """Return the rows as CSV."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(COLUMNS), lineterminator="\r\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue().encode()


def encode_parquet(rows: Rows) -> bytes:
    """Return the rows as Parquet: costs as decimals with nine places, times in microseconds of UTC.

    Raises ModuleNotFoundError without pyarrow.
    """
    import pyarrow as pa  # noqa: PLC0415  # optional
    import pyarrow.parquet as pq  # noqa: PLC0415  # optional

    kinds: dict[ColumnKind, Any] = {
        ColumnKind.TEXT: pa.string(),
        ColumnKind.NUMBER: pa.int64(),
        ColumnKind.COST: pa.decimal128(_COST_DIGITS, _COST_DECIMALS),
        ColumnKind.TIME: pa.timestamp("us", tz="UTC"),
    }
    schema = pa.schema([(name, kinds[kind]) for name, kind in COLUMNS.items()])
    data = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), data, compression="zstd")
    return data.getvalue()


def encode(file_format: ExportFormat, rows: Rows) -> bytes:
    """Return the rows as a file of this format."""
    return encode_parquet(rows) if file_format is ExportFormat.PARQUET else encode_csv(rows)


def _cell(value: Value) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, str) and _FORMULA.match(value):
        return "'" + value  # no spreadsheet takes a name for a formula (OWASP, CSV injection)
    return str(value)
