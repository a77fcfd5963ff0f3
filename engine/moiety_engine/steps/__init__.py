"""Steps that are looked at closely, for the traces of the requests that run in them."""
