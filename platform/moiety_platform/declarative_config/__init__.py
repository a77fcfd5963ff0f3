"""The ledger of what was declared in a file, so that what was made by hand is told from it. Knows no such file."""
