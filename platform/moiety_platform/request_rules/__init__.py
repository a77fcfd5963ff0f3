"""Rules of the operator that every request reads, as one cached snapshot: prices, routes and guardrails."""
