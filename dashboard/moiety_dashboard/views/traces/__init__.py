"""The page of traces: finding them, and one of them."""
