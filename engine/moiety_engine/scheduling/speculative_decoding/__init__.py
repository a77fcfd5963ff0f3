"""Drafts of what sequences will say next, and whether verifying them pays. A draft changes how many tokens a step
brings, never which."""
