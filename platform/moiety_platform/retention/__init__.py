"""Deletion of expired rows: one service per gateway process, for all tables that grow with traffic."""
