"""The trace store's own process: takes spans by OTLP/HTTP, and keeps them in the database for a while."""
