"""Files that tenants upload and fetch, kept in SQL, so that every gateway on the database has all of them."""
