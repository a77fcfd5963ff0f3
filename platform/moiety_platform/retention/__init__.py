"""Deletes what is past its time: one service of each gateway process, for all tables that grow with traffic."""
