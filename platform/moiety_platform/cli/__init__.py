"""The `moiety` command: it turns command lines into calls. Knows no HTTP framework, no SQL and no torch."""
