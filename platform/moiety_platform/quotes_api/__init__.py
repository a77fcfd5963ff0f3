"""`POST /v1/quote`: quotes of requests in each class that a key may use."""
