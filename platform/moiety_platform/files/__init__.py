"""Files that tenants upload and download: rows in SQL and contents in the object store, shared by all gateways."""
