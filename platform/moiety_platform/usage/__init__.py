"""Usage records: exactly one usage row per request, however the request ends."""
