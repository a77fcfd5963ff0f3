"""Who is calling: API keys and the guard that turns one into a Principal."""
