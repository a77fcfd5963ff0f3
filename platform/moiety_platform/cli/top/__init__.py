"""`moiety top`: engines, classes and tenants as they are now, in a terminal."""
