"""The trace store's process: receives spans by OTLP/HTTP, and keeps them in the database for a limited time."""
