"""The object store: contents of files and adapters in a folder, or in a bucket of S3, GCS or Azure."""
