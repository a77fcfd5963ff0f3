"""Files that tenants upload and download, kept in SQL, so that every gateway on the database has all of them."""
