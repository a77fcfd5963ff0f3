"""A replica without a server: front and core as one object, for a file of requests and for programs in Python."""
