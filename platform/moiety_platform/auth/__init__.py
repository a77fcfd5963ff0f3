"""Who is calling: keys, tokens of an issuer, and the door of the admin API."""
