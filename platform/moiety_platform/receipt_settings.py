"""Settings of signed receipts."""

from __future__ import annotations

from pathlib import Path

from moiety_platform.process_settings import ProcessSettings
from moiety_platform.reloadable import fixed


class ReceiptSettings(ProcessSettings):
    """Settings of signed receipts."""

    receipt_key_file: Path | None = fixed(
        None,
        "File with the private keys that sign receipts, Ed25519 in PEM; the first one signs. If not set, a file in "
        "data_dir, which the first start creates.",
    )
