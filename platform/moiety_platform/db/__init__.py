"""The store: one SQL database, SQLite or PostgreSQL, behind SQLAlchemy 2 async. Knows no domain."""
