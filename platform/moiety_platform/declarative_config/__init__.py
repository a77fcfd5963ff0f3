"""Ledger of the objects that files declare, which separates them from manually created ones. Reads no such file."""
