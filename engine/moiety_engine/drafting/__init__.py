"""A second, small model that drafts what the first one verifies."""
