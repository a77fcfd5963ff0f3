"""Errors of the wire.

WireError
└── UndecodableMessage   the bytes are not a message of this protocol version
"""


class WireError(Exception):
    """Base class of this package's errors."""


class UndecodableMessage(WireError):
    """The bytes are not a message that this version of the protocol knows."""
