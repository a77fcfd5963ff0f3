"""Errors of placements.

PlacementError
├── BadLoad       invalid token counts; the message says what is expected
├── BadNumbers    experts, groups, nodes, ranks and replicas that do not divide; the message says what must divide what
└── TooFewSlots   fewer slots are alive than there are experts; the message says how many are missing
"""


class PlacementError(ValueError):
    """Root of this package's errors."""


class BadLoad(PlacementError):
    pass


class BadNumbers(PlacementError):
    pass


class TooFewSlots(PlacementError):
    pass
