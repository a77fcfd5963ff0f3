"""What keeps `moiety serve` from starting or staying up.

SupervisorError
├── DataDirInUse    another serve holds the data directory
├── PortInUse       something listens there already
└── PartFailed      a part ended before it had ever been ready
"""

from __future__ import annotations


class SupervisorError(Exception):
    """Root; the message says what to do next."""


class DataDirInUse(SupervisorError):
    pass


class PortInUse(SupervisorError):
    pass


class PartFailed(SupervisorError):
    pass
