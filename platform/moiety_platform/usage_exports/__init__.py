"""Exports of usage: one file of costs for each day in the object store, with FOCUS columns, as CSV or Parquet."""
