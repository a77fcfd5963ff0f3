"""Errors of placements.

PlacementError
├── BadLoad       the counts are not what a placement can be made from; the message says what is
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
