"""Quotes: price, predicted times and guarantee of a request before it is sent, and credits for missed guarantees."""
