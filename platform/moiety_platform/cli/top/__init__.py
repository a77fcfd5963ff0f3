"""Command `moiety top`: the current engines, classes and tenants, in a terminal."""
