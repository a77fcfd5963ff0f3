"""The `moiety` command: what the user types, turned into calls. Knows no HTTP framework, no SQL and no torch."""
