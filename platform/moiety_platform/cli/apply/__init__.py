"""Command `moiety apply`: declarative configuration of classes, tenants, limits and prices from a file.

document → spec (wanted state of the file) · current (state of the gateway) → plan, a pure function → execution over the
admin API.
"""
