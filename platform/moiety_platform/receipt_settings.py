"""Settings of signed receipts, after those of quotes and of spot classes."""

from __future__ import annotations

from pathlib import Path

from moiety_platform.reloadable import fixed
from moiety_platform.spot_settings import SpotSettings


class ReceiptSettings(SpotSettings):
    """Settings of quotes, spot classes and signed receipts."""

    receipt_key_file: Path | None = fixed(
        None,
        "File with the private keys that sign receipts, Ed25519 in PEM; the first one signs. If not set, a file in "
        "data_dir, which the first start creates.",
    )
