"""The store: one SQL database, SQLite or PostgreSQL, accessed through SQLAlchemy 2 async. Knows no domain."""
