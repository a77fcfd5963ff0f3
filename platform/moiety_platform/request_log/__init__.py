"""Request log: search in the usage rows of all requests, with the trace of each."""
