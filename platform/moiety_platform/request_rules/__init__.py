"""Rules of the operator that every request reads, as one cached snapshot: prices and routes."""
