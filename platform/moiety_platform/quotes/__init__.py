"""Quotes: price, predicted times and promise of a request before it is sent, and credits for broken promises."""
