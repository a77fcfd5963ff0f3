"""Settings of the export of usage."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from pydantic import field_validator

from moiety_platform.process_settings import ProcessSettings
from moiety_platform.reloadable import live


class ExportSettings(ProcessSettings):
    """Settings of the daily export of usage to the object store."""

    usage_export_format: Literal["csv", "parquet"] | None = live(
        None,
        "Format of the daily export of costs with FOCUS columns to the object store: csv, or parquet, which needs the "
        "extra moiety[parquet]. If not set, nothing is exported.",
    )
    usage_export_days: int = live(
        62, "Past days that are exported, and exported again when their usage changes.", ge=1, le=3_650
    )

    @field_validator("usage_export_format")
    @classmethod
    def _check_export_format(cls, value: str | None) -> str | None:
        if value == "parquet" and find_spec("pyarrow") is None:
            raise ValueError("parquet needs pyarrow: pip install 'moiety[parquet]', or set csv")
        return value
