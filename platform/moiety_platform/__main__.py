"""`python -m moiety_platform`: the gateway alone, configured by the environment (`MOIETY_…`)."""

from __future__ import annotations

import os
import sys

from pydantic import ValidationError

from moiety_platform.auth.pepper import BadPepper
from moiety_platform.gateway import run_gateway
from moiety_platform.listening import AddressUnavailable
from moiety_platform.receipts.signing import BadReceiptKey
from moiety_platform.reloading.source import SettingsSource
from moiety_platform.settings import SECTION, GatewaySettings
from moiety_platform.supervisor.data_dir import PRIVATE_UMASK


def main() -> int:
    """Serve; return the exit code."""
    os.umask(PRIVATE_UMASK)
    try:
        run_gateway(SettingsSource.open(None, SECTION, GatewaySettings.load))
    except (ValidationError, AddressUnavailable, BadPepper, BadReceiptKey) as exc:
        sys.stderr.write(f"{exc}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
