"""The page of traces: the search, and one trace."""
